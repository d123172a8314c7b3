"""What each op costs: FLOPs, what autograd keeps, and whether gradients flow through its values.

The graph runs twice on tensors without values, at two batch sizes; counts are linear in the batch.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType
from typing import Any

import torch

from ...ir.graph import Amount, CallId, Dim, Graph, Op, Parameter, Ref, State, TensorMeta
from . import whole
from .private import TorchDispatchMode, fake_mode, flop_formula, storage_address
from .replay import run_op, value


@dataclass
class Counts:
    """Per op, in order. Built up, then read only."""

    flops: list[int]
    saved: list[int]
    keeps: list[tuple[str, ...]]
    gradients: dict[str, bool]
    own: dict[CallId, int] = field(default_factory=dict)
    """What is kept of a call that runs again, while it does."""


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Adds up the FLOPs of matrix products, convolutions and attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_formula(func)
        if formula is not None:
            self.flops += int(formula(*args, **(kwargs or {}), out_val=result))
        return result


def measure(
    ops: Sequence[Op], values: Mapping[str, TensorMeta], inputs: Sequence[str],
    parameters: Mapping[str, Parameter], canonical: Mapping[str, str], sizes: tuple[int, int],
) -> tuple[tuple[Op, ...], dict[str, TensorMeta]]:  # fmt: skip
    """Fill in flops and saved_bytes of the ops and requires_grad of the values."""
    first, second = (run(ops, values, inputs, parameters, canonical, batch) for batch in sizes)
    metas = {
        name: replace(meta, requires_grad=first.gradients.get(name, False))
        for name, meta in values.items()
    }
    return fill_in(ops, first, second, sizes), metas


def fill_in(
    ops: Sequence[Op], first: Counts, second: Counts, sizes: tuple[int, int]
) -> tuple[Op, ...]:
    """The ops with what was counted."""
    return tuple(
        replace(
            op,
            flops=linear(first.flops[i], second.flops[i], sizes),
            saved_bytes=linear(first.saved[i], second.saved[i], sizes),
            keeps=first.keeps[i],
        )
        for i, op in enumerate(ops)
    )


def measure_again(
    graph: Graph, around: Mapping[str, CallId], given: Mapping[CallId, Sequence[str]],
    sizes: tuple[int, int],
) -> tuple[tuple[Op, ...], dict[CallId, Amount]]:  # fmt: skip
    """The ops with saved_bytes if calls keep only what they are given, and by call what autograd
    keeps when it runs again. `around`: op -> the call."""
    inputs = [i.name for i in graph.inputs]
    metas = dict(graph.values) | {i.name: i.meta for i in graph.inputs}
    first, second = (
        run(graph.ops, metas, inputs, graph.parameters, graph.canonical, batch, around, given)
        for batch in sizes
    )
    own = {call: linear(first.own[call], second.own[call], sizes) for call in first.own}
    return fill_in(graph.ops, first, second, sizes), own


def linear(at_first: int, at_second: int, sizes: tuple[int, int]) -> Amount:
    """The line through two points; what is not linear is rounded up at the larger size."""
    if sizes[0] == sizes[1]:
        return Amount(at_first, 0)
    per_sample = max(0, -(-(at_second - at_first) // (sizes[1] - sizes[0])))
    return Amount(max(0, at_first - per_sample * sizes[0]), per_sample)


def run(
    ops: Sequence[Op], values: Mapping[str, TensorMeta], inputs: Sequence[str],
    parameters: Mapping[str, Parameter], canonical: Mapping[str, str], batch: int,
    around: Mapping[str, CallId] = MappingProxyType({}),
    given: Mapping[CallId, Sequence[str]] = MappingProxyType({}),
) -> Counts:  # fmt: skip
    """Run the ops once without values."""
    counts, counter = Counts([], [], [], {}), FlopCounter()
    with fake_mode(), counter:
        state = {
            fqn: make(p.meta, batch, grad=p.meta.requires_grad) for fqn, p in parameters.items()
        }
        found: dict[str, Any] = {name: make(values[name], batch, grad=False) for name in inputs}
        keeper = Keeper(counts, {storage_address(tensor) for tensor in state.values()})
        keeper.name(found)

        def lookup(ref: Ref | State) -> object:
            return found[ref.name] if isinstance(ref, Ref) else state[canonical[ref.fqn]]

        with torch.autograd.graph.saved_tensors_hooks(keeper.keep, lambda tensor: tensor):
            for op in ops:
                counter.flops = 0
                counts.saved.append(0)
                call = around.get(op.name)
                keeper.enter(call, [found[name] for name in given[call]] if call else ())
                with nullcontext() if op.grad else torch.no_grad():
                    result = run_op(op, lookup, batch)
                seen = see(op, keeper, lookup, batch)
                outputs = result if isinstance(result, list | tuple) else (result,)
                made = dict(zip(op.outputs, outputs, strict=False))
                found.update(made)
                keeper.name(made)
                counts.keeps.append(keeper.leave())
                by_hand = flops_by_hand(op, values, parameters, canonical, batch)
                counts.flops.append(seen or counter.flops or by_hand)
        counts.gradients = {  # a view made under no_grad claims a gradient, and leads nowhere
            name: getattr(value, "grad_fn", None) is not None for name, value in found.items()
        }
    return counts


def see(op: Op, keeper: "Keeper", lookup: Callable[[Ref | State], object], batch: int) -> int:
    """Count what a leaf was seen to keep, and what it is given; its FLOPs, or, where torch counts
    none, two for each parameter and sample. 0 for other operations, which are counted as they run.
    """
    if op.target != whole.target:
        return 0
    state = [value(argument, lookup, batch) for argument in op.args[2]]  # type: ignore[union-attr]
    seen = whole.seen_of(op, lambda argument: value(argument, lookup, batch))
    for ref in op.operands:
        keeper.keep(lookup(ref))  # type: ignore[arg-type]
    keeper.add(seen.saved)
    return seen.flops or 2 * batch * sum(tensor.numel() for tensor in state)  # type: ignore[attr-defined]


@dataclass
class Keeper:
    """Counts what autograd keeps, each storage once: with an op, or with a call that runs again."""

    counts: Counts
    held: set[int]
    """Storages that are kept already, or parameters."""
    call: CallId | None = None
    again: set[int] = field(default_factory=set)
    """What the call has when it runs again."""
    here: dict[int, None] = field(default_factory=dict)
    """Storages that are kept for the op at hand."""
    names: dict[int, str] = field(default_factory=dict)
    """Storage -> the value that it was made for."""

    def name(self, values: Mapping[str, Any]) -> None:
        for name, tensor in values.items():
            if name and isinstance(tensor, torch.Tensor):
                self.names.setdefault(storage_address(tensor), name)

    def leave(self) -> tuple[str, ...]:
        """After each op: the values that are kept for it."""
        found = tuple(self.names[address] for address in self.here if address in self.names)
        self.here = {}
        return found

    def enter(self, call: CallId | None, given: Sequence[torch.Tensor]) -> None:
        """Before each op; `given`: what its call is given, if that runs again."""
        if call is None or call in self.counts.own:
            self.call = call
            return
        self.call = None
        for tensor in given:
            self.keep(tensor)
        self.call, self.counts.own[call] = call, 0
        self.again = set(self.held)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        held = self.held if self.call is None else self.again
        address, size = storage_address(tensor), tensor.untyped_storage().nbytes()
        if self.call is None:
            self.here[address] = None
        if address not in held:
            held.add(address)
            self.add(size)
        return tensor

    def add(self, size: int) -> None:
        if self.call is None:
            self.counts.saved[-1] += size
        else:
            self.counts.own[self.call] += size


def make(meta: TensorMeta, batch: int, *, grad: bool) -> torch.Tensor:
    shape = [size if isinstance(size, int) else size.coefficient * batch for size in meta.shape]
    return torch.zeros(shape, dtype=getattr(torch, meta.dtype), requires_grad=grad)


def flops_by_hand(
    op: Op, values: Mapping[str, TensorMeta], parameters: Mapping[str, Parameter],
    canonical: Mapping[str, str], batch: int,
) -> int:  # fmt: skip
    """What torch has no formula for: fused attention multiplies queries with keys, and their
    products with values; a recurrent layer multiplies each of its weights once for each element of
    its sequences."""

    def size(shape: tuple[int | Dim, ...]) -> int:
        return prod(s if isinstance(s, int) else s.coefficient * batch for s in shape)

    namespace, name, _ = op.target.split(".")
    if namespace != "aten":
        return 0
    if name == "scaled_dot_product_attention":
        query, key, value = (values[str(ref)].shape for ref in op.operands[:3])
        return 2 * size(query) * size(key[-2:-1]) + 2 * size(query[:-1]) * size(value[-2:])
    if name not in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return 0
    shapes = [parameters[canonical[r.fqn]].meta.shape for r in op.operands if isinstance(r, State)]
    steps = size(values[str(op.operands[0])].shape[:-1])
    return 2 * steps * sum(size(shape) for shape in shapes if len(shape) == 2)
