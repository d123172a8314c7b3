"""Lists of operations: what a computation does to which tensors, found without values.

Operations are seen below autograd, where spelling no longer shows. One is a line of text:

    addmm(bias, %3, weight as float32[8, 4 by 1, 8]) -> float32[6, 4]

An operand is a parameter or an input by its name, a literal by its numbers, or `%3`, a result of
operation 3. Behind it stands what it shows of that (shown.py), unless it is all of it as it was
made. What only shows a tensor, or equals another one, is no operation of its own, wherever in
memory it lies; and what neither results nor random numbers depend on is left out.
"""

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..frontend.capture.arguments import dtype_name
from ..frontend.capture.foreign import leaves_behind
from ..frontend.capture.private import (
    TorchDispatchMode,
    is_fake,
    no_modes,
    schema_of,
    storage_address,
)
from ..frontend.capture.schema import draws, given_positionals, is_default
from ..frontend.capture.trees import tree_leaves
from .operations import copied, pieces, written
from .shown import (
    Layout,
    copy_layout,
    find,
    flatten,
    is_whole,
    layout_of,
    text,
    type_text,
    typed,
    walk,
)

Names = Sequence[tuple[str, Tensor]]
"""What to call the tensors that a computation starts from."""

unsaid = frozenset(("device", "layout", "pin_memory", "memory_format", "generator"))
"""Arguments that are the machine's, or that the result shows."""


@dataclass(frozen=True, slots=True)
class Content:
    """What lies in a storage: elements of a tensor."""

    name: str
    dtype: torch.dtype
    layout: Layout
    """Which element of the tensor lies where."""
    made: Layout
    """Where the elements of the tensor lie that the storage was made for."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One that ran."""

    text: str
    draws: bool
    """It draws random numbers: it counts even where nothing reads it."""


class Listing(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Notes operations while they run. `names`: the tensors that are there before."""

    def __init__(self, names: Names) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.seeded, self.drawn = "", 0
        self.contents: dict[int, Content] = {}
        self.held: list[Tensor] = []
        """Keeps every storage alive: an address is then given once."""
        for name, tensor in names:
            if storage_address(tensor) not in self.contents:
                self.put(tensor, made(name, tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::").split(".")[0].rstrip("_")
        arguments = self.arguments(name, func, args, kwargs)  # before some are written
        source = copied(name, args, kwargs)
        result = func(*args, **kwargs)
        results = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        writes = written(func, args, kwargs)
        new = [t for t in results if storage_address(t) not in self.contents]
        if source is not None and source.shape == results[0].shape:
            for tensor in writes if name == "copy" else new:
                self.put_copy(tensor, source)
        elif writes or new:
            types = ", ".join(map(type_text, results or writes))
            parts = "".join(self.part(tensor) for tensor in writes if not is_whole(tensor))
            line = f"{name}({arguments}) -> {types}{parts}"
            self.note(line, (*writes, *new), draws=draws(func, args, kwargs))
        return result

    def seed(self, key: str) -> None:
        """What is drawn from here on follows from a key."""
        self.seeded, self.drawn = f" of {key}", 0

    def note(self, line: str, changed: Sequence[Tensor], *, draws: bool) -> None:
        """An operation, and that its results lie in the storages that it makes or writes."""
        if draws:
            self.drawn += 1
            line = f"{line}, draw {self.drawn}{self.seeded}"
        number = len(self.operations)
        self.operations.append(Operation(line, draws))
        for i, tensor in enumerate(changed):
            content = made(f"%{number}.{i}" if len(changed) > 1 else f"%{number}", tensor)
            before = self.contents.get(storage_address(tensor))
            if before and not is_whole(tensor):
                content = replace(before, name=content.name, layout=before.made)
            self.put(tensor, content)

    def part(self, tensor: Tensor) -> str:
        """What an operation that writes a part of a storage leaves of it."""
        content = self.contents[storage_address(tensor)]
        runs = sorted(content.made.runs, key=lambda run: -run.stride)
        rest = walk(content.layout, [r.size for r in runs], [r.memory for r in runs])
        whole = text(flatten(rest), content.made.shape) if rest else f"{content.layout}"
        return f" into {place(content.made, tensor)} of {content.name}[{whole}]"

    def put_copy(self, tensor: Tensor, source: Tensor) -> None:
        """A copy lies in a tensor's storage."""
        content = self.contents[storage_address(source)] if source.numel() else None
        shown = find(content.layout, source) if content and is_plain(source, content) else None
        if content is None or shown is None:
            self.put(tensor, made(f"({self.value(source)})", tensor))
            return
        name = content.name
        if tensor.dtype != content.dtype:
            name = f"{dtype_name(tensor.dtype)}({name})"
        layout = copy_layout(content.layout.shape, shown, tensor)
        self.put(tensor, Content(name, tensor.dtype, layout, layout_of(tensor)))

    def put(self, tensor: Tensor, content: Content) -> None:
        self.contents[storage_address(tensor)] = content
        self.held.append(tensor)

    def arguments(self, name: str, func: Any, args: Any, kwargs: Any) -> str:
        """The arguments as text, without what goes without saying."""
        schema = schema_of(func)
        args = args[: given_positionals(schema, args)]
        if name == "cat":
            args = (pieces(args[0]), *args[1:])
        told = [a for a in schema.arguments if not a.is_out]  # where a result goes is no operand
        said = [a.name for a in told if not is_default(a, kwargs.get(a.name))]
        named = [f"{k}={self.show(v)}" for k, v in kwargs.items() if k in said and k not in unsaid]
        return ", ".join([self.show(a) for a in args] + named)

    def show(self, value: object) -> str:
        """An argument."""
        if isinstance(value, Tensor):
            return self.operand(value)
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self.show, value))}]"
        # the result's dtype tells whether 2 and 2.0 differ
        return repr(value).removesuffix(".0") if isinstance(value, float) else repr(value)

    def operand(self, tensor: Tensor) -> str:
        """A tensor, and whether a gradient goes back through it. Under no_grad none does, though a
        weight that autocast casts there requires one: the cast is kept for later uses."""
        grad = tensor.requires_grad and torch.is_grad_enabled()
        return self.value(tensor) + (" grad" if grad else "")

    def value(self, tensor: Tensor) -> str:
        """A tensor: which, and what it shows of it."""
        if not tensor.numel():
            return f"empty {type_text(tensor)}"
        if storage_address(tensor) not in self.contents:  # it comes from outside
            self.put(tensor, made(constant_name(tensor), tensor))
        content = self.contents[storage_address(tensor)]
        inside = place(content.layout, tensor)
        if inside == ", ".join(map(str, content.layout.shape)) and is_plain(tensor, content):
            return content.name
        return f"{content.name} as {typed(tensor, inside)}"


