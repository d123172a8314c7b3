"""The clock: published figures of schedules, transports, deadlocks."""

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import kinds, make_pipeline, meta, pipelines

from ppc.analysis.simulate import Clock, Stuck, by_edge, by_group, simulate
from ppc.ir.program import Collective, Edge
from ppc.ir.schedule import Kind
from ppc.ir.unit import Held, Transfer
from ppc.passes.roll import roll


def even_clock(stages, forward, backward, **kwargs):
    compute = {(s, k): t for s in range(stages) for k, t in ((Kind.F, forward), (Kind.B, backward))}
    return Clock(compute, **kwargs)


# Published: (p-1)(F+B) idle a rank; the figures of torch 2.13's own orders with B twice F.
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("stages", "microbatches", "makespan", "bubble"),
    [(4, 8, 33, 0.2727), (4, 16, 57, 0.1579), (8, 16, 69, 0.3043), (8, 32, 117, 0.1795)],
)
def test_published_figures(kind, stages, microbatches, makespan, bubble):
    programs = make_pipeline(stages, microbatches).programs(kind)
    result = simulate(programs, even_clock(stages, 1.0, 2.0))
    assert result.makespan_s == makespan
    assert result.bubble == pytest.approx(bubble, abs=5e-5)


@given(
    kind=kinds,
    stages=st.integers(1, 6),
    microbatches=st.integers(1, 12),
    forward=st.integers(1, 5),
    backward=st.integers(1, 5),
)
def test_makespan_bubble_and_peaks_are_those_of_the_formulas(
    kind, stages, microbatches, forward, backward
):
    programs = make_pipeline(stages, microbatches).programs(kind)
    result = simulate(programs, even_clock(stages, forward, backward))
    assert result.stuck == ()
    assert result.makespan_s == (microbatches + stages - 1) * (forward + backward)
    idle = result.makespan_s - microbatches * (forward + backward)
    assert idle == (stages - 1) * (forward + backward)
    assert result.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    peaks = [
        microbatches if kind == "gpipe" else min(microbatches, stages - s) for s in range(stages)
    ]
    assert list(result.live) == peaks


@given(pipeline=pipelines(), kind=kinds)
def test_loops_change_nothing(pipeline, kind):
    programs, clock = pipeline.programs(kind), even_clock(6, 1.0, 2.0)
    assert simulate(roll(programs), clock) == simulate(programs, clock)


def test_slots_of_a_small_pipeline():
    result = simulate(make_pipeline(2, 2).programs("1f1b"), even_clock(2, 1.0, 2.0))
    found = [(slot.rank, slot.label, slot.start_s, slot.end_s) for slot in result.slots]
    assert found == [
        (0, "0F0", 0, 1),
        (0, "0F1", 1, 2),
        (0, "0B0", 4, 6),
        (0, "0B1", 7, 9),
        (1, "1F0", 1, 2),
        (1, "1B0", 2, 4),
        (1, "1F1", 4, 5),
        (1, "1B1", 5, 7),
    ]


def test_latency_and_bandwidth_delay_what_waits_for_them():
    programs = make_pipeline(2, 1).programs("1f1b")
    names = ("activations 0->1", "gradients 1->0")
    clock = even_clock(
        2, 1.0, 2.0, latency_s=dict.fromkeys(names, 0.25), transfer_s=dict.fromkeys(names, 0.5)
    )
    assert simulate(programs, clock).makespan_s == 1 + 0.75 + 1 + 2 + 0.75 + 2


def test_messages_of_an_edge_share_its_bandwidth():
    """Six messages of two seconds each; stage 1 takes no time, so that the wire is what counts."""
    programs = make_pipeline(2, 6).programs("gpipe")
    clock = Clock({(0, Kind.F): 1.0}, transfer_s={"activations 0->1": 2.0})
    assert simulate(programs, clock).makespan_s == 1 + 6 * 2
    assert simulate(programs, clock, buffered=True).makespan_s == 1 + 6 * 2
    latency = Clock({(0, Kind.F): 1.0}, latency_s={"activations 0->1": 2.0})
    assert simulate(programs, latency).makespan_s == 6 + 2


def test_a_rendezvous_starts_when_the_receive_is_posted_and_a_buffered_send_at_once():
    """One receive ahead: the message of F1 has its receive when stage 1 takes that of F0, at 11."""
    programs = make_pipeline(2, 3).programs("gpipe")
    clock = Clock({(0, Kind.F): 1.0, (1, Kind.F): 30.0}, transfer_s={"activations 0->1": 10.0})
    rendezvous = simulate(programs, clock, window=0)
    assert starts_of(rendezvous, "0F2") == [22]
    assert starts_of(rendezvous, "1F1") == [41]
    buffered = simulate(programs, clock, window=0, buffered=True)
    assert starts_of(buffered, "0F2") == [2]
    assert starts_of(buffered, "1F1") == [41]


