"""A user's torch.autograd.Function becomes one op: torch.export would trace through its forward,
and lose its backward without a word.

Where such a class is applied, one operation of ppc's own goes into the trace, and what it was given
is noted beside it. Its results have the shapes that forward gives without values.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ...errors import CaptureError
from ...ir.graph import Arg, Items, Ref
from .arguments import to_arg
from .private import TorchDispatchMode, on_autograd_function, schema_of, storage_address
from .replay import given
from .schema import draws
from .trees import tree_leaves
from .user import call_site

pending: dict[int, "Application"] = {}
numbers = count()


@torch.library.custom_op("ppc::apply", mutates_args=())
def apply(tensors: list[Tensor], number: int) -> list[Tensor]:
    """Stands in a trace for `pending[number]`."""
    raise NotImplementedError("only traced, never run")


apply.register_fake(lambda tensors, number: pending[number].run(tensors))


@dataclass
class Application:
    """One call of a class's apply. `run` finds out what forward does."""

    cls: type
    plain: Callable[..., object]
    """Torch's own apply."""
    args: tuple[Arg, ...]
    """`Ref("0")` is the first tensor among them."""
    result: object = None
    """What apply gives, a Ref for each tensor."""
    views: tuple[str, ...] = ()
    """Refs of the tensors whose memory the results show."""
    random: bool = False

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Forward without values; tensors like its results."""
        with Watch(tensors) as seen:
            result = self.plain(*given(self.args, lambda ref: tensors[int(str(ref))]))
        if seen.writes:
            raise CaptureError(
                f"{self.cls.__name__} writes over what it is given",
                call_site(),
                "a new tensor as its result, without ctx.mark_dirty",
            )
        made = [t for t in in_order(result) if isinstance(t, Tensor)]
        self.result, self.random = self.note(result), seen.draws
        shown = {storage_address(tensor) for tensor in made}
        self.views = tuple(
            str(i) for i, tensor in enumerate(tensors) if storage_address(tensor) in shown
        )
        return [torch.empty_like(tensor) for tensor in made]

    def note(self, result: object) -> object:
        """The result with a Ref for each tensor. Raises CaptureError for what no op may give."""
        found = count()
        try:
            noted = [
                Ref(str(next(found))) if isinstance(value, Tensor) else to_arg(value, no_tensor)
                for value in in_order(result)
            ]
        except TypeError:
            noted = []
        if not any(isinstance(value, Ref) for value in noted):
            raise CaptureError(
                f"forward of {self.cls.__name__} gives something else than tensors",
                call_site(),
                "a tensor, or a tuple of tensors, numbers and None",
            )
        return tuple(noted) if isinstance(result, tuple | list) else noted[0]


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Notes whether operations write to some tensors, and whether any draws random numbers."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.addresses = {storage_address(tensor) for tensor in tensors}
        self.writes = self.draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = schema_of(func).arguments
        named = {**dict(zip((a.name for a in schema), args, strict=False)), **(kwargs or {})}
        written = [named.get(a.name) for a in schema if a.alias_info and a.alias_info.is_write]
        self.writes |= any(
            isinstance(t, Tensor) and storage_address(t) in self.addresses
            for t in tree_leaves(written)
        )
        self.draws |= draws(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def no_tensor(_: object) -> None:
    """Inside of another value there is to be none."""


def in_order(result: object) -> Sequence[object]:
    """What apply gives, one by one."""
    return result if isinstance(result, tuple | list) else (result,)


@contextmanager
def keeping_functions() -> Iterator[dict[int, Application]]:
    """While a trace runs: each call of a user's apply, by the number that its node bears."""
    calls: dict[int, Application] = {}

    def take(cls: type, plain: Callable[..., object], args: Sequence[object]) -> object:
        tensors: list[Tensor] = []
        call = Application(cls, plain, read_arguments(cls, args, tensors))
        number = next(numbers)
        pending[number] = calls[number] = call
        try:
            made = torch.ops.ppc.apply(tensors, number)
        finally:
            del pending[number]
        results = [made[int(r.name)] if isinstance(r, Ref) else r for r in in_order(call.result)]
        return tuple(results) if isinstance(call.result, tuple) else results[0]

    with on_autograd_function(take):
        yield calls


def read_arguments(cls: type, args: Sequence[object], tensors: list[Tensor]) -> tuple[Arg, ...]:
    """The arguments as a script writes them; `tensors` gets those among them.

    Raises CaptureError for what it cannot write."""

    def tensor(value: object) -> Arg:
        if isinstance(value, Tensor):
            tensors.append(value)
        return Ref(str(len(tensors) - 1)) if isinstance(value, Tensor) else None

    found = []
    for value in args:
        try:
            found.append(to_arg(value, tensor))
        except TypeError:
            found.append(Items(()))
        if isinstance(found[-1], Items):
            raise CaptureError(
                f"{cls.__name__}.apply is given a {type(value).__name__}, "
                "which cannot be written in a script",
                call_site(),
                "tensors, numbers, text, None and tuples of them as arguments",
            )
    return tuple(found)
