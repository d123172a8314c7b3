"""Records how a model is initialised while its factory runs without data (FakeTensorMode).

Every operation is kept, with tensors known by the part of a storage that they show. The recipe of a
tensor is the slice of operations that its final value depends on, cut where one of them overwrites
it wholly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...ir.graph import Arg, Op, Recipe, Ref, TorchConstant
from .arguments import dtype_name, numbers_of, spelling, to_arg
from .overloads import without_out
from .private import (
    TorchDispatchMode,
    is_fake,
    no_modes,
    schema_of,
    storage_address,
)
from .recipe import full_overwrites, is_fill, simplify
from .replay import replay
from .trees import tree_leaves

max_inline_elements = 16
"""A constant up to this size is written into the script; a larger one is saved beside it."""

reshaping_in_place = frozenset(
    f"aten::{name}" for name in ("t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_")
)
"""These change what a tensor shows and leave its storage alone."""


like = {
    **{
        f"aten.{n}_like.default": f"aten.{n}.default"
        for n in ("zeros", "ones", "full", "randn", "rand")
    },
    **{f"aten.new_{n}.default": f"aten.{n}.default" for n in ("zeros", "ones", "full")},
    **dict.fromkeys(
        ("aten.empty_like.default", "aten.new_empty.default", "aten.new_empty_strided.default"),
        "aten.empty.memory_format",
    ),
}  # fmt: skip
"""Operations that read of a tensor just its shape and dtype -> the same by themselves."""


@dataclass(frozen=True, slots=True)
class View:
    """What a tensor shows: a part of a storage."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    whole: bool
    """It shows all of the storage."""


