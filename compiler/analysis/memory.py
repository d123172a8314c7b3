"""Bytes on each rank at the peak of a step, by kind.

The peak is in the steady state, when most microbatches are between their forward and backward:
  parameters   with buffers, a tied one on every stage that needs it
  gradients    of the trainable ones, alive from the first backward to the update
  optimizer    AdamW two moments (three with amsgrad), SGD one with momentum; those of the trainable
  activations  what autograd keeps, by live microbatch; the largest gradient inside a backward, of
               a value or of a parameter before it is added to the others
  buffers      the messages: by live microbatch what was received and what was sent, for both are
               kept until their gradients are done; one receive posted ahead; two gradients each
               way, the one in use and the one under way
Temporaries of the update are left out: activations are gone by then.

Everything is a function of (stage, first layer, layer after the last), so that the planner can look
at all runs of layers at once and measures what it will be measured by.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import EllipsisType

import numpy as np
from numpy.typing import NDArray

from ..ir.graph import Graph
from ..ir.plan import Plan
from ..ir.report import Memory
from ..ir.spec import AdamW, Optimizer, Spec
from .cost import microbatch_size
from .dataflow import flows, holders, metas

Bytes = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of every run of layers: each array is indexed by [first, stop]."""

    state: Bytes
    trainable: Bytes
    saved: Bytes
    """By one microbatch."""
    largest: Bytes
    """The largest gradient computed inside."""
    received: Bytes
    sent: Bytes
    """Activations of one microbatch."""
    gradients_received: Bytes
    gradients_sent: Bytes


def measure_memory(graph: Graph, plan: Plan, spec: Spec) -> tuple[Memory, ...]:
    """The peak on each rank of the plan, by rank."""
    footprint = measure_runs(graph, microbatch_size(spec))
    found = []
    for stage in plan.stages:
        run = (stage.layers[0], stage.layers[-1] + 1)
        memory = stage_memory(footprint, spec, stage.index, run)
        found += [replace(memory, rank=rank) for rank in stage.mesh.ranks]
    return tuple(sorted(found, key=lambda memory: memory.rank))


def stage_memory(footprint: Footprint, spec: Spec, stage: int, run: tuple[int, int]) -> Memory:
    """The peak of layers run[0] .. run[1] - 1 as this stage, on the rank of its number."""
    parameters, gradients, optimizer, activations, buffers = map(
        int, peak_bytes(footprint, spec, stage, run)
    )
    return Memory(
        rank=stage,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        buffers=buffers,
        capacity=spec.cluster.device.memory,
    )


def live_microbatches(spec: Spec, stage: int) -> int:
    """Most microbatches of a stage between their forward and their backward."""
    parallel = spec.parallel
    if parallel.schedule == "gpipe":
        return parallel.microbatches
    return min(parallel.microbatches, parallel.pipeline - stage)


def peak_bytes(
    footprint: Footprint, spec: Spec, stage: int, run: tuple[int, int] | EllipsisType
) -> tuple[Bytes, Bytes, Bytes, Bytes, Bytes]:
    """Parameters, gradients, optimizer, activations, buffers of a run of layers as this stage.

    With `...` for the run, of all runs.
    """
    live = live_microbatches(spec, stage)
    trainable = footprint.trainable[run]
    activations = live * footprint.saved[run] + footprint.largest[run]
    messages = (live + 1) * footprint.received[run] + live * footprint.sent[run]
    messages = messages + 2 * (footprint.gradients_received[run] + footprint.gradients_sent[run])
    moments = optimizer_copies(spec.train.optimizer) * trainable
    return footprint.state[run], trainable, moments, activations, messages


def optimizer_copies(optimizer: Optimizer) -> int:
    """Tensors that the optimizer keeps for each trainable parameter."""
    if isinstance(optimizer, AdamW):
        return 3 if optimizer.amsgrad else 2
    return 1 if optimizer.momentum else 0


def measure_runs(graph: Graph, samples: int) -> Footprint:
    """The footprint at a microbatch of this many samples."""
    held, moving, size = holders(graph), flows(graph), len(graph.layers)
    states = [(p.meta, Reach(-1, held[f], p.meta.bytes.at(1))) for f, p in graph.parameters.items()]
    values = [(f.meta, Reach(f.layer, f.readers, f.meta.bytes.at(samples))) for f in moving]
    gradients = [reach for meta, reach in values if meta.requires_grad]
    activations = [reach for _, reach in values]
    return Footprint(
        state=entering(size, [reach for _, reach in states]),
        trainable=entering(size, [reach for meta, reach in states if meta.requires_grad]),
        saved=sums([layer.activation_bytes.at(samples) for layer in graph.layers]),
        largest=largest(largest_gradients(graph, samples)),
        received=entering(size, activations),
        sent=leaving(size, activations),
        gradients_received=leaving(size, gradients),
        gradients_sent=entering(size, gradients),
    )


def largest_gradients(graph: Graph, samples: int) -> list[int]:
    """By layer the bytes of the largest value or parameter whose gradient is computed."""
    known, ops = metas(graph), {op.name: op for op in graph.ops}
    found = []
    for layer in graph.layers:
        made = [name for op in layer.ops for name in ops[op].outputs if name]
        own = [known[name] for name in (*made, *layer.parameters) if known[name].requires_grad]
        found.append(max((meta.bytes.at(samples) for meta in own), default=0))
    return found


@dataclass(frozen=True, slots=True)
class Reach:
    """Bytes made by one layer (-1: there from the start) and read by others."""

    maker: int
    readers: tuple[int, ...]
    size: int


def entering(size: int, reaches: Iterable[Reach]) -> Bytes:
    """By [first, stop]: bytes made before the run and read inside it."""
    result = np.zeros((size + 1, size + 1), np.int64)
    for (maker, readers), total in collected(reaches).items():
        last = maker
        for reader in readers:  # the first reader inside runs that begin after `last`
            result[last + 1 : reader + 1, reader + 1 :] += total
            last = reader
    return result


def leaving(size: int, reaches: Iterable[Reach]) -> Bytes:
    """By [first, stop]: bytes made inside the run and read after it."""
    result = np.zeros((size + 1, size + 1), np.int64)
    for (maker, readers), total in collected(reaches).items():
        result[: maker + 1, maker + 1 : readers[-1] + 1] += total
    return result


def collected(reaches: Iterable[Reach]) -> Counter[tuple[int, tuple[int, ...]]]:
    """Bytes by (maker, readers): many tensors of a layer go the same way."""
    total = Counter[tuple[int, tuple[int, ...]]]()
    for reach in reaches:
        total[reach.maker, reach.readers] += reach.size
    return total


def sums(sizes: list[int]) -> Bytes:
    """By [first, stop]: the sum of a run."""
    prefix: Bytes = np.cumsum([0, *sizes], dtype=np.int64)
    return prefix[None, :] - prefix[:, None]


def largest(sizes: list[int]) -> Bytes:
    """By [first, stop]: the largest of a run, 0 where stop is not after first."""
    result = np.zeros((len(sizes) + 1, len(sizes) + 1), np.int64)
    for first in range(len(sizes)):
        result[first, first + 1 :] = np.maximum.accumulate(sizes[first:])
    return result
