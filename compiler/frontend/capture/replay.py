"""Runs recipes and graphs on real (or fake) tensors, one op at a time."""

import zlib
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch

from ...ir.graph import Arg, Device, Dim, Items, Op, Recipe, Ref, State, TorchConstant
from . import whole
from .autocast import autocast

classes: dict[str, Any] = {}
"""The user's autograd functions of every capture in this process, by the target of their ops:
equal targets have equal texts."""

block_elements = 2**20
"""Random tensors are filled by blocks of this size, each with a seed of its own: whoever holds a
part of a tensor draws only the blocks of that part."""


def function(target: str) -> Callable[..., object]:
    """`aten.linear.default` -> the operation."""
    namespace, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)  # type: ignore[no-any-return]


def value(argument: Arg, lookup: Callable[[Ref | State], object], batch: int = 0) -> object:
    """An argument of the graph as torch takes it."""
    if isinstance(argument, Ref | State):
        return lookup(argument)
    if isinstance(argument, Dim):
        return argument.coefficient * batch
    if isinstance(argument, TorchConstant):
        return getattr(torch, argument.name)
    if isinstance(argument, Device):
        return torch.device("cpu")
    if isinstance(argument, tuple):
        return [value(item, lookup, batch) for item in argument]
    if isinstance(argument, Items):
        return {key: value(item, lookup, batch) for key, item in argument.items}
    return argument


def given(
    args: Iterable[Arg], lookup: Callable[[Ref | State], object], batch: int = 0
) -> list[Any]:
    """Arguments as a script gives them to a user's function: tuples are tuples."""

    def as_script(found: object) -> object:
        return tuple(map(as_script, found)) if isinstance(found, list) else found

    return [as_script(value(a, lookup, batch)) for a in args]


def run_op(op: Op, lookup: Callable[[Ref | State], object], batch: int = 0) -> object:
    """Run one op."""
    if op.target in classes:
        with autocast(op.autocast):
            return classes[op.target].apply(*given(op.args, lookup, batch))
    if op.target == whole.target:
        with autocast(op.autocast):
            return whole.run(op, lambda argument: value(argument, lookup, batch))
    args = [value(a, lookup, batch) for a in op.args]
    kwargs = {key: value(a, lookup, batch) for key, a in op.kwargs}
    if op.target == "ppc.tensor.default":
        return torch.tensor(*args, **kwargs)  # type: ignore[arg-type]
    with autocast(op.autocast):
        return function(op.target)(*args, **kwargs)


def replay(recipe: Recipe, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The tensor that a recipe gives, as the emitted scripts give it."""
    values: dict[str, object] = {"self": torch.empty(shape, dtype=dtype)}
    keys = dict(recipe.seeds)
    with torch.no_grad():
        for op in recipe.ops:
            if op.random:
                tensor = values[op.args[0].name]  # type: ignore[union-attr]
                draw(tensor, op, f"{seed} {keys.get(op.name, op.name)}")  # type: ignore[arg-type]
                result: object = tensor
            else:
                result = run_op(op, lambda ref: values[str(ref)])
            outputs = result if isinstance(result, list | tuple) else (result,)
            values.update(zip(op.outputs, outputs, strict=False))
    return values[recipe.result].to(dtype).reshape(shape)  # type: ignore[attr-defined, no-any-return]


def draw(tensor: torch.Tensor, op: Op, key: str) -> None:
    """Fill a tensor with random numbers: drawn in float32 by seeded blocks, then cast."""
    drawn = torch.empty(
        prod(tensor.shape), dtype=torch.float32 if tensor.is_floating_point() else tensor.dtype
    )
    for i, block in enumerate(torch.split(drawn, block_elements)):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{key} {i}".encode()))
        fill_block(block, op, generator)
    tensor.copy_(drawn.view(tensor.shape))


def fill_block(block: torch.Tensor, op: Op, generator: torch.Generator) -> None:
    """Run an in-place random op on a block."""
    numbers: list[Any] = list(op.args[1:])
    if op.target == "ppc.trunc_normal_.default":
        mean, std, low, high = numbers
        torch.nn.init.trunc_normal_(block, mean, std, low, high, generator=generator)
    else:
        function(op.target)(block, *numbers, **dict(op.kwargs), generator=generator)
