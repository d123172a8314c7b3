"""A step's text fits every pipeline's program, and none whose transfers stand elsewhere."""

from dataclasses import replace

import pytest
from hypothesis import given
from strategies import kinds, make_pipeline, pipelines

from ppc.emit.pattern import check_pattern
from ppc.errors import InternalError
from ppc.ir.program import Compute, Post, Send, Wait
from ppc.passes.roll import roll


def body(program):
    return program.actions[0].body


@given(pipeline=pipelines(), kind=kinds)
def test_every_pipeline_fits(pipeline, kind):
    programs = pipeline.programs(kind)
    for program in (*programs, *roll(programs)):
        check_pattern(program, body(program))


@pytest.mark.parametrize(
    ("instruction", "message"),
    [(Post, "without a Post before it"), (Wait, "not ("), (Send, "not ("), (Compute, "not (")],
)
def test_one_left_out_is_refused(instruction, message):
    program = make_pipeline(2, 3).programs("1f1b")[1]
    step = list(body(program))
    last = max(i for i, item in enumerate(step) if isinstance(item, instruction))
    del step[last]
    with pytest.raises(InternalError) as error:
        check_pattern(program, step)
    assert message in str(error.value)


def test_a_wait_on_another_edge_is_refused():
    program = make_pipeline(2, 3).programs("1f1b")[0]
    step = list(body(program))
    at = next(i for i, item in enumerate(step) if isinstance(item, Wait))
    step[at - 1 : at + 1] = [replace(item, edge="elsewhere") for item in step[at - 1 : at + 1]]
    with pytest.raises(InternalError, match="elsewhere"):
        check_pattern(program, step)
