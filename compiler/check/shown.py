"""What a tensor shows of what lies in its storage, in words that know no order of memory.

Elements are counted as they follow in the tensor that an operation made, row by row. What a tensor
shows of them is written `float32[4, 8 by 8, 1 at 32]`: sizes, strides, first element. A dimension
that was two has two strides, as in `[6, 4 by 2x32+3x8, 1]`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from ..frontend.capture.arguments import dtype_name

Steps = tuple[tuple[int, int], ...]
"""Size and stride, outer ones first: how a dimension runs through elements."""


@dataclass(frozen=True, slots=True)
class Run:
    """Elements that are a stride apart, both in memory and in the tensor that they are of."""

    size: int
    memory: int
    stride: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Which element of a tensor lies where in a storage."""

    shape: tuple[int, ...]
    """The tensor's."""
    runs: tuple[Run, ...]
    """By falling strides in memory: together all of the storage."""
    first: int = 0
    """The element that lies first."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Which elements a tensor shows."""

    dims: tuple[Steps, ...]
    first: int


def layout_of(tensor: Tensor) -> Layout:
    """How a tensor lies in its storage; a storage of which it shows only a part is one long row."""
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    if not is_whole(tensor):
        return Layout((length,), join([Run(length, 1, 1)]))
    dims = zip(tensor.shape, tensor.stride(), usual(tensor.shape), strict=True)
    return Layout(tuple(tensor.shape), join(Run(*dim) for dim in dims))


def is_whole(tensor: Tensor) -> bool:
    """Whether a tensor shows all of its storage, each place once."""
    places = sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1)
    if not tensor.numel():
        return not tensor.untyped_storage().nbytes()
    expected = 1
    for stride, size in places:
        if stride != expected:
            return False
        expected *= size
    return expected * tensor.element_size() == tensor.untyped_storage().nbytes()


def usual(shape: Sequence[int]) -> list[int]:
    """The strides row by row."""
    return [prod(shape[dim + 1 :]) for dim in range(len(shape))]


def join(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Runs by falling strides in memory; what goes on where its neighbour ends is one with it."""
    joined: list[Run] = []
    for run in sorted((run for run in runs if run.size != 1), key=lambda run: -run.memory):
        last = joined[-1] if joined else run
        if (last.memory, last.stride) == (run.size * run.memory, run.size * run.stride):
            joined[-1] = Run(last.size * run.size, run.memory, run.stride)
        else:
            joined.append(run)
    return tuple(joined)


def find(layout: Layout, tensor: Tensor) -> Shown | None:
    """Which elements a tensor on a storage shows; None if they have no strides, or it takes bits
    for elements of another size."""
    length = prod(run.size for run in layout.runs)
    if length * tensor.element_size() != tensor.untyped_storage().nbytes():
        return None
    return walk(layout, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def walk(
    layout: Layout, sizes: Sequence[int], strides: Sequence[int], offset: int = 0
) -> Shown | None:
    """The elements at strides in memory. A dimension is split where it goes from one run to
    another; what then still does so has no strides."""
    runs = layout.runs
    dims = [split(runs, size, stride) for size, stride in zip(sizes, strides, strict=True)]
    at, *steps = ([digit(run, memory) for run in runs] for memory in [offset, *flat(dims)])
    counts = [size for dim in dims for size, _ in dim]
    last = [
        sum((n - 1) * step[i] for n, step in zip(counts, steps, strict=True))
        for i in range(len(runs))
    ]
    if any(a + b >= run.size for a, b, run in zip(at, last, runs, strict=True)):
        return None
    return Shown(
        tuple(merge((n, element(runs, memory)) for n, memory in dim) for dim in dims),
        layout.first + element(runs, offset),
    )


def flat(dims: Iterable[Steps]) -> list[int]:
    """The strides of all dimensions."""
    return [stride for dim in dims for _, stride in dim]


def digit(run: Run, memory: int) -> int:
    """How many steps of a run a distance in memory has."""
    return memory // run.memory % run.size


def element(runs: Sequence[Run], memory: int) -> int:
    """How many elements apart what is a distance apart in memory is."""
    return sum(digit(run, memory) * run.stride for run in runs)


def split(runs: Sequence[Run], size: int, stride: int) -> Steps:
    """A dimension's strides in memory, none of which leaves a run that it could stay in."""
    if size == 1:
        return ()
    within = next((run for run in runs if stride and run.memory <= stride), None)
    if within is None or within.size * within.memory % stride:
        return ((size, stride),)
    room = within.size * within.memory // stride
    if size <= room or size % room:
        return ((size, stride),)
    return (*split(runs, size // room, stride * room), (room, stride))


def merge(steps: Iterable[tuple[int, int]]) -> Steps:
    """The same with as few steps as there can be."""
    merged: list[tuple[int, int]] = []
    for size, stride in steps:
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(merged)


def flatten(shown: Shown) -> Shown:
    """The elements row by row."""
    return Shown((merge(step for dim in shown.dims for step in dim),), shown.first)


def copy_layout(shape: tuple[int, ...], source: Shown, copy: Tensor) -> Layout:
    """Which element of a tensor of a shape lies where in the storage of a copy of what another
    shows of it; the copy fills its storage."""
    runs = []
    for steps, memory in zip(source.dims, copy.stride(), strict=True):
        for i, (size, stride) in enumerate(steps):
            runs.append(Run(size, memory * prod(n for n, _ in steps[i + 1 :]), stride))
    return Layout(shape, join(runs), source.first)


def text(shown: Shown, shape: Sequence[int]) -> str:
    """`4, 8 by 8, 1 at 32`: strides and first element only where they are not the usual."""
    dense = flatten(shown).dims[0] in ((), ((prod(shape), 1),))
    by = "" if dense else f" by {', '.join(map(strides_text, shown.dims))}"
    return ", ".join(map(str, shape)) + by + (f" at {shown.first}" if shown.first else "")


def strides_text(steps: Steps) -> str:
    """`8`, or `2x32+3x8` where a dimension has several."""
    if len(steps) < 2:  # of one element, any stride will do
        return str(steps[0][1] if steps else 0)
    return "+".join(f"{size}x{stride}" for size, stride in steps)


def typed(tensor: Tensor, inside: str) -> str:
    """`float32[4, 8]`, and whether it is to be conjugated or negated when it is read."""
    bits = " conj" * tensor.is_conj() + " neg" * tensor.is_neg()
    return f"{dtype_name(tensor.dtype)}[{inside}]{bits}"


def type_text(tensor: Tensor) -> str:
    """A tensor's dtype and shape."""
    return typed(tensor, ", ".join(map(str, tensor.shape)))
