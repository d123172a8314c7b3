"""The leaves of nests of lists, tuples and dicts."""

from collections.abc import Callable
from typing import Any

from torch.fx.node import map_aggregate


def tree_leaves(tree: Any) -> list[Any]:
    """All of them, in order."""
    leaves: list[Any] = []
    map_aggregate(tree, leaves.append)
    return leaves


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """The nest with what the function makes of each."""
    return map_aggregate(tree, function)
