"""Samples of a Dataset that differ in length, filled up to the length that the spec declares."""

import torch
from torch import Tensor

from ...errors import CaptureError
from ...ir.spec import Dataset, Spec


def fill_up(tensor: Tensor, value: float, length: int) -> Tensor:
    """A field of a sample with `value` after its last element, along the first dimension.

    Raises ValueError where it is longer: nothing is cut off.
    """
    if len(tensor) > length:
        raise ValueError(f"has length {len(tensor)}; data.length is {length}")
    filled = torch.full((length, *tensor.shape[1:]), value, dtype=tensor.dtype)
    filled[: len(tensor)] = tensor
    return filled


def check_padding(spec: Spec, data: Dataset, fields: dict[str, Tensor]) -> None:
    """Every field under `pad` is there, has a length, and can hold what fills it up."""
    for name, value in data.pad.items():
        where = spec.at(f"data.pad.{name}")
        if name not in fields:
            message = f"the data has no field {name!r}; it has {', '.join(fields)}"
            raise CaptureError(message, where, "pad names fields that a sample has")
        tensor = fields[name]
        if tensor.dim() == 0:
            message = f"a sample's {name} is one number, with no length to fill up"
            raise CaptureError(message, where, "leave it out of data.pad")
        held = torch.tensor(value).to(tensor.dtype).item() if tensor.dtype != torch.bool else value
        if not tensor.dtype.is_floating_point and held != value:
            message = (
                f"{name} is {str(tensor.dtype).removeprefix('torch.')}, which holds no {value}"
            )
            raise CaptureError(message, where, f"pad: {{{name}: 0}}")
