"""Lists of operations: what a computation does to which tensors, found without values.

Operations are seen below autograd, where spelling no longer shows. One is a line of text:

    addmm(bias, %3[6, 8], weight[8, 4 by 1, 8]) -> float32[6, 4]

An operand is a parameter or an input by its name, a literal by its numbers, or `%3`, a result of
operation 3. Behind it stands what it shows of that: shape, strides and offset, unless it is all of
it as it was made. What only shows a tensor, or equals another one, is no operation of its own; and
what neither results nor random numbers depend on is left out.
"""

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..frontend.capture.arguments import dtype_name
from ..frontend.capture.private import is_fake, no_modes, storage_address
from ..frontend.capture.schema import given_positionals, is_default

Names = Sequence[tuple[str, Tensor]]
"""What to call the tensors that a computation starts from."""

copying = frozenset(("clone", "_to_copy", "lift_fresh", "lift_fresh_copy"))
"""Their result equals their first argument."""

reshaping = frozenset(
    f"aten::{name}_"
    for name in ("t", "transpose", "squeeze", "unsqueeze", "swapaxes", "detach", "as_strided")
)
"""These change what a tensor shows and leave its storage alone."""

unsaid = frozenset(("device", "layout", "pin_memory", "memory_format", "generator"))
"""Arguments that are the machine's, or that the result shows."""


@dataclass(frozen=True, slots=True)
class Content:
    """What lies in a storage."""

    name: str
    whole: str
    """What the tensor shows that it was made with."""
    equal: str = ""
    """What that tensor is a copy of."""


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
                self.put(tensor, Content(name, shown(tensor)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().split("::")[1].split(".")[0].rstrip("_")
        arguments = self.arguments(name, func, args, kwargs)  # before some are written
        source = copied(name, args, kwargs)
        result = func(*args, **kwargs)
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        writes = written(func, args, kwargs)
        new = [t for t in made if storage_address(t) not in self.contents]
        if source is not None and source.shape == made[0].shape:
            for tensor in writes if name == "copy" else new:
                self.put_copy(tensor, source)
        elif writes or new:
            results = ", ".join(map(shown, made or writes))
            text = f"{name}({arguments}) -> {results}"
            self.note(text, (*writes, *new), draws=draws(func, args, kwargs))
        return result

    def seed(self, key: str) -> None:
        """What is drawn from here on follows from a key."""
        self.seeded, self.drawn = f" of {key}", 0

    def note(self, text: str, changed: Sequence[Tensor], *, draws: bool) -> None:
        """An operation, and that its results lie in the storages that it makes or writes."""
        if draws:
            self.drawn += 1
            text = f"{text}, draw {self.drawn}{self.seeded}"
        number = len(self.operations)
        self.operations.append(Operation(text, draws))
        for i, tensor in enumerate(changed):
            before = self.contents.get(storage_address(tensor))
            part = f".{i}" if len(changed) > 1 else ""
            whole = before.whole if before and not is_whole(tensor) else shown(tensor)
            self.put(tensor, Content(f"%{number}{part}", whole))

    def put_copy(self, tensor: Tensor, source: Tensor) -> None:
        """A copy lies in a tensor's storage."""
        equal = self.value(source)
        if shown(source) == shown(tensor) and is_whole(tensor):
            content = self.contents[storage_address(source)]  # a view of one is one of the other
        else:
            if source.dtype != tensor.dtype:
                equal = f"{dtype_name(tensor.dtype)}({equal})"
            content = Content(f"copy({equal})", shown(tensor), equal)
        self.put(tensor, content)

    def put(self, tensor: Tensor, content: Content) -> None:
        self.contents[storage_address(tensor)] = content
        self.held.append(tensor)

    def arguments(self, name: str, func: Any, args: Any, kwargs: Any) -> str:
        """The arguments as text, without what goes without saying."""
        schema = func._schema  # noqa: SLF001  # the only way to a schema
        args = args[: given_positionals(schema, args)]
        if name == "cat":
            args = (pieces(args[0]), *args[1:])
        said = [a.name for a in schema.arguments if not is_default(a, kwargs.get(a.name))]
        named = [f"{k}={self.show(v)}" for k, v in kwargs.items() if k in said and k not in unsaid]
        return ", ".join([self.show(a) for a in args] + named)

    def show(self, value: object) -> str:
        """An argument."""
        if isinstance(value, Tensor):
            return self.operand(value)
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self.show, value))}]"
        return repr(value)

    def operand(self, tensor: Tensor) -> str:
        """A tensor, and whether a gradient goes back through it."""
        return self.value(tensor) + (" grad" if tensor.requires_grad else "")

    def value(self, tensor: Tensor) -> str:
        """A tensor: which, and what it shows of it."""
        now = shown(tensor)
        if storage_address(tensor) not in self.contents:  # it comes from outside
            self.put(tensor, Content(constant_name(tensor), now))
        content = self.contents[storage_address(tensor)]
        if now == content.whole:
            return content.equal or content.name
        return f"{content.name} as {now}"


