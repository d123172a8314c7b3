"""The fastest stages, with or without a bound on memory, and what to change if none fit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ...analysis.cost import Costs, microbatch_size
from ...analysis.dataflow import cut_bytes
from ...analysis.forbidden import forbidden_runs, lone_readers
from ...analysis.kept import sums
from ...analysis.memory import (
    Footprint,
    layer_s,
    measure_runs,
    peak_bytes,
    stage_memory,
)
from ...errors import PlanError
from ...ir.graph import Graph
from ...ir.report import Memory, show_bytes
from ...ir.spec import Parallel, Spec
from .partition import Matrix, partition, smallest_largest

RESOLUTION = 2**30
"""Times are whole multiples of this part of their sum, so that equal stages are exactly equal."""


def fastest(
    graph: Graph, costs: Costs, spec: Spec, footprint: Footprint | None = None
) -> tuple[int, ...] | None:
    """Where the stages of the smallest largest time begin; of those that fit, given a footprint.

    The time is the stage's own: transfers overlap compute, so a step is bounded by the slowest
    stage as long as a message takes less than a microbatch does. What crosses the cuts decides
    between plans of equal times only.
    """
    whole = max(sum(costs.layer_s), 1e-30) / RESOLUTION
    capacity, forbidden = spec.cluster.device.memory, forbidden_runs(graph)

    def cost(stage: int) -> Matrix:
        seconds = layer_s(costs, spec, stage)
        times = sums([round(s / whole) for s in seconds]).astype(np.float64)
        times = np.where(forbidden, np.inf, times)
        if footprint is None:
            return times
        return np.where(total_bytes(footprint, spec, stage) <= capacity, times, np.inf)

    return partition(cost, spec.parallel.pipeline, cut_bytes(graph, costs.microbatch_size))


def leanest(graph: Graph, spec: Spec) -> tuple[int, ...]:
    """Where the stages of the smallest largest demand for memory begin."""
    cost, layers = demand(graph, spec), len(graph.layers)
    return partition(cost, spec.parallel.pipeline, [0] * layers) or ()  # some are allowed


def refuse_parted(graph: Graph, spec: Spec) -> PlanError:
    """Why no stages are allowed, however much memory there is; and how many are."""
    size, forbidden = len(graph.layers), forbidden_runs(graph)
    costs = np.where(forbidden, np.inf, 0.0)
    fewer = range(spec.parallel.pipeline - 1, 0, -1)
    most = next(n for n in fewer if np.isfinite(smallest_largest(lambda _: costs, n, size)))
    names = ", ".join(lone_readers(graph)) or "parameters"
    message = (
        f"no {spec.parallel.pipeline} stages can be cut: each is to train something, and none may "
        f"read {names} without gradient while another trains it"
    )
    return PlanError(message, spec.at("parallel.pipeline"), f"pipeline: {most}")


def demand(graph: Graph, spec: Spec) -> Callable[[int], Matrix]:
    """By stage the bytes at the peak of every run of layers."""
    footprint, forbidden = measure_runs(graph, microbatch_size(spec)), forbidden_runs(graph)
    return lambda stage: np.where(forbidden, np.inf, total_bytes(footprint, spec, stage))


def total_bytes(footprint: Footprint, spec: Spec, stage: int) -> Matrix:
    """Bytes at the peak of every run of layers as this stage."""
    total: Matrix = np.sum(peak_bytes(footprint, spec, stage, ...), axis=0).astype(np.float64)
    return total


def refuse(graph: Graph, spec: Spec, starts: Sequence[int]) -> PlanError:
    """Why these stages do not fit: the one that asks most, how much too much, and what would do."""
    footprint = measure_runs(graph, microbatch_size(spec))
    runs = list(pairwise([*starts, len(graph.layers)]))
    memories = [stage_memory(footprint, spec, stage, run) for stage, run in enumerate(runs)]
    worst = max(memories, key=lambda memory: memory.total)
    first, stop = runs[worst.rank]
    change, field = remedy(graph, spec) or (
        f"device: {{memory: {-(-worst.total // 2**20)}MiB}}, or a smaller model",
        "cluster.device",
    )
    names = f"{graph.layers[first].path or 'root'} to {graph.layers[stop - 1].path or 'root'}"
    message = f"stage {worst.rank} (layers {names}) needs {shortage(worst)}"
    return PlanError(message, spec.at(field), change)


def shortage(memory: Memory) -> str:
    """`5.0 GiB, 1.0 GiB (1073741824 bytes) more than the device has: parameters 1.0 GiB, ...`"""
    over = memory.total - memory.capacity
    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers")
    parts = ", ".join(f"{kind} {show_bytes(getattr(memory, kind))}" for kind in kinds)
    return (
        f"{show_bytes(memory.total)}, {show_bytes(over)} ({over} bytes) more than the device has"
        f" ({show_bytes(memory.capacity)}): {parts}"
    )


def remedy(graph: Graph, spec: Spec) -> tuple[str, str] | None:
    """The first change of the spec under which a plan fits: what to write, and its field."""
    layers, memory = len(graph.layers), spec.cluster.device.memory
    for change, field, parallel in alternatives(spec, layers):
        cost = demand(graph, replace(spec, parallel=parallel))
        if smallest_largest(cost, parallel.pipeline, layers) <= memory:
            return change, field
    return None


def alternatives(spec: Spec, layers: int) -> Iterator[tuple[str, str, Parallel]]:
    """Changes that need less memory, the cheapest first: (what to write, its field, the result)."""
    parallel, also = replace(spec.parallel, cuts="auto"), ""
    if spec.parallel.cuts != "auto":
        yield "cuts: auto", "parallel.cuts", parallel
        also = " and cuts: auto"
    if parallel.schedule == "gpipe":
        yield f"schedule: 1f1b{also}", "parallel.schedule", replace(parallel, schedule="1f1b")
    most = spec.train.global_batch // parallel.data
    count = parallel.microbatches
    while count < most:
        count = min(2 * count, most)
        more = replace(parallel, microbatches=count)
        yield f"microbatches: {count}{also}", "parallel.microbatches", more
    for change, pipeline, data in longer_pipelines(spec, layers):
        more = replace(parallel, pipeline=pipeline, data=data)
        yield f"{change}{also}", "parallel.pipeline", more


def longer_pipelines(spec: Spec, layers: int) -> Iterator[tuple[str, int, int]]:
    """More stages: on devices that are free, in place of replicas, on more nodes. What to write,
    then both degrees."""
    pipeline, data, cluster = spec.parallel.pipeline, spec.parallel.data, spec.cluster
    for stages in range(pipeline + 1, min(cluster.num_devices // data, layers) + 1):
        yield f"pipeline: {stages}", stages, data
    for fewer in range(data - 1, 0, -1):
        stages, rest = divmod(cluster.num_devices, fewer)
        if not rest and stages <= layers:
            yield f"pipeline: {stages}, data: {fewer}", stages, fewer
    for times in range(2, layers // pipeline + 1):
        nodes, stages = times * cluster.nodes, times * pipeline
        yield f"pipeline: {stages}, on nodes: {nodes}", stages, data
