"""Refuses parameters that lie beside the model, as globals of the user's files: nothing trains
them, and a trace takes them for constants."""

import ast
import sys
from collections.abc import Iterator

from torch import Tensor, nn

from ...errors import CaptureError, Location
from .statements import parse, targets
from .training import Training
from .user import found_beside, is_users, place


def refuse_foreign(training: Training, loss: Tensor) -> None:
    """Raises CaptureError where a gradient leads from the loss to one."""
    owned = set(map(id, training.model.parameters()))
    globals_ = {id(tensor): (name, file) for tensor, name, file in tensors_of_files(training)}
    for leaf in leaves_behind(loss):
        if id(leaf) in globals_.keys() - owned:
            name, file = globals_[id(leaf)]
            raise CaptureError(
                f"{name} is trained by nothing: a gradient comes to it, and the model does not own "
                "it",
                assignment(file, name) or training.where,
                f"self.{name} in __init__ of the model, which may return its loss itself: "
                "model: {loss: output}; or requires_grad_(False)",
            )


def leaves_behind(result: Tensor) -> Iterator[Tensor]:
    """Tensors to which a backward from a result would bring a gradient; it need not run."""
    waiting, seen = [result.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            yield leaf
        waiting += [inner for inner, _ in node.next_functions]


def tensors_of_files(training: Training) -> Iterator[tuple[Tensor, str, str]]:
    """(parameter, the global that it is, or that holds it; the file) of the user's files."""
    functions = (training.loss, *(type(m).forward for m in training.model.modules()))
    files = [vars(sys.modules[name]) for name in found_beside if name in sys.modules]
    files += [function.__globals__ for function in functions if hasattr(function, "__globals__")]
    for variables in {id(each): each for each in files}.values():
        file = str(variables.get("__file__", ""))
        for name, value in list(variables.items()) if is_users(file) else ():
            held = value.parameters() if isinstance(value, nn.Module) else (value,)
            for tensor in held:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    yield tensor, name, file


def assignment(file: str, name: str) -> Location | None:
    """Where a file gives a global its value."""
    lines = (node.lineno for node in parse(file) if assigns(node, name))
    line = next(lines, None)
    return place(file, line) if line else None


def assigns(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign | ast.AnnAssign) and name in targets(node)