def shown(tensor: Tensor) -> str:
    """What a tensor shows of its storage: `float32[4, 8]`, and strides and offset where they are
    not the usual."""
    sizes, strides, usual = list(tensor.shape), list(tensor.stride()), 1
    for dim in reversed(range(len(sizes))):
        if sizes[dim] == 1:
            strides[dim] = usual  # of one element, any stride will do
        usual *= sizes[dim]
    dense = tensor.numel() == 0 or strides == [prod(sizes[i + 1 :]) for i in range(len(sizes))]
    by = "" if dense else f" by {', '.join(map(str, strides))}"
    at = f" at {tensor.storage_offset()}" if tensor.storage_offset() else ""
    bits = " conj" * tensor.is_conj() + " neg" * tensor.is_neg()
    return f"{dtype_name(tensor.dtype)}[{', '.join(map(str, sizes))}{by}{at}]{bits}"


def constant_name(tensor: Tensor) -> str:
    """A tensor that no operation made: a literal by its numbers, else by its shape."""
    if is_fake(tensor):
        return f"a constant {shown(tensor)}"
    with no_modes():
        flat = tensor.detach().contiguous().reshape(-1)
        numbers = flat.view(torch.uint8).numpy().tobytes()
    return f"literal {zlib.crc32(numbers):08x} {shown(tensor)}"


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments whose storage an operation writes; norms keep quiet about their statistics."""
    if func.name() in reshaping:
        return []
    schema = func._schema.arguments  # noqa: SLF001  # the only way to a schema
    given = by_name(func, args, kwargs)
    names = [a.name for a in schema if a.alias_info is not None and a.alias_info.is_write]
    if given.get("training") or given.get("use_input_stats"):
        names += [n for n in ("running_mean", "running_var") if n not in names]
    leaves = tree_leaves([given.get(name) for name in names])
    return [t for t in leaves if isinstance(t, Tensor)]


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers: attention without dropout, say, does not."""
    given = by_name(func, args, kwargs)
    off = given.get("dropout_p") == 0 or False in (given.get("train"), given.get("training"))
    return torch.Tag.nondeterministic_seeded in func.tags and not off


def by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """An operation's arguments by the names of its schema."""
    names = (a.name for a in func._schema.arguments)  # noqa: SLF001  # the only way to a schema
    return {**dict(zip(names, args, strict=False)), **kwargs}


def copied(name: str, args: Any, kwargs: Mapping[str, object]) -> Tensor | None:
    """The tensor that an operation's result equals, if shaped like it: canonical graphs leave out
    `+ 0`, `* 1` and concatenations with an empty tensor, and write what forward assigns to a
    buffer."""
    if name in copying:
        return args[0]  # type: ignore[no-any-return]
    if name == "copy":
        return args[1] if is_whole(args[0]) else None
    if name in ("add", "sub", "mul", "div") and not isinstance(args[1], Tensor) and not kwargs:
        return args[0] if args[1] == (0 if name in ("add", "sub") else 1) else None
    full = pieces(args[0]) if name == "cat" else []
    return full[0] if len(full) == 1 else None


def is_whole(tensor: Tensor) -> bool:
    """Whether a tensor shows all of its storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those of a concatenation that are not empty."""
    return [t for t in tensors if t.shape != (0,)]


def list_operations(
    run: Callable[[Listing], Mapping[str, Tensor]],
    names: Names,
    mode: AbstractContextManager[object],
) -> list[str]:
    """The operations of a computation on tensors without values, those of `mode`, then its results,
    by their names."""
    with mode, Listing(names) as listing:
        results = run(listing)
    ends = [f"{name} = {listing.operand(tensor)}" for name, tensor in results.items()]
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
