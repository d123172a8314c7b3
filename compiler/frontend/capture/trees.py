"""The leaves of nests of lists, tuples and dicts."""

from collections.abc import Callable
from typing import Any


def tree_leaves(tree: Any) -> list[Any]:
    """All of them, in order."""
    leaves: list[Any] = []
    tree_map(leaves.append, tree)
    return leaves


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """The nest with what the function makes of each."""
    if isinstance(tree, dict):
        return {key: tree_map(function, item) for key, item in tree.items()}
    if not isinstance(tree, list | tuple):
        return function(tree)
    items = [tree_map(function, item) for item in tree]
    if isinstance(tree, list):
        return items
    return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
