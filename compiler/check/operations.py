"""What an operation below autograd does to its arguments, read off its schema."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..frontend.capture.private import schema_of
from ..frontend.capture.trees import tree_leaves
from .shown import is_whole

copying = frozenset(("clone", "_to_copy", "lift_fresh", "lift_fresh_copy"))
"""Their result equals their first argument."""

reshaping = frozenset(
    f"aten::{name}_"
    for name in ("t", "transpose", "squeeze", "unsqueeze", "swapaxes", "detach", "as_strided")
)
"""These change what a tensor shows and leave its storage alone."""


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments whose storage an operation writes; norms keep quiet about their statistics."""
    if func.name() in reshaping:
        return []
    schema = schema_of(func).arguments
    given = by_name(func, args, kwargs)
    names = [a.name for a in schema if a.alias_info is not None and a.alias_info.is_write]
    if given.get("training") or given.get("use_input_stats"):
        names += [n for n in ("running_mean", "running_var") if n not in names]
    leaves = tree_leaves([given.get(name) for name in names])
    return [t for t in leaves if isinstance(t, Tensor)]


def by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """An operation's arguments by the names of its schema, defaults included."""
    schema = schema_of(func).arguments
    found: dict[str, Any] = {a.name: a.default_value for a in schema if a.has_default_value()}
    return {**found, **dict(zip((a.name for a in schema), args, strict=False)), **kwargs}


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


def pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those of a concatenation that are not empty."""
    return [t for t in tensors if t.shape != (0,)]