@dataclass(frozen=True, slots=True)
class Event:
    """One recorded operation."""

    op: Op
    reads: tuple[View, ...]
    writes: tuple[View, ...]
    makes: tuple[View, ...]
    repeatable: bool
    """A script can run it again: it draws nothing, or real numbers by the global generator."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Records every operation that runs under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.names: dict[View, str] = {}
        self.constants: dict[str, torch.Tensor] = {}
        """Real tensors that came in from outside, by name."""
        self.held: list[object] = []
        self.touching: dict[int, list[int]] = {}
        """By storage the numbers of the events that write it or make a view of it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and is_fake(args[0]):
            return self.number(args[0])
        if func is torch.ops.aten.lift_fresh.default and not is_fake(args[0]):
            result = func(*args, **kwargs)
            self.constants[self.name(result)] = real_copy(args[0])
            return result
        if func.namespace not in ("aten", "ppc"):
            return func(*args, **kwargs)
        if isinstance(kwargs.get("out"), torch.Tensor) and (plain := without_out(func)):
            out = kwargs["out"]
            rest = {name: value for name, value in kwargs.items() if name != "out"}
            result = self.__torch_dispatch__(plain, types, args, rest).to(out.dtype)
            return self.__torch_dispatch__(torch.ops.aten.copy_.default, types, (out, result))
        reads, op = self.views((args, kwargs)), self.operation(func, args, kwargs)
        result = func(*args, **kwargs)
        self.record(op, reads, result, own_generator=kwargs.get("generator") is not None)
        return result

    def operation(self, func: Any, args: Any, kwargs: Any) -> Op:
        """An operation about to run; some change what their argument shows, so this comes first."""

        def tensor(value: object) -> Arg | None:
            return Ref(self.name(value)) if isinstance(value, torch.Tensor) else None

        schema = schema_of(func).arguments
        target = str(func)
        reshapes = schema_of(func).name in reshaping_in_place
        written = [
            a for a, s in zip(args, schema, strict=False) if s.alias_info and s.alias_info.is_write
        ]
        return Op(
            name=f"op{len(self.events)}",
            target=target.replace("_.", ".") if reshapes else target,
            args=tuple(to_arg(a, tensor) for a in args),
            kwargs=tuple(
                (k, to_arg(v, tensor))
                for k, v in kwargs.items()
                if k not in ("pin_memory", "layout", "generator")
            ),
            arg_names=tuple(argument.name for argument in schema)[: len(args)],
            outputs=(),
            call=("", 0),
            mutates=()
            if reshapes
            else tuple(self.name(t) for t in written if isinstance(t, torch.Tensor)),
            random=torch.Tag.nondeterministic_seeded in func.tags or func.namespace == "ppc",
            spelling=spelling(func),
        )

    def record(
        self, op: Op, reads: tuple[View, ...], result: object, *, own_generator: bool
    ) -> None:
        """Keep an operation, unless it makes nothing new."""
        results = self.views(result)
        if op.target in like:
            op, reads = afresh(op, results[0]), ()
        makes = tuple(view for view in results if view not in reads)
        if op.mutates or makes:
            op = replace(op, outputs=tuple(self.names[view] for view in results))
            writes = tuple(view for view in reads if self.names[view] in op.mutates)
            real = all(getattr(torch, view.dtype).is_floating_point for view in results)
            repeatable = not op.random or (is_fill(op) and real and not own_generator)
            for storage in {view.storage for view in (*writes, *makes)}:
                self.touching.setdefault(storage, []).append(len(self.events))
            self.events.append(Event(op, reads, writes, makes, repeatable))

    def view(self, tensor: torch.Tensor) -> View:
        storage = tensor.untyped_storage()
        self.held.append(storage)  # else its address could come back as another's
        whole = (
            tensor.is_contiguous() and storage.nbytes() == tensor.numel() * tensor.element_size()
        )
        return View(
            storage_address(tensor), int(tensor.storage_offset()), tuple(tensor.shape),
            tuple(tensor.stride()), dtype_name(tensor.dtype), whole,
        )  # fmt: skip

    def name(self, tensor: torch.Tensor) -> str:
        """The tensor's name; tensors that show the same part of a storage share one."""
        view = self.view(tensor)
        if view not in self.names:
            self.names[view] = f"v{len(self.names)}"
            if not is_fake(tensor):
                self.constants[self.names[view]] = real_copy(tensor)
        return self.names[view]

    def views(self, values: object) -> tuple[View, ...]:
        """Of every tensor in a nest of tuples, lists and dicts."""
        leaves = tree_leaves(values)
        found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for tensor in found:
            self.name(tensor)
        return tuple(self.view(tensor) for tensor in found)

    def number(self, tensor: torch.Tensor) -> bool | int | float | complex:
        """What `.item()` asks for, by running the operations that it depends on."""
        recipe = self.recipes({"": tensor})[""]
        if recipe.saved or any(op.random for op in recipe.ops):
            raise RuntimeError(
                "the model's structure hangs on a random number or on a value from an array: "
                "its factory asks for it by .item(), .tolist() or an `if`"
            )
        with no_modes():
            return replay(recipe, tuple(tensor.shape), tensor.dtype, seed=0).item()

    def recipes(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Recipe]:
        """The operations that give each tensor its value; seeds are chosen later.

        What no script can repeat is saved, and with it whatever shares a draw with it.
        """
        slices = {name: self.slice(self.view(tensor)) for name, tensor in tensors.items()}
        draws = {n: {e.op.name for e in events if e.op.random} for n, events in slices.items()}
        saved = {name for name, t in tensors.items() if self.must_save(t, slices[name])}
        lost = set().union(*(draws[name] for name in saved))
        while more := {n for n, drawn in draws.items() if n not in saved and drawn & lost}:
            saved |= more
            lost = lost.union(*(draws[name] for name in more))
        return {
            name: Recipe(saved=True) if name in saved else self.recipe(tensor, slices[name])
            for name, tensor in tensors.items()
        }

    def must_save(self, tensor: torch.Tensor, events: Sequence[Event]) -> bool:
        """Whether no script can make the tensor: it draws in its own way, or holds much data."""
        constants = self.constants_of(tensor, events)
        large = any(self.constants[name].numel() > max_inline_elements for name in constants)
        return large or not all(e.repeatable for e in events) or not (events or constants)

    def constants_of(self, tensor: torch.Tensor, events: Sequence[Event]) -> list[str]:
        """The real tensors that a tensor's value depends on, by name."""
        used = {self.name(tensor), *(self.names[view] for e in events for view in e.reads)}
        return [name for name in self.constants if name in used]

    def recipe(self, tensor: torch.Tensor, events: Sequence[Event]) -> Recipe:
        """The operations that give one tensor its value, as a script runs them."""
        constants = self.constants_of(tensor, events)
        literals = [literal(name, self.constants[name]) for name in constants]
        return simplify((*literals, *(event.op for event in events)), self.name(tensor))

    def slice(self, target: View) -> list[Event]:
        """The events that a tensor's value depends on, in order."""
        contents, objects, found = {target.storage}, {target}, []
        waiting = {*self.touching.get(target.storage, ())}
        while waiting:
            number = max(waiting)
            waiting.remove(number)
            event = self.events[number]
            if not any(v.storage in contents for v in event.writes) and objects.isdisjoint(
                event.makes
            ):
                continue
            fresh = {view.storage for view in event.makes} - {view.storage for view in event.reads}
            if not event.writes and len(event.makes) == 1 and fresh and contents.isdisjoint(fresh):
                event = room(event)  # overwritten later: what it holds does not matter
            found.append(event)
            overwritten = event.writes[:1] if event.op.target in full_overwrites else ()
            contents -= fresh | {view.storage for view in overwritten if view.whole}
            objects -= set(event.makes)
            if event.writes or fresh:  # else it shows a part of what is there, and reads nothing
                contents |= {v.storage for v in event.reads if v not in overwritten}
            objects |= set(event.reads)
            earlier = (n for view in event.reads for n in self.touching.get(view.storage, ()))
            waiting.update(n for n in earlier if n < number)
        return found[::-1]


def room(event: Event) -> Event:
    """An event that only makes room for what its operation made."""
    (view,) = event.makes
    op = afresh(replace(event.op, target="aten.empty_like.default", args=(), random=False), view)
    return replace(event, op=op, reads=(), repeatable=True)


def afresh(op: Op, view: View) -> Op:
    """The operation that makes a tensor by itself, for one that makes it in another's likeness."""
    value = op.args[-1:] if op.target in ("aten.full_like.default", "aten.new_full.default") else ()
    return replace(
        op,
        target=like[op.target],
        args=(view.shape, *value),
        kwargs=(("dtype", TorchConstant(view.dtype)),),
        arg_names=("size", "fill_value")[: 1 + len(value)],
        spelling="torch",
    )


def literal(name: str, value: torch.Tensor) -> Op:
    """A constant, written out."""
    return Op(
        name=f"literal_{name}", target="ppc.tensor.default",
        args=(to_arg(numbers_of(value), lambda _: None),), arg_names=("data",),
        kwargs=(("dtype", to_arg(value.dtype, lambda _: None)),), outputs=(name,), call=("", 0),
    )  # fmt: skip


def real_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a real tensor, made outside of any mode."""
    with no_modes():
        return tensor.detach().clone()
