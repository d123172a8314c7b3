"""What autograd keeps of every run of layers, by [first layer, layer after the last]."""

import numpy as np

from ..ir.graph import Graph
from .dataflow import layer_of_op, metas, recomputable
from .reach import Bytes, Reach, entering


def measure_kept(graph: Graph, samples: int) -> tuple[Bytes, Bytes, Bytes]:
    """By [first layer, layer after the last]: what autograd keeps of one microbatch, of the fields
    by sample, and of those that every microbatch takes whole.

    Ops say what they keep first. A value that is kept where it was not made was received, unless
    each stage computes it for itself.
    """
    size, known, where = len(graph.layers), metas(graph), layer_of_op(graph)
    free, fields = recomputable(graph), {i.name for i in graph.inputs}
    maker = {name: at for op, at in zip(graph.ops, where, strict=True) for name in op.outputs}
    keepers: dict[str, list[int]] = {}
    for op, at in zip(graph.ops, where, strict=True):
        for name in op.keeps:
            keepers.setdefault(name, []).append(at)
    counted, kept, received, of_fields, whole = [], [], [], [], []
    for name, layers in keepers.items():
        found, amount = tuple(dict.fromkeys(layers)), known[name].bytes
        counted.append(Reach(-1, found[:1], amount.at(samples)))
        if name in fields:
            of_fields.append(Reach(-1, found, amount.per_sample))
            whole.append(Reach(-1, found, amount.fixed))
            continue
        kept.append(Reach(-1, found, amount.at(samples)))
        if name not in free:
            later = tuple(layer for layer in found if layer > maker[name])
            received.append(Reach(maker[name], later, amount.at(samples)))
    saved = sums([layer.activation_bytes.at(samples) for layer in graph.layers])
    saved += entering(size, kept) - entering(size, counted) - entering(size, received)
    return saved, entering(size, of_fields), entering(size, whole)


def again_above(graph: Graph, samples: int, saved: Bytes) -> Bytes:
    """By [first layer, layer after the last]: how much more is kept while a call runs again, when
    the backward has been through all after it, than before the backward; at least 0."""
    result = np.zeros_like(saved)
    for at, layer in enumerate(graph.layers):
        if more := layer.again_bytes.at(samples):
            then = saved[: at + 1, at + 1, None] + more - layer.freed_bytes.at(samples)
            above = then - saved[: at + 1, at + 1 :]
            result[: at + 1, at + 1 :] = np.maximum(result[: at + 1, at + 1 :], above)
    return result


def sums(sizes: list[int]) -> Bytes:
    """By [first, stop]: the sum of a run."""
    prefix: Bytes = np.cumsum([0, *sizes], dtype=np.int64)
    return prefix[None, :] - prefix[:, None]
