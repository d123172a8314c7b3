"""Samples of a Dataset that no batch could hold: a few are read before the model is captured."""

import torch

from ...errors import CaptureError
from ...ir.graph import TensorMeta
from ...ir.spec import Dataset, Spec
from .build import seeded
from .fields import is_float, make_dataset, read_fields, sample_keys
from .padding import fill_up
from .user import users_errors

looked_at = 4
"""The first ones, and as many spread over the rest: data that differs at all mostly differs here.
The scripts look at each sample that they read."""


def refuse_unlike(spec: Spec) -> None:
    """Raises CaptureError where a sample has another shape or kind of number than sample 0."""
    data = spec.data
    if not isinstance(data, Dataset):
        return
    where, usual = spec.at("data.source"), read_fields(spec)
    with seeded(spec.train.seed), users_errors(where, f"{data.source}: reading samples failed"):
        dataset = make_dataset(data, spec)
        count = len(dataset)  # type: ignore[arg-type]  # a Dataset of the user's
        spread = range(count - 1, 0, -max(1, count // looked_at))
        for number in sorted({*range(1, min(looked_at, count)), *spread}):
            sample = dataset[number]  # type: ignore[index]  # the same
            for name, key in sample_keys(data, sample).items():
                tensor = torch.as_tensor(sample if key is None else sample[key])
                if name in data.pad:
                    tensor = filled(spec, data, name, number, tensor)
                compare(spec, name, number, tensor, usual[name])


def filled(spec: Spec, data: Dataset, name: str, number: int, tensor: torch.Tensor) -> torch.Tensor:
    """Raises CaptureError where it is too long already."""
    try:
        return fill_up(tensor, data.pad[name], data.length or 0)
    except ValueError as error:
        message = f"{name} of sample {number} {error}"
        raise CaptureError(message, spec.at("data.length"), "a longer data.length") from error


def compare(spec: Spec, name: str, number: int, tensor: torch.Tensor, usual: TensorMeta) -> None:
    """Raises CaptureError where a field of a sample is not as that of sample 0."""
    where, start = spec.at("data.source"), f"{name} of sample {number} has the"
    if tuple(tensor.shape) != usual.shape:
        same = tuple(tensor.shape[1:]) == usual.shape[1:] and tensor.dim()
        longer = max(len(tensor), *map(int, usual.shape[:1])) if same else 0  # type: ignore[arg-type]
        raise CaptureError(
            f"{start} shape {[*tensor.shape]}, that of sample 0 {[*usual.shape]}: a batch has one",
            where,
            f"data: {{pad: {{{name}: 0}}, length: {longer} or more}}"
            if same
            else "samples of one shape: crop, resize or fill them up in the Dataset",
        )
    dtype: torch.dtype = getattr(torch, usual.dtype)
    both = tensor.is_floating_point() and is_float(usual.dtype)
    if not both and torch.promote_types(tensor.dtype, dtype) != dtype:
        raise CaptureError(
            f"{start} dtype {tensor.dtype}, that of sample 0 {dtype}, which does not hold it",
            where,
            "numbers of one kind: 0.0 instead of 0, or torch.tensor(value, dtype=...)",
        )
