"""What to write instead of what no graph can hold."""

import traceback
from collections.abc import Iterable, Sequence

import torch

from ...errors import CaptureError, Location

other_ways = {
    "flex_attention": "F.scaled_dot_product_attention with a mask; a model of transformers: "
    "attn_implementation='sdpa' in its config",
}
"""What to write instead of operations that hold functions."""


def other_way(name: str, *, transform: bool) -> str:
    """What to write instead of something that holds functions."""
    if transform:
        return "operations on the whole batch"
    return other_ways.get(name) or (
        "operations of torch that compute it: torch.where of both branches for torch.cond, a loop "
        "over range(n) for a scan"
    )


def is_data_dependent(error: Exception) -> bool:
    """Whether a trace failed since it needed values: torch's errors of that kind are in private
    modules, but keep their names."""
    kinds = ("GuardOnDataDependentSymNode", "DataDependentOutput", "DynamicOutputShape")
    return any(cls.__name__.startswith(kinds) for cls in type(error).__mro__)


def has_experts(error: Exception) -> bool:
    """Whether it comes from transformers' experts, who are looped over as the data choose."""
    owners = (f.f_locals.get("self") for f, _ in traceback.walk_tb(error.__traceback__))
    classes = [type(owner) for owner in owners]
    return any(
        "Experts" in c.__name__ and c.__module__.startswith("transformers.") for c in classes
    )


def needs_values(
    where: Location | None, running: Sequence[str], *, experts: bool = False
) -> CaptureError:
    """Of what no graph can say before the data is there."""
    leaf = leaf_hint(running)
    return CaptureError(
        "what forward computes hangs on the values of its data, not just on their shapes",
        where,
        "experts_implementation='batched_mm' in the model's config"
        if experts
        else "torch.where instead of `if`, all elements instead of x[mask], no .item()"
        + f"; or {leaf}" * bool(leaf),
    )


def refuse_sparse(values: Iterable[object], where: Location | None) -> None:
    """Raises CaptureError for a value that has no storage of its own, which no script passes on."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            layout = str(value.layout).removeprefix("torch.")
            raise CaptureError(
                f"forward makes a tensor of layout {layout}, and a stage holds dense ones",
                where,
                "the same in dense tensors: torch.where, index_add, a product with a mask",
            )


def leaf_hint(running: Sequence[str]) -> str:
    """How to keep the innermost module whole that runs and may be a leaf; "" where that is all of
    the model. `running`: paths, "" for a module of a library."""
    path = next(filter(None, reversed(running)), "")
    return f"keep the module whole: model: {{leaf: [{path}]}}" if path else ""
