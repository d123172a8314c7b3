"""What a computation gives: the loss, every gradient, every buffer; and how two of them differ."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..frontend.capture.canonical import storages
from ..frontend.capture.replay import run_op
from ..ir.graph import Graph, Op, Ref, State, TensorMeta

COARSE = ("float32", "bfloat16", "float16")
max_elements, max_flops = 20_000_000, 50e9
"""Up to this size models are compared by numbers, above it, and under autocast, by their lists of
operations."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one microbatch."""

    results: tuple[Tensor, ...]
    """The loss, then the metrics."""
    gradients: Mapping[str, Tensor]
    kept: Mapping[str, Tensor]
    """Buffers, and parameters that forward writes, as it leaves them."""


def is_comparable(graph: Graph, batch: int) -> bool:
    """Whether numbers can be compared in moments, and tell something: in bfloat16 a gradient hangs
    on the order in which its parts are added up, by 1e-3 and more, and some kernels of the CPU
    (those of 3-d convolutions) do not even agree with themselves."""
    return is_small(graph, batch) and not any(op.autocast for op in graph.ops)


def is_small(graph: Graph, batch: int) -> bool:
    """Whether a microbatch takes moments."""
    elements = sum(p.meta.bytes.at(1) for p in graph.parameters.values()) // 4
    return elements <= max_elements and sum(op.flops.at(batch) for op in graph.ops) <= max_flops


def copy_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leaves to compute with."""
    return {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in state.items()}


def kept(graph: Graph) -> set[str]:
    """What a microbatch may leave changed: buffers, and parameters that forward writes, be it by
    what shows them."""
    memory = storages(graph.ops)
    written = {base for op in graph.ops for name in op.mutates for base in memory.get(name, {name})}
    return {
        fqn
        for fqn, p in graph.parameters.items()
        if p.buffer or not written.isdisjoint((fqn, *p.aliases))
    }


def run_graph(
    graph: Graph,
    state: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    before: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Run a graph's ops one by one; `before` is told the name of each op that is about to run."""
    own = copy_state(state)
    given = {i.name: tensor for i, tensor in zip(graph.inputs, inputs, strict=True)}
    values = run_ops(graph.ops, graph.canonical, own, given, len(inputs[0]), before)
    loss, *metrics = (values[value] for _, value in graph.outputs)
    return finish(loss, metrics, own, kept(graph))  # type: ignore[arg-type]


def run_ops(
    ops: Iterable[Op],
    canonical: Mapping[str, str],
    state: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    batch: int,
    before: Callable[[str], None] = lambda _: None,
) -> dict[str, object]:
    """Run ops on what they are given and on a state, which they may write: every value."""
    values: dict[str, object] = dict(given)

    def lookup(ref: Ref | State) -> object:
        return values[ref.name] if isinstance(ref, Ref) else state[canonical[ref.fqn]]

    for op in ops:
        before(op.name)
        with torch.set_grad_enabled(op.grad):
            result = run_op(op, lookup, batch)
        outputs = result if isinstance(result, list | tuple) else (result,)
        values.update(zip(op.outputs, outputs, strict=False))
    return values


def sizes_of(meta: TensorMeta, batch: int) -> list[int]:
    """A value's shape in a microbatch of `batch` samples."""
    return [size if isinstance(size, int) else size.coefficient * batch for size in meta.shape]


def make(meta: TensorMeta, batch: int) -> Tensor:
    """A tensor of a value's shape."""
    dtype = getattr(torch, meta.dtype)
    return torch.zeros(sizes_of(meta, batch), dtype=dtype, requires_grad=meta.requires_grad)


def finish(
    loss: Tensor, metrics: Sequence[Tensor], state: Mapping[str, Tensor], names: set[str]
) -> Outcome:
    """Go back from the loss. `names`: what may have changed."""
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    leaves = {name: t for name, t in state.items() if t.is_leaf}
    gradients = {name: t.grad for name, t in leaves.items() if t.grad is not None}
    results = tuple(result.detach() for result in (loss, *metrics))
    return Outcome(results, gradients, {name: state[name].detach() for name in names})


def differences(found: Outcome, expected: Outcome, tolerance: float) -> Iterator[str]:
    """What differs by more than the tolerance, max|a-b| / max(1, max|b|)."""
    results = zip(found.results, expected.results, strict=True)
    for number, (one, other) in enumerate(results):
        yield from compare(f"metric {number}" if number else "the loss", one, other, tolerance)
    yield from unpaired("gradient", found.gradients, expected.gradients)
    literals = found.kept.keys() - expected.kept.keys()
    kept = {name: tensor for name, tensor in found.kept.items() if name not in literals}
    yield from unpaired("value", kept, expected.kept)
    for kind, a, b in (
        ("gradient", found.gradients, expected.gradients),
        ("value", kept, expected.kept),
    ):
        for name in sorted(a.keys() & b.keys()):
            yield from compare(f"the {kind} of {name}", a[name], b[name], tolerance)


def unpaired(kind: str, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Iterator[str]:
    """What one has and the other has not."""
    for name in sorted(a.keys() ^ b.keys()):
        yield f"the {kind} of {name} is {'missing' if name in b else 'there, and should not be'}"


def compare(what: str, a: Tensor, b: Tensor, tolerance: float) -> Iterator[str]:
    """One tensor."""
    if a.shape != b.shape or a.dtype != b.dtype:
        yield f"{what} is {a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"
        return
    a, b = (tensor.to_dense() if tensor.is_sparse else tensor for tensor in (a, b))
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not torch.equal(a.isnan(), b.isnan()):
        yield f"{what} is NaN in other places"
    elif a.numel():
        a, b = a.double().nan_to_num(), b.double().nan_to_num()
        error = float((a - b).abs().max() / b.abs().max().clamp(min=1))
        if error > tolerance:
            yield f"{what} differs by {error:.1e}"


def tolerance_of(precision: str, graph: Graph) -> float:
    """Equal operations in equal order give equal bits, but for the sums of the gradients of what is
    used several times, which may be taken in another order."""
    if precision != "fp64":
        return 1e-5
    return 1e-7 if rounds(graph) else 1e-12


def rounds(graph: Graph) -> bool:
    """Whether the model itself takes something on the loss's way to less than float64."""
    return any(m.requires_grad and m.dtype in COARSE for m in graph.values.values())