def starts_of(result, label):
    return [slot.start_s for slot in result.slots if slot.label == label]


def test_a_full_window_holds_back_the_next_send():
    programs = make_pipeline(2, 2).programs("gpipe")
    clock = Clock({(0, Kind.F): 1.0}, latency_s={"activations 0->1": 2.0})
    assert starts_of(simulate(programs, clock), "1F1") == [4]
    assert starts_of(simulate(programs, clock, window=1), "1F1") == [5]


def one_way(microbatches):
    """Two stages, the first frozen: no gradients come back, so that only sends hold it up."""
    transfers = (Transfer("x", 0, 1, meta, gradient=False),)
    return make_pipeline(2, microbatches, transfers=transfers).programs("1f1b")


def test_a_step_ends_when_its_sends_are_done():
    clock = Clock({(0, Kind.F): 1.0}, latency_s={"activations 0->1": 5.0})
    assert starts_of(simulate(one_way(1), clock, steps=2), "0F0") == [0, 6]


def test_a_receive_is_not_posted_for_the_next_step():
    clock = Clock({(0, Kind.F): 1.0, (1, Kind.B): 10.0})
    assert starts_of(simulate(one_way(1), clock, steps=3), "0F0") == [0, 1, 11]


def test_collectives_wait_for_all_and_take_their_time():
    tied = (Held("w", "w", (), (0, 1), trainable=True),)
    programs = make_pipeline(2, 1, tied=tied, clip=True).programs("1f1b")
    clock = even_clock(2, 1.0, 2.0, collective_s={"gradient of w": 5.0, "norm": 0.5})
    assert simulate(programs, clock).makespan_s == 6 + 5.5


def test_c43_fifty_steps_finish_in_order_on_gloo():
    programs = make_pipeline(4, 8).programs("1f1b")
    result = simulate(programs, even_clock(4, 1.0, 2.0), steps=50, queue_of=by_edge)
    assert result.stuck == ()
    assert len(result.slots) == 50 * 4 * 16
    # Between steps the last stage waits for the first: each step has its own bubble.
    assert result.makespan_s > 49 * 8 * 3 + 33


def pair_of(edge: Edge) -> frozenset[int]:
    """The communicator that torch makes by default: one for both directions."""
    return frozenset((edge.source, edge.target))


def one(_: Edge) -> str:
    """One communicator for all transfers."""
    return "all"


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_receives_posted_ahead_deadlock_unless_each_edge_has_its_own_communicator(kind):
    """Both directions in one queue: each rank's first receive stands before its first send."""
    for stages in (2, 3, 4, 8):
        for microbatches in (1, 2, 4, 8, 32):
            programs = make_pipeline(stages, microbatches).programs(kind)
            for queue in (by_group, by_edge):
                assert not simulate(programs, Clock({}), queue_of=queue).stuck
            for queue in (pair_of, one):
                assert simulate(programs, Clock({}), queue_of=queue).stuck


def test_a_deadlock_names_ranks_and_instructions():
    programs = make_pipeline(2, 2).programs("1f1b")
    result = simulate(programs, Clock({}), queue_of=pair_of)
    assert result.stuck == (Stuck(0, "Wait gradients 1->0 0"), Stuck(1, "Wait activations 0->1 0"))
    assert str(result.stuck[0]) == "rank 0 waits at Wait gradients 1->0 0"


def test_a_group_is_one_queue_for_transfers_and_collectives():
    """Rank 1 sums with a receive posted on the same communicator, which rank 0 sends later."""
    mine, other = make_pipeline(2, 1).programs("1f1b")
    everyone = Collective("all_reduce", "norm", (0, 1))
    (loop, save) = other.actions
    post, *rest = loop.body
    early = replace(mine, actions=(everyone, *mine.actions))
    late = replace(other, actions=(replace(loop, body=(post, everyone, *rest)), save))
    stuck = simulate((early, late), Clock({})).stuck
    assert [str(rank) for rank in stuck] == [
        "rank 0 waits at Collective all_reduce norm (0, 1)",
        "rank 1 waits at Collective all_reduce norm (0, 1)",
    ]
    assert not simulate((early, late), Clock({}), queue_of=by_edge).stuck


def test_a_large_pipeline_takes_seconds():
    programs = make_pipeline(64, 256).programs("1f1b")
    start = time.process_time()
    result = simulate(programs, even_clock(64, 1.0, 2.0))
    assert result.makespan_s == (256 + 63) * 3
    assert time.process_time() - start < 10
