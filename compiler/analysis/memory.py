"""Bytes on each rank at the peak of a step, by kind.

The peak is in the steady state, when most microbatches are between their forward and backward:
  parameters   with buffers, a tied one on every stage that needs it
  gradients    of the trainable ones, alive from the first backward to the update
  optimizer    what its class keeps of the trainable ones: AdamW two moments, Adafactor means
               of rows and columns
  activations  what autograd keeps, by live microbatch, or of one where the stage runs again before
               its backward; fields of the data, of which microbatches are views, by batch, and
               those that are whole, once; what was received is among the buffers. What a call that
               runs again has above that; the largest gradient inside a backward, of a value or of
               a parameter before it is added
  buffers      the messages: by live microbatch what was received and what was sent, for both are
               kept until their gradients are done; on each edge the receives posted ahead; of
               gradients one in use and as many ahead or under way. On GPUs NCCL's own, for each
               process group
Temporaries of the update are left out: activations are gone by then.

Everything is a function of (stage, first part, part after the last). The planner's parts are
layers, so that it can look at all runs of them at once. A plan's parts are its stages: then the
number of edges, and of receives ahead, is exact. The planner takes the most that its layers could
need, which is the same wherever values go from each layer to the next.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import EllipsisType

import numpy as np

from ..ir.graph import Graph
from ..ir.plan import Plan
from ..ir.report import Memory
from ..ir.spec import Spec
from .cost import Costs, microbatch_size
from .dataflow import flows, holders, metas
from .kept import again_above, measure_kept
from .moments import factored_bytes, optimizer_copies
from .reach import (
    Bytes,
    Reach,
    divided,
    entering,
    leaving,
    makers_before,
    pairs_of,
    readers_after,
)
from .transfer import receives_ahead

COMMUNICATOR_BYTES = 100 * 2**20
"""Device memory of a communicator, in order of magnitude: NCCL makes one for each process group
that a rank is in. It grows with the channels, so with the links' bandwidth (NVIDIA/nccl issues 986
and 964: there groups that sum take five times as much); NCCL_MAX_NCHANNELS bounds it."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of every run of parts: each array is indexed by [first, stop]."""

    state: Bytes
    trainable: Bytes
    factored: Bytes
    """What Adafactor keeps of the trainable ones."""
    saved: Bytes
    """By one microbatch."""
    fields: Bytes
    """By all microbatches of a sample of each: of the fields of the data that are kept."""
    whole: Bytes
    """Of the fields that all microbatches take whole, and that are kept."""
    again: Bytes
    """By the largest call that runs again in a backward, while it does, above all that is kept."""
    largest: Bytes
    """The largest gradient computed inside."""
    received: Bytes
    sent: Bytes
    """Activations of one microbatch."""
    gradients_received: Bytes
    """One for each part that sends it."""
    gradients_sent: Bytes
    edges_before: Bytes
    """Edges to and from earlier parts, if each part were a stage."""
    edges_after: Bytes
    shared: Bytes
    """Groups of parts, some inside and some outside, that hold the same trainable parameters and
    have no edge."""
    farthest: int
    """Parts from the maker of a value to its last reader, at most."""


def measure_memory(graph: Graph, plan: Plan, spec: Spec) -> tuple[Memory, ...]:
    """The peak on each rank of the plan, by rank."""
    starts = [stage.layers[0] for stage in plan.stages]
    footprint = measure_runs(graph, microbatch_size(spec), starts)
    found = []
    for stage in plan.stages:
        memory = stage_memory(footprint, spec, stage.index, (stage.index, stage.index + 1))
        found += [replace(memory, rank=rank) for rank in stage.mesh.ranks]
    return tuple(sorted(found, key=lambda memory: memory.rank))


def stage_memory(footprint: Footprint, spec: Spec, stage: int, run: tuple[int, int]) -> Memory:
    """The peak of parts run[0] .. run[1] - 1 as this stage, on the rank of its number."""
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


def reruns(spec: Spec, stage: int) -> bool:
    """Whether a stage runs forward again before each backward: it needs not where that follows at
    once, so that no other microbatch is live."""
    return spec.parallel.recompute == "stage" and live_microbatches(spec, stage) > 1


def layer_s(costs: Costs, spec: Spec, stage: int) -> tuple[float, ...]:
    """Seconds of each layer as a part of this stage: forward, backward, and forward again."""
    if not reruns(spec, stage):
        return costs.layer_s
    pairs = zip(costs.layer_s, costs.forward_s, costs.backward_s, strict=True)
    return tuple(seconds + again * (back > 0) for seconds, again, back in pairs)


def peak_bytes(
    footprint: Footprint, spec: Spec, stage: int, run: tuple[int, int] | EllipsisType
) -> tuple[Bytes, Bytes, Bytes, Bytes, Bytes]:
    """Parameters, gradients, optimizer, activations, buffers of a run of parts as this stage.

    With `...` for the run, of all runs.
    """
    parallel, live = spec.parallel, live_microbatches(spec, stage)
    trainable = footprint.trainable[run]
    kept = 1 if reruns(spec, stage) else live
    activations = kept_bytes(footprint, spec, kept, run) + footprint.largest[run]
    ahead = receives_ahead(min(parallel.pipeline - 1, footprint.farthest))
    taken, under_way = (min(parallel.microbatches, count + ahead) for count in (live, 1))
    messages = taken * footprint.received[run] + live * footprint.sent[run]
    gradients = footprint.gradients_received[run] + footprint.gradients_sent[run]
    groups = COMMUNICATOR_BYTES * process_groups(footprint, spec, stage, run)
    moments = optimizer_copies(spec.train.optimizer) * trainable
    if spec.train.optimizer.name == "Adafactor":
        moments = footprint.factored[run]
    buffers = messages + under_way * gradients + groups
    return footprint.state[run], trainable, moments, activations, buffers


