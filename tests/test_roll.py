"""Loops in place of repetitions."""

from dataclasses import replace

import pytest
from hypothesis import given
from printed import fixture_pairs, parse_program
from strategies import kinds, make_pipeline, pipelines

from ppc.analysis.invariants.program import verify_programs
from ppc.ir.program import Compute, Loop, Microbatch, Save, lines, unroll
from ppc.ir.schedule import parse_action
from ppc.passes.roll import roll

fixtures = fixture_pairs("roll")


@pytest.mark.parametrize("title", fixtures)
def test_fixture(title):
    before, after = fixtures[title]
    rank, actions = parse_program(before)
    program = replace(make_pipeline(1, 1).programs("1f1b")[0], rank=rank, actions=actions)
    assert str(program) == before
    assert str(roll((program,))[0]) == after


@given(pipeline=pipelines(), kind=kinds)
def test_rolled_programs_unroll_to_what_they_were(pipeline, kind):
    programs = pipeline.programs(kind)
    rolled = roll(programs)
    for before, after in zip(programs, rolled, strict=True):
        assert tuple(unroll(after.actions)) == tuple(unroll(before.actions))
        assert all(loop.count == "STEPS" or loop.count > 1 for loop in loops(after.actions))
        assert replace(after, actions=before.actions) == before
    verify_programs(rolled, pipeline.plan, pipeline.units)


def test_strides_are_found():
    """A body for every other microbatch, and backwards in the opposite order."""
    order = ["0F0", "0F2", "0F4", "0F6", "0B6", "0B4", "0B2", "0B0", "0F1", "0F3", "0B3", "0B1"]
    actions = [parse_action(text) for text in order]
    step = tuple(Compute(action, Microbatch(action.microbatch)) for action in actions)
    program = replace(
        make_pipeline(1, 1).programs("1f1b")[0], actions=(Loop("STEPS", step), Save())
    )
    (rolled,) = roll((program,))
    assert outline(rolled) == ("4 x 0F(2*i) | 4 x 0B(-2*i+6) | 2 x 0F(2*i+1) | 2 x 0B(-2*i+3)")
    assert tuple(unroll(rolled.actions)) == (*step, Save())


def loops(actions):
    for action in actions:
        if isinstance(action, Loop):
            yield action
            yield from loops(action.body)


def outline(program):
    """The computes of a step: `0F(0) | 3 x 0F(i+1), 0B(i) | 0B(3)`."""
    (step, _) = program.actions
    parts = []
    for action in step.body:
        inner = action.body if isinstance(action, Loop) else (action,)
        computes = ", ".join(lines(a for a in inner if isinstance(a, Compute)))
        if computes:
            parts.append(f"{action.count} x {computes}" if isinstance(action, Loop) else computes)
    return " | ".join(parts)


@pytest.mark.parametrize(
    ("kind", "stages", "microbatches", "outlines"),
    [
        ("1f1b", 2, 4, ["0F(0) | 3 x 0F(i+1), 0B(i) | 0B(3)", "4 x 1F(i), 1B(i)"]),
        ("gpipe", 2, 4, ["4 x 0F(i) | 4 x 0B(i)", "4 x 1F(i) | 4 x 1B(i)"]),
        ("1f1b", 1, 3, ["3 x 0F(i), 0B(i)"]),
        ("1f1b", 2, 1, ["0F(0) | 0B(0)", "1F(0) | 1B(0)"]),
        (
            "1f1b",
            3,
            4,
            [
                "2 x 0F(i) | 2 x 0F(i+2), 0B(i) | 2 x 0B(i+2)",
                "1F(0) | 3 x 1F(i+1), 1B(i) | 1B(3)",
                "4 x 2F(i), 2B(i)",
            ],
        ),
    ],
)
def test_warmup_steady_state_and_drain_show(kind, stages, microbatches, outlines):
    rolled = roll(make_pipeline(stages, microbatches).programs(kind))
    assert [outline(program) for program in rolled] == outlines
