"""Transfers and collectives around the computes."""

import re
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from printed import fixture_pairs, parse_transfer
from strategies import kinds, make_pipeline, meta, pipelines

from ppc.analysis.invariants.program import verify_programs
from ppc.analysis.invariants.schedule import verify_schedule
from ppc.analysis.simulate import Clock, by_edge, by_group, simulate
from ppc.ir.schedule import Kind, Row, Schedule, parse_action
from ppc.ir.unit import Held, Transfer
from ppc.passes.communicate import communicate, connect, receives_ahead

fixtures = fixture_pairs("communicate")


def read_input(text):
    """Transfers, held parameters, `clip` and the rows of the schedule."""
    lines = text.splitlines()
    rows = [re.fullmatch(r"rank (\d+) \| (.*)", line) for line in lines]
    periods = {int(m[1]): tuple(map(parse_action, m[2].split())) for m in rows if m}
    tied = []
    for match in filter(None, (re.fullmatch(r"held (\S+): (.*?)(, frozen)?", s) for s in lines)):
        stages = tuple(map(int, match[2].split(", ")))
        tied.append(Held(match[1], match[1], (), stages, trainable=not match[3]))
    transfers = tuple(parse_transfer(line) for line in lines if " stage " in line)
    microbatches = 1 + max(action.microbatch for action in periods[0])
    pipeline = make_pipeline(
        len(periods), microbatches, tied=tuple(tied), transfers=transfers, clip="clip" in lines
    )
    schedule_rows = tuple(Row(rank, (), period, ()) for rank, period in periods.items())
    return pipeline, Schedule("printed", microbatches, schedule_rows)


@pytest.mark.parametrize("title", fixtures)
def test_fixture(title):
    before, after = fixtures[title]
    pipeline, schedule = read_input(before)
    programs = communicate(pipeline.plan, pipeline.units, schedule, clip=pipeline.clip)
    assert "\n".join(map(str, programs)) == after


@given(pipeline=pipelines(), kind=kinds)
def test_every_pipeline_verifies(pipeline, kind):
    verify_schedule(pipeline.order(kind), pipeline.plan)
    verify_programs(pipeline.programs(kind), pipeline.plan, pipeline.units)


def uneven_cases():
    """Programs of random pipelines, and a clock on which computes and messages are very uneven."""
    random = Random(0)
    for _ in range(200):
        stages, microbatches = random.randint(2, 6), random.randint(2, 12)
        pairs = [(s, t) for s in range(stages) for t in range(s + 2, stages)]
        skips = tuple(random.sample(pairs, random.randint(0, min(3, len(pairs)))))
        pipeline = make_pipeline(stages, microbatches, skips=skips)
        programs = pipeline.programs(random.choice(["gpipe", "1f1b"]))
        computes = [(s, kind) for s in range(stages) for kind in (Kind.F, Kind.B)]
        edges = {edge.name for program in programs for edge in program.edges}
        latency = {name: random.choice([0, 0, 3, 20]) for name in sorted(edges)}
        clock = Clock({key: random.choice([0, 1, 1, 5, 9, 30]) for key in computes}, latency)
        yield programs, clock, simulate(programs, clock, window=microbatches + 1)


def with_windows(programs, change):
    return tuple(
        replace(p, edges=tuple(replace(e, window=change(e.window)) for e in p.edges))
        for p in programs
    )


def test_no_send_waits_for_its_window_and_with_less_some_would():
    """(A frozen stage may wait: no gradients come back to it, so it runs ahead.)"""
    cases = list(uneven_cases())
    assert all(simulate(programs, clock) == free for programs, clock, free in cases)
    less = [(with_windows(p, lambda w: max(1, w - 1)), clock, free) for p, clock, free in cases]
    assert any(simulate(programs, clock) != free for programs, clock, free in less)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_skips_of_every_length_finish_if_every_send_waits(kind):
    for stages in range(2, 9):
        skips = tuple((s, t) for s in range(stages) for t in range(s + 2, stages))
        for microbatches in (1, 2, 5, 16):
            programs = make_pipeline(stages, microbatches, skips=skips).programs(kind)
            assert not simulate(programs, Clock({}), window=0, queue_of=by_group).stuck
            assert not simulate(programs, Clock({}), window=0, queue_of=by_edge).stuck


def test_a_long_skip_needs_a_second_receive_ahead(monkeypatch):
    assert [receives_ahead(distance) for distance in (1, 2, 3, 4, 5)] == [1, 1, 2, 2, 3]
    monkeypatch.setattr("ppc.passes.communicate.receives_ahead", lambda _: 1)
    programs = make_pipeline(4, 8, skips=((0, 3),)).programs("1f1b")
    assert [stuck.rank for stuck in simulate(programs, Clock({}), window=0).stuck] == [0, 1, 2, 3]


def test_c6_a_skip_has_its_own_edge_and_its_own_gradients():
    pipeline = make_pipeline(3, 2, skips=((0, 2),))
    edges = [edge.name for edge in pipeline.programs("1f1b")[0].edges]
    assert edges == ["activations 0->1", "gradients 1->0", "activations 0->2", "gradients 2->0"]


def test_no_more_receives_are_posted_ahead_than_messages_come():
    edges = make_pipeline(4, 1, skips=((0, 3),)).programs("1f1b")[0].edges
    assert [edge.ahead for edge in edges] == [1, 1, 1, 1]


def test_only_values_with_a_gradient_come_back():
    transfers = (
        Transfer("x", 0, 1, meta, gradient=True),
        Transfer("m", 0, 1, meta, gradient=False),
    )
    units = make_pipeline(2, 1, transfers=transfers).units
    (route,) = connect(units, live={0: 1, 1: 1}, microbatches=1)
    assert [name for name, _ in route.activations.values] == ["x", "m"]
    assert [name for name, _ in route.gradients.values] == ["x"]


def test_stages_on_one_rank_need_no_edge():
    units = tuple(replace(unit, rank=0) for unit in make_pipeline(2, 1).units)
    assert connect(units, live={0: 1}, microbatches=1) == ()


def test_all_ranks_make_the_same_groups():
    tied = (
        Held("a", "a", (), (0, 2), trainable=True),
        Held("b", "b", (), (1, 3), trainable=True),
        Held("c", "c", (), (0, 1, 2, 3), trainable=True),
    )
    programs = make_pipeline(4, 1, tied=tied, clip=True).programs("1f1b")
    chain = ((0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2))
    assert {program.groups for program in programs} == {(*chain, (0, 2), (1, 3), (0, 1, 2, 3))}


def test_coords_and_stages_follow_the_plan():
    programs = make_pipeline(3, 1, ranks=(2, 0, 1)).programs("1f1b")
    assert [(p.rank, p.stages, dict(p.coords)) for p in programs] == [
        (0, (1,), {"pipeline": 1}),
        (1, (2,), {"pipeline": 2}),
        (2, (0,), {"pipeline": 0}),
    ]
    assert [edge.name for edge in programs[2].edges] == ["activations 0->1", "gradients 1->0"]
    assert [(edge.source, edge.target) for edge in programs[2].edges] == [(2, 0), (0, 2)]
