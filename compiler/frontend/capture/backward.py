"""The backward of the user's autograd functions, tried without values: no trace runs it."""

from collections.abc import Iterator
from pathlib import Path

import torch

from ...errors import CaptureError
from ...ir.graph import Graph, Op, Ref, State, TensorMeta
from .functions import Watch
from .measure import make
from .private import fake_mode
from .remedies import is_data_dependent
from .replay import classes, run_op
from .user import location, users_errors


def try_backwards(graph: Graph, batch: int, folder: Path) -> None:
    """Go back through each once, in a microbatch of `batch` samples.

    Raises CaptureError where that fails, or draws random numbers, which nothing seeds.
    """
    tried = set()
    for op in graph.ops:
        metas = tuple(metas_of(graph, op))
        if op.target in classes and op.grad and (op.target, metas) not in tried:
            tried.add((op.target, metas))
            try_backward(graph, op, batch, folder)


def metas_of(graph: Graph, op: Op) -> Iterator[TensorMeta]:
    """Of its operands."""
    yield from (meta_of(graph, ref) for ref in op.operands)


def meta_of(graph: Graph, ref: Ref | State) -> TensorMeta:
    if isinstance(ref, State):
        return graph.parameters[graph.canonical[ref.fqn]].meta
    inputs = {i.name: i.meta for i in graph.inputs}
    return inputs[ref.name] if ref.name in inputs else graph.values[ref.name]


def try_backward(graph: Graph, op: Op, batch: int, folder: Path) -> None:
    name = graph.functions[op.target].name
    try:
        with (
            fake_mode(),
            users_errors(location(op.where, folder), f"the backward of {name} failed"),
        ):
            given = {
                ref: make(meta := meta_of(graph, ref), batch, grad=meta.requires_grad)
                for ref in op.operands
            }
            result = run_op(op, given.__getitem__, batch)
            results = result if isinstance(result, list | tuple) else (result,)
            roots = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
            with Watch([]) as seen:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    except CaptureError as error:
        if isinstance(error.__cause__, Exception) and is_data_dependent(error.__cause__):
            raise CaptureError(
                f"what the backward of {name} computes hangs on values, not just on shapes",
                error.where,
                "torch.where instead of `if`, no .item()",
            ) from error
        raise
    if seen.draws:
        raise CaptureError(
            f"the backward of {name} draws random numbers, which would differ in every layout",
            location(op.where, folder),
            "draw them in forward, where the layer is seeded, and keep them by ctx",
        )
