"""What a model keeps in Python from call to call, found by running it really: refuse_keeping is of
what stays whole in the graph, kept_once of what forward keeps from its first call on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import CaptureError
from ..frontend.capture.held import read, reader
from ..frontend.capture.python_state import (
    changed_again,
    changing_line,
    counted,
    forward_line,
    roots_of,
)
from ..frontend.capture.registered import find_operation
from ..frontend.capture.replay import classes
from ..frontend.capture.restored import restored
from ..frontend.capture.training import Training
from ..ir.graph import Graph


def refuse_keeping(graph: Graph, training: Training, inputs: Sequence[Tensor]) -> None:
    """Run operations and autograd functions of the user's really, forward and backward: no trace
    runs all of their text. Raises CaptureError at the line that changes a value in every call."""
    made = [find_operation(target) for target in graph.registered]
    roots: list[tuple[object, str]] = [(own.function, own.name) for own in made if own]
    roots += [(classes[target], function.name) for target, function in graph.functions.items()]
    if not roots:
        return

    def run() -> None:
        loss = training.run(*inputs)[0]
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]

    with restored(roots), torch.random.fork_rng(devices=[]):
        before = read(roots)
        run()
        for key in changed_again(roots, run) if read(roots) != before else ():
            who = next(name for root, name in roots if key in read([(root, name)]))
            raise CaptureError(
                f"{who} changes {key[1]} of {key[0]}, a Python value: every rank has its own, and "
                "changes it only in its own microbatches",
                changing_line(run, reader(roots, key)),
                f"an argument of {who}: {counted(key[1])} in a module, handed to it",
            )


def kept_once(training: Training, inputs: Sequence[Tensor], remedy: str) -> CaptureError | None:
    """What the first call puts into an attribute and later ones find there, as a complaint at the
    line that does it; None where none is found."""
    roots = roots_of(training)

    def run() -> None:
        training.run(*inputs)

    with torch.random.fork_rng(devices=[]):
        with restored(roots):
            before = read(roots)
            run()
            after = read(roots)
        changed = [key for key, value in after.items() if before.get(key) != value]
        if not changed:
            return None
        owner, name = changed[0]
        with restored(roots):
            where = changing_line(run, reader(roots, changed[0]))
    modules = {path or type(m).__name__: m for path, m in training.model.named_modules()}
    return CaptureError(
        f"forward keeps {name} of {owner} from its first call on, and computes something else in "
        "later ones: the script would do in every step what the first call does",
        where or forward_line(modules.get(owner, training.model)),
        remedy,
    )
