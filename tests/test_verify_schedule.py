"""A schedule that breaks a promise is refused, with an arrow at the slot."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import kinds, make_pipeline

from ppc.analysis.invariants.schedule import verify_schedule
from ppc.errors import InternalError
from ppc.ir.schedule import Row, Schedule, parse_action

plan = make_pipeline(2, 2).plan


def printed(*rows, microbatches=2):
    return Schedule(
        "printed",
        microbatches,
        tuple(Row(r, (), tuple(map(parse_action, row.split())), ()) for r, row in enumerate(rows)),
    )


def test_the_whole_message():
    with pytest.raises(InternalError) as error:
        verify_schedule(printed("0F0 0F1 0B0 0B1", "1F0 1B0 1B1 1F1"), plan)
    assert str(error.value) == (
        "schedule printed, rank 1, slot 2: 1B1 comes before its F\n"
        "  rank   0 | 0F0 0F1 0B0 0B1\n"
        "  rank   1 | 1F0 1B0 1B1 1F1\n"
        "                     ^"
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0F0 0F0 0F1 0B0 0B1", "rank 0, slot 1: 0F0 runs twice"),
        ("0F0 0F1 0B0", "rank 0, slot 3: 0B1 is missing"),
        ("0F0 0B0", "rank 0, slot 2: 0F1 is missing"),
        ("0F0 0F1 0B0 0B2", "rank 0, slot 3: 0B2 is of no microbatch; there are 2"),
        ("0F0 0F1 1B0 0B1", "rank 0, slot 2: 1B0 is of a stage that rank 0 does not hold"),
        ("0F0 0F1 2B0 0B1", "rank 0, slot 2: 2B0 is of no stage; there are 2"),
        ("0F0v1 0F1 0B0 0B1", "rank 0, slot 0: 0F0v1 uses a weight version that is gone"),
        ("0F0 0F1 0B0 0I0 0B1", "rank 0, slot 3: 0I0 is a second backward"),
        ("0F0 0F1 0I0 0B1", "rank 0, slot 4: 0W0 is missing"),
        ("0F0 0F1 0W0 0I0 0B1", "rank 0, slot 2: 0W0 comes before its I"),
        ("0F0 0F1 0B0 0B1 0Reduce0", "rank 0, slot 4: 0Reduce0 is no compute"),
        ("0F0 0B0 0F1 0B1", None),
        ("0F0 0F1 0I0 0I1 0W0 0W1", None),
    ],
)
def test_faults(row, message):
    schedule = printed(row, "1F0 1B0 1F1 1B1")
    if message is None:
        verify_schedule(schedule, plan)
        return
    with pytest.raises(InternalError) as error:
        verify_schedule(schedule, plan)
    assert message in str(error.value)


def test_a_deadlock_is_found():
    with pytest.raises(InternalError, match="rank 0, slot 1: 0B0 waits for ever for 1B0"):
        verify_schedule(printed("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), plan)


def test_rows_and_microbatches_must_be_the_plans():
    with pytest.raises(InternalError, match=r"rows for ranks \[0\], not the plan's"):
        verify_schedule(printed("0F0 0F1 0B0 0B1"), plan)
    with pytest.raises(InternalError, match="has 3 microbatches, the plan 2"):
        verify_schedule(printed("0F0", "1F0", microbatches=3), plan)


def test_every_replica_of_a_stage_runs_all_of_its_microbatches():
    replicas = make_pipeline(1, 2, replicas=2).plan
    verify_schedule(printed("0F0 0F1 0B0 0B1", "0F0 0F1 0B0 0B1"), replicas)
    with pytest.raises(InternalError, match="rank 1, slot 0: this is not the order of rank 0"):
        verify_schedule(printed("0F0 0F1 0B0 0B1", "0F0 0B0 0F1 0B1"), replicas)
    with pytest.raises(InternalError, match="rank 0, slot 0: 0F0 is missing"):
        verify_schedule(printed("", ""), replicas)
    with pytest.raises(InternalError, match="rank 1, slot 2: 0F1 is missing"):
        verify_schedule(printed("0F0 0F1 0B0 0B1", "0F0 0B0"), replicas)


@given(data=st.data(), kind=kinds, stages=st.integers(1, 6), microbatches=st.integers(1, 12))
def test_dropped_duplicated_and_readdressed_actions_are_refused(data, kind, stages, microbatches):
    pipeline = make_pipeline(stages, microbatches)
    schedule = pipeline.order(kind)
    row = data.draw(st.sampled_from(schedule.rows))
    slot = data.draw(st.integers(0, len(row.period) - 1))
    action = row.period[slot]
    other = data.draw(st.integers(0, 12).filter(lambda m: m != action.microbatch))
    stage = data.draw(st.integers(0, 6).filter(lambda s: s != action.stage))
    changed = data.draw(
        st.sampled_from(
            [
                (),
                (action, action),
                (replace(action, microbatch=other),),
                (replace(action, stage=stage),),
                (replace(action, kind="B" if action.kind == "F" else "F"),),
            ]
        )
    )
    period = (*row.period[:slot], *changed, *row.period[slot + 1 :])
    rows = tuple(replace(r, period=period) if r is row else r for r in schedule.rows)
    with pytest.raises(InternalError):
        verify_schedule(replace(schedule, rows=rows), pipeline.plan)
