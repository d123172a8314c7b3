"""Where a traced node stands in the user's code: its module call, its statement, its line."""

import re
from collections.abc import Mapping
from typing import Any

from torch.fx import Node

from ...errors import Location
from ...ir.graph import CallId, Statement
from .statements import Frame, frames, statement, users_frame
from .user import is_users, place


class Places:
    """Finds the places of nodes, given in order, and numbers the statements as they run."""

    def __init__(self, keys: Mapping[CallId, CallId]) -> None:
        self.keys = keys
        self.statements: dict[int, Statement] = {}
        self.call_statements: dict[CallId, int] = {}
        """Call -> the statement of its caller that makes it."""
        self.parents: dict[CallId, CallId] = {}
        self.running: dict[CallId, tuple[tuple[str, int], int, frozenset[str]]] = {}
        """Call -> (its current statement, that statement's number, containers entered in it)."""

    def find(self, node: Node) -> tuple[CallId, int]:
        """The module call around a node, and the number of the statement it belongs to there."""
        named = module_calls(node)
        stack = [self.keys.get(call, call) for call in named]
        if not stack:
            return ("", 0), self.number(("", -1), Frame("", 0), "")  # the loss
        lines = frames(node.stack_trace)[1:]  # likewise
        aligned = len(lines) == len(stack)
        for depth, child in enumerate(stack[1:]):
            if child not in self.call_statements:
                line = lines[depth] if aligned else None
                self.parents[child] = stack[depth]
                self.call_statements[child] = self.number(stack[depth], line, named[depth + 1][0])
        own = lines[-1] if aligned else users_frame(frames(node.stack_trace))
        return stack[-1], self.number(stack[-1], own, "")

    def number(self, call: CallId, frame: Frame | None, child: str) -> int:
        """The number of the statement that runs in a call: a new one whenever the statement
        changes, goes on to another child of the same container, or calls a child again (a loop)."""
        line, targets = statement(frame) if frame and frame.file else (0, ())
        targets = targets if frame and is_users(frame.file) else ()
        key = (frame.file, line) if frame else ("", 0)
        before, number, entered = self.running.get(call, (("", -1), 0, frozenset()))
        container = re.sub(r"\.\d+$", "", child) if re.search(r"\.\d+$", child) else ""
        if frame is None or key != before or {container, child} & entered:
            number, entered = len(self.statements) + 1, frozenset()
            self.statements[number] = Statement(f"{key[0]}:{key[1]}" if key[0] else "", targets)
        self.running[call] = (key, number, (entered | {container, child}) - {""})
        return number


def module_calls(node: Node) -> list[CallId]:
    """The calls of the user's modules around a node, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return [
        (
            str(path).removeprefix("model").removeprefix("."),
            int((re.findall(r"@(\d+)$", key) or ["0"])[0]),
        )
        for key, (path, _) in stack.items()
    ][1:]  # the first is Training


def module_path(node: Node) -> str:
    """The module that a node runs in, for people."""
    calls = module_calls(node)
    return (calls[-1][0] if calls else "the loss") or "the model"


def users_location(node: Node) -> Location | None:
    frame = users_frame(frames(node.stack_trace))
    return place(frame.file, frame.line) if frame else None


def region_mark(node: Node) -> tuple[str, Any] | None:
    """What a node changes for those after it: `grad` and whether it is on; `enter` an autocast and
    its dtype, "" for off, None for one that leaves the CPU alone; or `exit` it."""
    name = getattr(node.target, "__name__", "")
    if name == "_set_grad_enabled":
        return "grad", node.args[0]
    if name == "_enter_autocast":
        device, dtype, on, _ = node.args
        return "enter", str(dtype).removeprefix("torch.") * bool(on) if device == "cpu" else None
    return ("exit", None) if name == "_exit_autocast" else None
