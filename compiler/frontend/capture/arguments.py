"""Torch values -> the literals of the graph."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
import torch

from ...ir.graph import Arg, Device, Items, TorchConstant
from .private import OpOverload, schema_of


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def to_arg(value: object, tensor: Callable[[object], Arg | None]) -> Arg:
    """A value as an argument of the graph. `tensor` answers for tensors and nodes, None for others.

    Raises TypeError for what a script could not spell.
    """
    known = tensor(value)
    if known is not None:
        return known
    if value is None or isinstance(value, bool | int | float | complex | str):
        return value
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return TorchConstant(str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return Device()
    if isinstance(value, Mapping):
        return Items(tuple((str(key), to_arg(item, tensor)) for key, item in value.items()))
    if isinstance(value, Sequence):
        return tuple(to_arg(item, tensor) for item in value)
    raise TypeError(f"{type(value).__name__} cannot be written in a script")


def numbers_of(tensor: torch.Tensor) -> object:
    """A tensor's numbers as they were written: 0.1, not the 0.10000000149011612 that float32 makes
    of it."""

    def shortest(numbers: object) -> object:
        if isinstance(numbers, list):
            return [shortest(number) for number in numbers]
        return float(str(np.float32(numbers)))  # type: ignore[arg-type]  # a float

    numbers = tensor.tolist()
    return shortest(numbers) if tensor.dtype == torch.float32 else numbers


def spelling(target: OpOverload) -> Literal["method", "torch", ""]:
    """Where Python has an operation under its own name."""
    schema = schema_of(target)
    name = schema.name.partition("::")[2]
    first = schema.arguments[0] if schema.arguments else None
    if (
        first
        and first.name == "self"
        and str(first.type) == "Tensor"
        and hasattr(torch.Tensor, name)
    ):
        return "method"
    return "torch" if hasattr(torch, name) else ""
