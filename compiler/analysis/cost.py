"""How long things take: layers by the roofline, messages by latency and bandwidth.

A layer takes the longer of its arithmetic and its memory traffic (Williams, Waterman, Patterson
2009). A message takes `latency + bytes / bandwidth` of the link between its ranks; an all-reduce
over n ranks is a ring of 2 (n - 1) messages of 1/n of the bytes each (Thakur, Rabenseifner, Gropp
2005).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..ir.cluster import Links
from ..ir.graph import Graph, Layer, Ref
from ..ir.spec import Spec
from .dataflow import metas


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of one microbatch."""

    microbatch_size: int
    """Samples of the largest microbatch."""
    forward_s: tuple[float, ...]
    """By layer."""
    backward_s: tuple[float, ...]
    links: Links
    devices_per_node: int

    @property
    def layer_s(self) -> tuple[float, ...]:
        """Forward and backward, by layer."""
        return tuple(f + b for f, b in zip(self.forward_s, self.backward_s, strict=True))

    def message_s(self, source: int, target: int, num_bytes: int) -> float:
        """A message from rank to rank; ranks fill a node before the next one."""
        same_node = source // self.devices_per_node == target // self.devices_per_node
        link = self.links.intra_node if same_node else self.links.inter_node
        return link.latency + num_bytes / link.bandwidth

    def all_reduce_s(self, ranks: Sequence[int], num_bytes: int) -> float:
        """Each step of the ring waits for its slowest link."""
        ring = [*ranks, ranks[0]]
        share = -(-num_bytes // len(ranks))
        slowest = max(self.message_s(a, b, share) for a, b in pairwise(ring))
        return 2 * (len(ranks) - 1) * slowest


def price(graph: Graph, spec: Spec) -> Costs:
    """Times of the graph's layers on the spec's device, at the size of its largest microbatch.

    Before: the graph has layers. After: one forward and one backward time for each.
    """
    device, samples = spec.cluster.device, microbatch_size(spec)
    peak = device.flops[spec.train.precision]
    forward = tuple(
        max(
            layer.flops.at(samples) / peak,
            layer.bytes_moved.at(samples) / device.memory_bandwidth,
        )
        for layer in graph.layers
    )
    factors = backward_factors(graph)
    again = tuple(
        again_s(layer, seconds, samples)
        for layer, seconds in zip(graph.layers, forward, strict=True)
    )
    return Costs(
        microbatch_size=samples,
        forward_s=forward,
        backward_s=tuple(
            seconds * factor + more * (factor > 0)
            for seconds, factor, more in zip(forward, factors, again, strict=True)
        ),
        links=spec.cluster.links,
        devices_per_node=spec.cluster.devices_per_node,
    )


def again_s(layer: Layer, forward_s: float, samples: int) -> float:
    """Seconds of the calls that run again in a layer's backward: their share of its forward."""
    flops = layer.flops.at(samples)
    if not flops:
        return forward_s * (layer.again_bytes.at(samples) > 0)
    return forward_s * layer.again_flops.at(samples) / flops


def microbatch_size(spec: Spec) -> int:
    """Samples of the largest microbatch of a full step."""
    replica = -(-spec.train.global_batch // spec.parallel.data)
    return -(-replica // spec.parallel.microbatches)


def backward_factors(graph: Graph) -> tuple[int, ...]:
    """Backward of each layer in units of its forward: 0, 1 or 2.

    A product in the forward becomes two of the same size in the backward, the gradient of each
    factor. Only one is there in a layer whose inputs need no gradient (an embedding, the first
    convolution) or whose parameters are all frozen; none where nothing needs a gradient.
    """
    known, ops = metas(graph), {op.name: op for op in graph.ops}

    def factor(layer: Layer) -> int:
        inside = [ops[name] for name in layer.ops]
        if not any(known[name].requires_grad for op in inside for name in op.outputs if name):
            return 0
        read = {o.name for op in inside for o in op.operands if isinstance(o, Ref)}
        states = [known[name] for name in layer.parameters if not graph.parameters[name].buffer]
        frozen = states and not any(meta.requires_grad for meta in states)
        return 1 if frozen or not any(known[name].requires_grad for name in read) else 2

    return tuple(map(factor, graph.layers))
