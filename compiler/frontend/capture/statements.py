"""The user's statements: which one an op belongs to, and which names it assigns.

With them an emitted class reads like the user's own: `q, k, v = ...` instead of `split_3[1]`.
"""

import ast
import linecache
import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from .user import is_users


class Frame(NamedTuple):
    """A line of the user's (or of a library's) forward."""

    file: str
    line: int


def frames(stack_trace: str | None) -> list[Frame]:
    """The frames of a node's stack trace, outermost first."""
    found = re.findall(r'File "([^"]+)", line (\d+), in ', stack_trace or "")
    return [Frame(file, int(line)) for file, line in found]


def users_frame(stack: Sequence[Frame]) -> Frame | None:
    """The innermost frame that is not torch's own."""
    return next((frame for frame in reversed(stack) if is_users(frame.file)), None)


@cache
def parse(file: str) -> tuple[ast.stmt, ...]:
    """Every statement of a file, outer before inner; () for what is no Python file."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.stmt))


@cache
def statement(frame: Frame) -> tuple[int, tuple[str, ...]]:
    """First line of the statement around a line, and the plain names that it assigns."""
    around = [
        node
        for node in parse(frame.file)
        if node.lineno <= frame.line <= (node.end_lineno or node.lineno)
    ]
    if not around:
        return frame.line, ()
    innermost = max(around, key=lambda node: (node.lineno, -(node.end_lineno or 0)))
    return innermost.lineno, targets(innermost)


def targets(node: ast.stmt) -> tuple[str, ...]:
    """`q, k` for `q, k = ...`; () where anything but plain names is assigned."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target: ast.expr = node.targets[0]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        target = node.target
    else:
        return ()
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    names = tuple(part.id if isinstance(part, ast.Name) else "" for part in parts)
    return names if all(names) else ()


def forget() -> None:
    """Read files anew: the user may have edited them since the last capture."""
    linecache.checkcache()
    parse.cache_clear()
    statement.cache_clear()
