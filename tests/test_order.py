"""Compute orders against their published definitions, and against torch's own check."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import kinds, make_pipeline

from ppc.analysis.invariants.schedule import verify_schedule

sizes = {"stages": st.integers(1, 6), "microbatches": st.integers(1, 12)}


def test_gpipe_runs_all_forwards_first():
    schedule = make_pipeline(2, 3).order("gpipe")
    assert str(schedule) == ("rank 0 | 0F0 0F1 0F2 0B0 0B1 0B2\nrank 1 | 1F0 1F1 1F2 1B0 1B1 1B2\n")


def test_1f1b_alternates_after_its_warmup():
    schedule = make_pipeline(3, 4).order("1f1b")
    assert str(schedule) == (
        "rank 0 | 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n"
        "rank 1 | 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n"
        "rank 2 | 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3\n"
    )


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_c20_fewer_microbatches_than_stages(kind, microbatches):
    pipeline = make_pipeline(3, microbatches)
    schedule = pipeline.order(kind)
    verify_schedule(schedule, pipeline.plan)
    assert [len(row.actions) for row in schedule.rows] == [2 * microbatches] * 3


@given(kind=kinds, **sizes)
def test_every_order_verifies_flushes_and_has_the_peak_of_its_formula(kind, stages, microbatches):
    pipeline = make_pipeline(stages, microbatches)
    schedule = pipeline.order(kind)
    verify_schedule(schedule, pipeline.plan)
    for stage, row in enumerate(schedule.rows):
        assert row.warmup == row.drain == ()
        backwards = [a.microbatch for a in row.period if a.kind == "B"]
        assert backwards == list(range(microbatches))
        peak = microbatches if kind == "gpipe" else min(microbatches, stages - stage)
        assert row.live == peak


def test_rows_come_in_the_order_of_ranks():
    schedule = make_pipeline(3, 1, ranks=(2, 0, 1)).order("1f1b")
    assert [(row.rank, row.period[0].stage) for row in schedule.rows] == [(0, 1), (1, 2), (2, 0)]


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_torch_accepts_every_order(kind):
    from torch.distributed.pipelining.schedules import _Action, _validate_schedule

    for stages in range(1, 7):
        for microbatches in range(1, 13):
            schedule = make_pipeline(stages, microbatches).order(kind)
            actions = {
                row.rank: [_Action.from_str(str(action)) for action in row.actions]
                for row in schedule.rows
            }
            ranks = _validate_schedule(actions, stages, stages, microbatches)
            assert ranks == {stage: stage for stage in range(stages)}
