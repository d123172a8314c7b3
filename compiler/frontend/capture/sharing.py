"""Different tensors of a model in one memory: a step on one of them changes the others, which no
script repeats, since it has each of them for itself."""

import re
from collections.abc import Iterable
from itertools import combinations

from torch import Tensor

from ...errors import CaptureError, Location
from ...ir.graph import Graph, Parameter
from .private import storage_address


def find_shared(tensors: Iterable[tuple[str, Tensor]]) -> tuple[tuple[str, str], ...]:
    """Pairs of names of different tensors that show overlapping parts of one storage."""
    groups: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors:
        if tensor.numel():
            groups.setdefault(storage_address(tensor), []).append((name, tensor))
    return tuple(
        (first, second)
        for group in groups.values()
        for (first, a), (second, b) in combinations(group, 2)
        if a is not b and overlap(extent(a), extent(b))
    )


def extent(tensor: Tensor) -> range:
    """The bytes of its storage from a tensor's first element to its last."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    size, start = tensor.element_size(), int(tensor.storage_offset())
    return range(start * size, (start + last + 1) * size)


def overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


def refuse_shared(shared: Iterable[tuple[str, str]], graph: Graph, where: Location | None) -> None:
    """Raises CaptureError where training or forward writes what two of the graph's tensors show."""
    written = {graph.canonical.get(name, name) for op in graph.ops for name in op.mutates}
    for first, second in shared:
        pair = [graph.parameters[name] for name in (first, second) if name in graph.parameters]
        if len(pair) == 2 and any(p.fqn in written or is_trained(p) for p in pair):
            raise CaptureError(
                f"{first} and {second} are different tensors in one memory: what changes one of "
                "them changes the other, which no script repeats",
                where,
                remedy(*pair),
            )


def is_trained(parameter: Parameter) -> bool:
    return parameter.meta.requires_grad and not parameter.buffer


def remedy(first: Parameter, second: Parameter) -> str:
    """How to say what is meant: one tensor, or two."""
    apart = ".clone() in the factory makes them two"
    if is_trained(first) and second.buffer:
        return f"forward can compute it from {spelled(first.fqn)}; {apart}"
    return f"{spelled(second.fqn)} = {spelled(first.fqn)} makes them one; {apart}"


def spelled(fqn: str) -> str:
    """`self.layers[2].weight` for `layers.2.weight`."""
    return re.sub(r"\.(\d+)(?=\.)", r"[\1]", f"self.{fqn}")
