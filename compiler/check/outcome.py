"""What a computation gives: the loss, every gradient, every buffer; and how two of them differ."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..frontend.capture.replay import run_op
from ..ir.graph import Graph, Ref, State

max_elements, max_flops = 20_000_000, 50e9
"""Up to this size models are compared by numbers, above it by their lists of operations."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one microbatch."""

    loss: Tensor
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


def is_small(graph: Graph, batch: int) -> bool:
    """Whether numbers can be compared in moments."""
    elements = sum(p.meta.bytes.at(1) for p in graph.parameters.values()) // 4
    return elements <= max_elements and sum(op.flops.at(batch) for op in graph.ops) <= max_flops


def copy_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leaves to compute with."""
    return {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in state.items()}


def run_graph(
    graph: Graph,
    state: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    before: Callable[[str], None] = lambda name: None,
) -> Outcome:
    """Run a graph's ops one by one; `before` is told the name of each op that is about to run."""
    own = copy_state(state)
    values: dict[str, object] = {
        i.name: tensor for i, tensor in zip(graph.inputs, inputs, strict=True)
    }

    def lookup(ref: Ref | State) -> object:
        return values[ref.name] if isinstance(ref, Ref) else own[graph.canonical[ref.fqn]]

    for op in graph.ops:
        before(op.name)
        with torch.set_grad_enabled(op.grad):
            result = run_op(op, lookup, len(inputs[0]))
        outputs = result if isinstance(result, list | tuple) else (result,)
        values.update(zip(op.outputs, outputs, strict=False))
    loss = values[graph.outputs[0][1]]
    return finish(loss, own, {fqn for fqn, p in graph.parameters.items() if p.buffer})  # type: ignore[arg-type]


def finish(loss: Tensor, state: Mapping[str, Tensor], buffers: set[str]) -> Outcome:
    """Go back from the loss."""
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: t.grad for name, t in state.items() if t.grad is not None}
    return Outcome(loss.detach(), gradients, {name: state[name].detach() for name in buffers})


def differences(found: Outcome, expected: Outcome, tolerance: float) -> Iterator[str]:
    """What differs by more than the tolerance, max|a-b| / max(1, max|b|)."""
    yield from compare("the loss", found.loss, expected.loss, tolerance)
    for kind, a, b in (
        ("the gradient of", found.gradients, expected.gradients),
        ("the buffer", found.buffers, expected.buffers),
    ):
        for name in sorted(a.keys() | b.keys()):
            if name in a and name in b:
                yield from compare(f"{kind} {name}", a[name], b[name], tolerance)
            else:
                yield f"{kind} {name} is {'missing' if name in b else 'there, and should not be'}"


def compare(what: str, a: Tensor, b: Tensor, tolerance: float) -> Iterator[str]:
    """One tensor."""
    if a.shape != b.shape or a.dtype != b.dtype:
        yield f"{what} is {a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"
    elif not torch.equal(a.isnan(), b.isnan()):
        yield f"{what} is NaN in other places"
    elif a.numel():
        a, b = a.double().nan_to_num(), b.double().nan_to_num()
        error = float((a - b).abs().max() / b.abs().max().clamp(min=1))
        if error > tolerance:
            yield f"{what} differs by {error:.1e}"


def tolerance_of(precision: str) -> float:
    """Equal operations in equal order give equal bits, but for the sum over the uses of a tied
    parameter, which may be taken in another order."""
    return {"fp32": 1e-5, "fp64": 1e-12}[precision]
