"""What each op costs: FLOPs, what autograd keeps, and whether gradients flow through its values.

The graph runs twice on tensors without values, at two batch sizes; counts are linear in the batch.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...ir.graph import Amount, Dim, Op, Parameter, Ref, State, TensorMeta
from .private import fake_mode, flop_formula, storage_address
from .replay import run_op


@dataclass
class Counts:
    """Per op, in order. Built up, then read only."""

    flops: list[int]
    saved: list[int]
    gradients: dict[str, bool]


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
    measured = tuple(
        replace(
            op,
            flops=linear(first.flops[i], second.flops[i], sizes),
            saved_bytes=linear(first.saved[i], second.saved[i], sizes),
        )
        for i, op in enumerate(ops)
    )
    metas = {
        name: replace(meta, requires_grad=first.gradients.get(name, False))
        for name, meta in values.items()
    }
    return measured, metas


def linear(at_first: int, at_second: int, sizes: tuple[int, int]) -> Amount:
    """The line through two points; what is not linear is rounded up at the larger size."""
    if sizes[0] == sizes[1]:
        return Amount(at_first, 0)
    per_sample = max(0, -(-(at_second - at_first) // (sizes[1] - sizes[0])))
    return Amount(max(0, at_first - per_sample * sizes[0]), per_sample)


def run(
    ops: Sequence[Op], values: Mapping[str, TensorMeta], inputs: Sequence[str],
    parameters: Mapping[str, Parameter], canonical: Mapping[str, str], batch: int,
) -> Counts:  # fmt: skip
    """Run the ops once without values."""
    counts, counter = Counts([], [], {}), FlopCounter()
    with fake_mode(), counter:
        state = {
            fqn: make(p.meta, batch, grad=p.meta.requires_grad) for fqn, p in parameters.items()
        }
        found: dict[str, object] = {name: make(values[name], batch, grad=False) for name in inputs}
        held = {storage_address(tensor) for tensor in state.values()}

        def lookup(ref: Ref | State) -> object:
            return found[ref.name] if isinstance(ref, Ref) else state[canonical[ref.fqn]]

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            address = storage_address(tensor)
            if address not in held:
                held.add(address)
                counts.saved[-1] += tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            for op in ops:
                counter.flops = 0
                counts.saved.append(0)
                with nullcontext() if op.grad else torch.no_grad():
                    result = run_op(op, lookup, batch)
                outputs = result if isinstance(result, list | tuple) else (result,)
                found.update(zip(op.outputs, outputs, strict=False))
                counts.flops.append(
                    counter.flops or flops_by_hand(op, values, parameters, canonical, batch)
                )
        counts.gradients = {  # a view made under no_grad claims a gradient, and leads nowhere
            name: getattr(value, "grad_fn", None) is not None for name, value in found.items()
        }
    return counts


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
