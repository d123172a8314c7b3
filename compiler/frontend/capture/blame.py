"""Errors of torch that a field of the data causes: which, and what it should hold instead."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from torch import Tensor

from ...errors import CaptureError, Location
from ...ir.spec import Random, Spec
from .arguments import dtype_name
from .private import TorchDispatchMode, is_fake, storage_address
from .remedies import is_data_dependent
from .trees import tree_leaves
from .user import call_site

bounded: Mapping[str, Callable[..., tuple[int, str]]] = {
    "aten::embedding": lambda table, *_: (table.shape[0], "rows of the embedding"),
    "aten::nll_loss": lambda scores, *_: (scores.shape[1 if scores.dim() > 1 else 0], "classes"),
    "aten::gather": lambda source, dim, *_: (source.shape[dim], "elements"),
    "aten::index_select": lambda source, dim, *_: (source.shape[dim], "elements"),
}
"""Operations that look numbers up, by the beginning of their names -> how many there are to find,
and what that is."""


wrong_dtype = r"dtype|scalar type|can't be cast"
out_of_range = r"out of (bounds|range)"
kinds = rf"{wrong_dtype}|{out_of_range}|target|shape|size|\bdim"
"""Words of such errors."""


class Failing(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Notes the first operation that fails."""

    name = ""
    arguments: tuple[Any, ...] = ()
    where: Location | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            if not self.name:
                self.name, self.arguments, self.where = func.name(), args, call_site()
            raise


@contextmanager
def blaming_fields(
    spec: Spec | None,
    inputs: Mapping[str, Tensor],
    again: Callable[[AbstractContextManager[object]], object],
) -> Iterator[None]:
    """Say of an error about a dtype, an index or a shape which field it comes from. `again` runs
    the model once more on these inputs, within what it is given."""
    try:
        yield
    except CaptureError as error:
        cause = error.__cause__
        told = not isinstance(cause, Exception) or is_data_dependent(cause)
        if not spec or told or not re.search(kinds, error.message):
            raise
        seen = Failing()  # type: ignore[no-untyped-call]  # torch's own
        with suppress(Exception):
            again(seen)
        name = given_field(seen, inputs)
        if not name:
            raise
        raise explained(spec, error, seen, name, inputs[name]) from cause


def given_field(seen: Failing, inputs: Mapping[str, Tensor]) -> str:
    """The field that an operation was given, "" for none."""
    given = [a for a in tree_leaves(seen.arguments) if isinstance(a, Tensor)]
    addresses = {storage_address(tensor) for tensor in given}
    return next((n for n, t in inputs.items() if storage_address(t) in addresses), "")


def explained(
    spec: Spec, error: CaptureError, seen: Failing, name: str, tensor: Tensor
) -> CaptureError:
    """The error with the field, and with the remedy that lies in the data."""
    random = isinstance(spec.data, Random)
    key, what, hint = f"data.fields.{name}", str(dtype_name(tensor.dtype)), error.hint
    limit, things = find_limit(seen)
    if re.search(out_of_range, error.message) and not is_fake(tensor):
        low, high = int(tensor.min()), int(tensor.max())
        what = f"{what} from {low} to {high}"
        what += f", and there are {limit} {things}" if limit else ""
        bound = "low: 0" if low < 0 else f"high: {limit}, or more {things}" if limit else ""
        key, hint = f"{key}.{bound.partition(':')[0]}", bound if bound and random else hint
    elif re.search(wrong_dtype, error.message):
        form = f"dtype: int64, high: {limit or 10}"
        cast, form = ("long", form) if tensor.is_floating_point() else ("float", "dtype: float32")
        hint = f"{name}: {{{form}}}" if random else f"{name}.{cast}()"
    else:
        what = f"{what}{[*tensor.shape]}, the samples of a microbatch first"
    place = spec.at(key if random else "data")
    own = error.where and error.where.file.endswith(".py")
    message = f"{error.message.removesuffix('.')}; it is given the field {name}"
    message += f" ({place})" if own else ""
    return CaptureError(f"{message}, {what}", error.where if own else place, hint)


def find_limit(seen: Failing) -> tuple[int, str]:
    """How many things an operation that looks numbers up has, and what they are; 0 if unknown."""
    for name, limit in bounded.items():
        if seen.name.startswith(name):
            return limit(*seen.arguments)
    return 0, ""