def made(name: str, tensor: Tensor) -> Content:
    """What lies in a storage that was made, or written, for a tensor."""
    layout = layout_of(tensor)
    return Content(name, tensor.dtype, layout, layout)


def is_plain(tensor: Tensor, content: Content) -> bool:
    """Whether a tensor shows elements as they are: of another dtype are other bits."""
    return tensor.dtype == content.dtype and not tensor.is_conj() and not tensor.is_neg()


def place(layout: Layout, tensor: Tensor) -> str:
    """Which elements a tensor shows, or the places in memory of those that have no strides."""
    shown = find(layout, tensor)
    if shown:
        return text(shown, tensor.shape)
    at = f"{list(tensor.stride())} at {tensor.storage_offset()}"
    return f"{list(tensor.shape)} by {at} in {layout}"


def constant_name(tensor: Tensor) -> str:
    """A tensor that no operation made: a literal by its numbers, else by its shape."""
    if is_fake(tensor):
        return f"a constant {type_text(tensor)}"
    with no_modes():
        flat = tensor.detach().contiguous().reshape(-1)
        numbers = flat.view(torch.uint8).numpy().tobytes()
    return f"literal {zlib.crc32(numbers):08x} {type_text(tensor)}"


def list_operations(
    run: Callable[[Listing], Mapping[str, Tensor]],
    names: Names,
    mode: AbstractContextManager[object],
    *,
    gradients: bool = False,
) -> list[str]:
    """The operations of a computation on tensors without values, those of `mode`, then its results,
    by their names. `gradients`: then to which tensors a gradient goes back from each result."""
    with mode, Listing(names) as listing:
        results = run(listing)
    ends = [f"{name} = {listing.operand(tensor)}" for name, tensor in results.items()]
    if gradients:
        for name, tensor in results.items():
            leaves = sorted(listing.value(leaf) for leaf in leaves_behind(tensor))
            ends += [f"a gradient of {name} goes to {leaf}" for leaf in leaves]
    return slice_back(listing.operations, ends)


def slice_back(operations: Sequence[Operation], ends: Sequence[str]) -> list[str]:
    """What the ends and the random numbers depend on, then the ends. It is numbered by who reads
    whom, not by when it ran: a script may run it in another order."""
    drawn = [number for number, operation in enumerate(operations) if operation.draws]
    stack = [*(number for end in ends for number in operands(end)), *drawn][::-1]
    numbers: dict[int, int] = {}
    while stack:
        waiting = [n for n in operands(operations[stack[-1]].text) if n not in numbers]
        if waiting:
            stack.append(waiting[0])
        else:
            numbers.setdefault(stack.pop(), len(numbers))
    lines = [operations[number].text for number in numbers] + list(ends)
    return [re.sub(r"%(\d+)", lambda m: f"%{numbers[int(m[1])]}", line) for line in lines]


def operands(text: str) -> list[int]:
    """The operations that an operation reads."""
    return [int(number) for number in re.findall(r"%(\d+)", text)]


def first_difference(found: Sequence[str], expected: Sequence[str]) -> str | None:
    """Where two lists part, or None."""
    for i, (a, b) in enumerate(zip(found, expected, strict=False)):
        if a != b:
            return f"operation {i} is {a}, not {b}"
    if len(found) != len(expected):
        return f"there are {len(found)} operations, not {len(expected)}"
    return None
