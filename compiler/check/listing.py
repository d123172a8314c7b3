"""Lists of operations: how models too large for numbers are compared.

Operations are seen below autograd, where spelling no longer shows. What only shows a tensor in
another shape, or changes nothing, is left out on both sides.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ignored = frozenset(
    ("view", "_unsafe_view", "reshape", "expand", "slice", "select", "t", "transpose", "permute",
     "unsqueeze", "squeeze", "as_strided", "alias", "detach", "lift_fresh", "split", "unbind",
     "clone", "_to_copy", "empty", "empty_like", "zeros_like", "_local_scalar_dense", "unfold",
     "diagonal", "split_with_sizes")
)  # fmt: skip


class Listing(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Notes each operation with the shapes that it gives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().split("::")[1].split(".")[0].rstrip("_")
        if func.namespace == "aten" and name not in ignored and not changes_nothing(name, args):
            leaves = [r for r in tree_leaves(result) if isinstance(r, torch.Tensor)]
            self.operations.append(f"{name} -> {', '.join(str(list(r.shape)) for r in leaves)}")
        return result


def changes_nothing(name: str, args: Sequence[object]) -> bool:
    """`+ 0`, `* 1`, a concatenation with an empty tensor: what canonical graphs leave out."""
    if (
        name in ("add", "sub", "mul", "div")
        and len(args) > 1
        and not isinstance(args[1], torch.Tensor)
    ):
        return args[1] == (0 if name in ("add", "sub") else 1)
    return name == "cat" and any(t.shape == (0,) for t in args[0])  # type: ignore[attr-defined]


def list_operations(run: Callable[[], object], mode: AbstractContextManager[object]) -> list[str]:
    """The operations of a computation on tensors without values, those of `mode`."""
    with mode, Listing() as listing:
        run()
    found: list[str] = listing.operations
    return found


def first_difference(found: Sequence[str], expected: Sequence[str]) -> str | None:
    """Where two lists part, or None."""
    for i, (a, b) in enumerate(zip(found, expected, strict=False)):
        if a != b:
            return f"operation {i} is {a}, not {b}"
    if len(found) != len(expected):
        return f"there are {len(found)} operations, not {len(expected)}"
    return None