def kept_bytes(
    footprint: Footprint, spec: Spec, microbatches: int, run: tuple[int, int] | EllipsisType
) -> Bytes:
    """What autograd keeps of so many microbatches, at the most."""
    fields: Bytes = -(-spec.train.global_batch // spec.parallel.data) * footprint.fields[run]
    fields += footprint.whole[run]
    kept: Bytes = microbatches * footprint.saved[run] + footprint.again[run] + fields
    return kept


def process_groups(
    footprint: Footprint, spec: Spec, stage: int, run: tuple[int, int] | EllipsisType
) -> Bytes:
    """NCCL's communicators on the rank of a stage: the world's, the edges', which of two stages are
    also for what they sum, those of parameters held by several stages and of the norm of all
    gradients, where there are replicas the stage's own, and that of all ranks, where it is none of
    these, for checkpoints. None on CPUs."""
    stages = spec.parallel.pipeline
    before = np.minimum(footprint.edges_before[run], 2 * stage)
    after = np.minimum(footprint.edges_after[run], 2 * (stages - 1 - stage))
    shared = footprint.shared[run] * (stages > 2)
    norm = stages > 2 and spec.train.clip_norm is not None
    data = spec.parallel.data > 1
    saving = spec.checkpoint is not None and stages > 1 and (data or (stages > 2 and not norm))
    used = spec.cluster.device.kind == "cuda" and (stages > 1 or data)
    groups: Bytes = (1 + before + after + shared + norm + data + saving) * used
    return groups


def measure_runs(graph: Graph, samples: int, starts: Sequence[int] | None = None) -> Footprint:
    """The footprint at a microbatch of this many samples.

    Parts begin at the layers `starts`; by default each layer is one.
    """
    starts = range(len(graph.layers)) if starts is None else starts
    parts = Parts(starts, len(graph.layers))
    held, moving, size = holders(graph), flows(graph), len(starts)
    states = [
        (p.meta, Reach(-1, parts.of(held[fqn]), p.meta.bytes.at(1)))
        for fqn, p in graph.parameters.items()
    ]
    flowing = ((f.meta, parts.reach(f.layer, f.readers, f.meta.bytes.at(samples))) for f in moving)
    values = [(meta, reach) for meta, reach in flowing if reach.readers]
    trained = [(meta, reach) for meta, reach in states if meta.requires_grad]
    saved, fields, whole = measure_kept(graph, samples)
    edges = np.ix_(*[[*starts, len(graph.layers)]] * 2)
    activations = [reach for _, reach in values]
    gradients = [reach for meta, reach in values if meta.requires_grad]
    pairs, back = pairs_of(activations), pairs_of(gradients)
    return Footprint(
        state=entering(size, [reach for _, reach in states]),
        trainable=entering(size, [reach for _, reach in trained]),
        factored=entering(size, [replace(r, size=factored_bytes(m)) for m, r in trained]),
        saved=saved[edges],
        fields=fields[edges],
        whole=whole[edges],
        again=again_above(graph, samples, saved)[edges],
        largest=largest(parts.split(largest_gradients(graph, samples), max)),
        received=entering(size, activations),
        sent=leaving(size, activations),
        gradients_received=leaving(size, [e for reach in gradients for e in reach.each()]),
        gradients_sent=entering(size, gradients),
        edges_before=makers_before(size, pairs) + makers_before(size, back),
        edges_after=readers_after(size, pairs) + readers_after(size, back),
        shared=divided(size, {reach.readers for _, reach in trained} - pairs),
        farthest=max((target - source for source, target in pairs), default=0),
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
class Parts:
    """Runs of layers that follow each other."""

    starts: Sequence[int]
    """The first layer of each."""
    num_layers: int

    def of(self, layers: Iterable[int]) -> tuple[int, ...]:
        """The parts that these layers are in, each once, in order."""
        return tuple(sorted({bisect_right(self.starts, layer) - 1 for layer in layers}))

    def reach(self, maker: int, readers: Sequence[int], size: int) -> Reach:
        """What a layer makes for others; no readers where they are in its own part."""
        (part,) = self.of([maker])
        return Reach(part, tuple(r for r in self.of(readers) if r > part), size)

    def split(self, sizes: list[int], combine: Callable[[list[int]], int]) -> list[int]:
        """By part what its layers' sizes come to."""
        return [combine(sizes[a:b]) for a, b in pairwise([*self.starts, self.num_layers])]


def largest(sizes: list[int]) -> Bytes:
    """By [first, stop]: the largest of a run, 0 where stop is not after first."""
    result = np.zeros((len(sizes) + 1, len(sizes) + 1), np.int64)
    for first in range(len(sizes)):
        result[first, first + 1 :] = np.maximum.accumulate(sizes[first:])
    return result
