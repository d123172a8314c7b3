"""Where a graph and the user's model part: a fault of the compiler's, or of a model that computes
something else for some number of samples."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CaptureError, Location
from ..frontend.capture.batch import Generaliser
from ..frontend.capture.blame import Failing
from ..frontend.capture.build import build_fake
from ..frontend.capture.capture import trace
from ..frontend.capture.coupled import at_loss
from ..frontend.capture.export import make_inputs
from ..frontend.capture.fields import bind, read_fields
from ..frontend.capture.private import TorchDispatchMode
from ..frontend.capture.remedies import needs_values
from ..frontend.capture.training import Training, make_training
from ..frontend.capture.trees import tree_leaves
from ..frontend.capture.user import location, model_folder, place, running_lines
from ..ir.graph import Graph, Op, State
from ..ir.spec import Spec
from .outcome import copy_state, run_ops

Made = dict[Any, list[Tensor]]
"""By op, or by the user's line: what was computed."""


def differing_op(spec: Spec, size: int, usual: int) -> CaptureError | None:
    """What becomes of the first operation that is another for another number of samples."""
    built, fields = build_fake(spec), read_fields(spec)
    training = make_training(spec, built.model, bind(spec, built.model, fields))
    folder = model_folder(spec)
    traces = [trace(training, built, fields, number, folder) for number in (size, usual)]
    try:
        Generaliser(size, usual).merge(*traces)
    except CaptureError as error:
        return at_loss(spec, error)
    return None


def caught_failure(spec: Spec, size: int) -> CaptureError | None:
    """The complaint about a forward that needs values, and catches the error that says so."""
    built, fields = build_fake(spec), read_fields(spec)
    training = make_training(spec, built.model, bind(spec, built.model, fields))
    inputs = make_inputs(training, built, fields, size)
    with built.mode, Failing() as seen, suppress(Exception):  # type: ignore[no-untyped-call]
        training.run(*inputs)
    return needs_values(seen.where, ()) if seen.name else None


class Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Notes what is computed, by who asks for it."""

    def __init__(self, asking: Callable[[], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.asking, self.found = asking, Made()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [t.detach().clone() for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.found.setdefault(self.asking(), []).extend(made)
        return result


def differing_line(
    graph: Graph, training: Training, state: Mapping[str, Tensor], inputs: Sequence[Tensor],
    what: str, folder: Path,
) -> Op | Location | None:  # fmt: skip
    """The op, or the user's line, where the graph computes what the model does not, or lacks what
    it does; for a gradient the op that reads the parameter first. None where none is found."""
    if gradient := re.match(r"the gradient of (\S+) ", what):
        return next((op for op in graph.ops if State(gradient[1]) in op.operands), None)
    with suppress(Exception):  # a fault is being told: no other may hide it
        ours, users = run_both(graph, training, state, inputs)
        for op in graph.ops:
            line = location(op.where, folder)
            if line and any(is_new(made, users.get(line, ())) for made in ours.get(op.name, ())):
                return op
        known = {location(op.where, folder) for op in graph.ops}
        return next((line for line in users if line and line not in known), None)
    return None


def run_both(
    graph: Graph, training: Training, state: Mapping[str, Tensor], inputs: Sequence[Tensor]
) -> tuple[Made, Made]:  # fmt: skip
    """What the graph makes, by op, and what the model does, by line."""
    given = {i.name: t.clone() for i, t in zip(graph.inputs, inputs, strict=True)}
    own = copy_state(state)
    running = [""]

    def before(name: str) -> None:
        running[0] = name

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with Noting(lambda: running[0]) as ours:
            run_ops(graph.ops, graph.canonical, own, given, len(inputs[0]), before)
        torch.manual_seed(0)
        with Noting(forward_site) as users:
            training.run(*inputs)
    return ours.found, users.found


def forward_site() -> Location | None:
    """The line of the user's forward that is running, or of the loss: where ops have theirs."""
    lines = running_lines()
    inner = (found for found in lines if found[0].co_name == "forward")
    code, line = next(inner, lines[0] if lines else (None, 0))
    return place(code.co_filename, line) if code else None


def is_new(made: Tensor, known: Sequence[Tensor]) -> bool:
    """Whether a tensor is none of those that are known, but for rounding."""
    alike = (t for t in known if t.shape == made.shape and t.dtype == made.dtype)
    return not any(torch.allclose(made, t, equal_nan=True) for t in alike)
