"""Runs that are nothing to cut around, or must not be cut apart, joined to others."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from ...analysis.dataflow import crossing_bytes, operands
from ...ir.graph import CallId, Graph
from .walk import CALL_SHARE, Run


def join_glue(graph: Graph, runs: Sequence[Run], weights: Sequence[int]) -> list[Run]:
    """Each run of glue joined to the run before or after it; glue alone makes one loose run."""
    reads, crossing = operands(graph), crossing_bytes(graph)
    glue = [is_glue(graph, run, reads, weights) for run in runs]
    before = [
        glue[at]
        and at > 0
        and (at + 1 == len(runs) or joins_before(graph, runs, at, reads, crossing))
        for at in range(len(runs))
    ]
    starts = [
        at
        for at in range(len(runs))
        if at == 0 or not (before[at] or (glue[at - 1] and not before[at - 1]))
    ]
    joined = []
    for first, stop in pairwise([*starts, len(runs)]):
        named = next((at for at in range(first, stop) if not glue[at]), first)
        joined.append(replace(runs[named], start=runs[first].start, stop=runs[stop - 1].stop))
    return joined


def is_glue(
    graph: Graph, run: Run, reads: Sequence[tuple[str, ...]], weights: Sequence[int]
) -> bool:
    """Loose ops without parameter, randomness or FLOPs.

    A random op stays apart: it is seeded by its own layer, never by that of another call. In a
    model without FLOPs, where bytes are weighed, glue is at most as large as a call that is always
    one layer.
    """
    span = range(run.start, run.stop)
    if run.whole or any(graph.ops[at].random or graph.ops[at].flops.at(1) for at in span):
        return False
    states = [
        graph.parameters[name] for at in span for name in reads[at] if name in graph.parameters
    ]
    weight = sum(weights[at] for at in span)
    return all(state.buffer for state in states) and weight * CALL_SHARE <= sum(weights)


def joins_before(
    graph: Graph,
    runs: Sequence[Run],
    at: int,
    reads: Sequence[tuple[str, ...]],
    crossing: Sequence[int],
) -> bool:
    """Whether glue between two runs joins the one before it.

    It stays in its own module call if just one neighbour is there. Else it goes where the cut that
    is left carries fewer bytes: a sum joins the last of its terms, a mask joins what it masks. Else
    it stays with what it reads.
    """
    before, run, after = runs[at - 1], runs[at], runs[at + 1]
    inside = [is_within(neighbour.owner, run.owner) for neighbour in (before, after)]
    if inside[0] != inside[1]:
        return inside[0]
    if crossing[run.start] != crossing[run.stop]:
        return crossing[run.start] > crossing[run.stop]
    made = {name for op in graph.ops[before.start : before.stop] for name in op.outputs}
    return any(not made.isdisjoint(reads[op]) for op in range(run.start, run.stop))


def is_within(call: CallId, around: CallId) -> bool:
    """Whether a call lies in another, by their paths."""
    return call == around or not around[0] or call[0].startswith(f"{around[0]}.")


def join_written(runs: Iterable[Run], spans: Iterable[tuple[int, int]]) -> list[Run]:
    """Runs joined until each span lies within one; a joined run is loose ops of its first call."""
    joined: list[Run] = []
    spans = list(spans)
    for run in runs:
        if any(first < run.start <= last for first, last in spans):
            joined[-1] = replace(joined[-1], whole=False, stop=run.stop)
        else:
            joined.append(run)
    return joined
