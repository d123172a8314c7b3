"""refuse_keeping: what stays whole in the graph keeps no count of its calls in Python."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import CaptureError
from ..frontend.capture.held import read, reader
from ..frontend.capture.python_state import changed_again, changing_line, counted
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
