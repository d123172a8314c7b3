"""Arrays that lie in files: what a sample of them is."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ...errors import CaptureError, Location
from ...ir.graph import TensorMeta
from ...ir.spec import Arrays, Spec
from ...ir.values import dtypes
from .arguments import dtype_name
from .user import first_line


def open_arrays(spec: Spec, data: Arrays) -> dict[str, torch.Tensor]:
    """Every array, mapped into memory where its file allows that."""
    if isinstance(data.files, str):
        from safetensors import safe_open  # only for this source

        with (
            reading(data.files, spec.at("data.files")),
            safe_open(spec.folder / data.files, framework="pt") as file,
        ):
            names = file.keys()  # not a dict, so it has no iterator of its own
            metas = {name: file.get_tensor(name) for name in names}
    else:
        metas = {}
        for name, path in data.files.items():
            with reading(path, spec.at(f"data.files.{name}")):
                array = np.load(spec.folder / path, mmap_mode="c")
                if not array.dtype.isnative:
                    little = array.dtype.newbyteorder("<").str
                    raise ValueError(f"its numbers are big-endian, {array.dtype.str}, not {little}")
                metas[name] = torch.as_tensor(array)
    return metas


def count_arrays(spec: Spec, data: Arrays) -> int:
    """How many samples they hold."""
    arrays = open_arrays(spec, data)
    return min((len(a) for name, a in arrays.items() if name not in data.whole), default=1)


def read_arrays(spec: Spec, data: Arrays) -> dict[str, TensorMeta]:
    """Shape and dtype of a sample of each array, or of the array where it is whole."""
    metas = open_arrays(spec, data)
    counted = {name: tensor for name, tensor in metas.items() if name not in data.whole}
    for name, tensor in metas.items():
        if tensor.dim() == 0 and name in counted:
            message = f"{name} is one number; an array's first dimension counts the samples"
            raise CaptureError(message, spec.at("data.files"), one_whole(name))
        if dtype_name(tensor.dtype) not in dtypes:
            message = f"{name} has the dtype {dtype_name(tensor.dtype)}, which scripts do not read"
            raise CaptureError(message, spec.at("data.files"))
    counts = {name: tensor.shape[0] for name, tensor in counted.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise CaptureError(
            f"the arrays count different numbers of samples: {listed}",
            spec.at("data.files"),
            one_whole(min(counts, key=lambda name: counts[name])),
        )
    return {
        name: TensorMeta(tuple(tensor.shape[name in counted :]), dtype_name(tensor.dtype))
        for name, tensor in metas.items()
    }


def one_whole(name: str) -> str:
    """What to write of an array that holds no samples."""
    return f"data: {{whole: [{name}]}} if it has no batch dimension, but goes to all samples"


@contextmanager
def reading(path: str, where: Location | None) -> Iterator[None]:
    """Raises CaptureError at the spec's line where a file is missing or holds no plain numbers."""
    try:
        yield
    except Exception as error:
        raise CaptureError(
            f"{path} cannot be read: {first_line(error)}",
            where,
            "arrays of numbers as numpy.save or safetensors write them, no objects or strings",
        ) from error
