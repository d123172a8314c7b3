"""Runs the stages of emitted scripts in one process, cut as in the scripts: what goes to another
stage is detached, and the gradients come back by the transfers alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import InternalError
from ..frontend.capture.private import stores
from ..ir.graph import Graph
from ..ir.unit import Transfer, Unit
from .outcome import Outcome, copy_state, kept

key = "0 0 0"
"""What seeds dropout: seed, step and microbatch."""


@dataclass(frozen=True, slots=True)
class Forward:
    """What a stage's forward leaves for its backward."""

    unit: Unit
    stage: nn.Module
    received: Mapping[str, Tensor]
    given: Mapping[str, Tensor]
    """Value -> the stage's result."""


def run_stages(
    graph: Graph,
    units: Sequence[Unit],
    stages: Sequence[nn.Module],
    state: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
) -> Outcome:
    """The stages one after the other, each with copies of what it holds; their gradients add up.

    Raises InternalError where a transfer should bring a gradient back and none is there.
    """
    fields = {i.name: tensor for i, tensor in zip(graph.inputs, inputs, strict=True)}
    values: dict[str, Tensor] = {}
    forwards = []
    for unit, stage in zip(units, stages, strict=True):
        load(stage, unit, state)
        received = {t.value: receive(values[t.value], t) for t in unit.receives}
        outputs = stage(*arguments(unit, received | fields))
        given = name_results(unit, outputs)
        forwards.append(Forward(unit, stage, received, given))
        values |= given
    for forward in reversed(forwards):
        if forward.unit.has_backward:
            go_back(forward, forwards)
    results = tuple(values[value].detach() for _, value in graph.outputs)
    return gather(graph, forwards, results)


def receive(value: Tensor, transfer: Transfer) -> Tensor:
    """What arrives: dense, in the order of memory that the transfer states."""
    order = transfer.meta.order or tuple(range(value.dim()))
    inverse = [order.index(dim) for dim in range(len(order))]
    sent = value.detach().permute(order).clone(memory_format=torch.contiguous_format)
    return sent.permute(inverse).requires_grad_(transfer.gradient)


def go_back(forward: Forward, forwards: Sequence[Forward]) -> None:
    """A stage's backward: from the loss, or from the gradients that the transfers bring."""
    roots = [forward.given[value] for name, value in forward.unit.outputs if name == "loss"]
    gradients: list[Tensor | None] = [None for _ in roots]
    at = {later.unit.stage: later for later in forwards}
    for transfer in forward.unit.sends:
        if transfer.gradient:
            root = forward.given[transfer.value]
            gradient = at[transfer.target].received[transfer.value].grad
            if gradient is None or not root.requires_grad:
                raise InternalError(f"there is no gradient to send back: {transfer}", "localize")
            roots.append(root)
            gradients.append(gradient)
    torch.autograd.backward(roots, gradients)


def gather(graph: Graph, forwards: Sequence[Forward], results: tuple[Tensor, ...]) -> Outcome:
    """What all stages together computed."""
    gradients: dict[str, Tensor] = {}
    after: dict[str, Tensor] = {}
    names = kept(graph)
    for forward in forwards:
        for held in forward.unit.state:
            tensor = find(forward.stage, held.fqn)
            if held.canonical in names:
                after[held.canonical] = tensor.detach()
            if tensor.is_leaf and tensor.grad is not None:
                total = gradients.get(held.canonical)
                gradients[held.canonical] = tensor.grad if total is None else total + tensor.grad
    return Outcome(results, gradients, after)


def arguments(unit: Unit, values: Mapping[str, Tensor]) -> list[object]:
    """What Stage.forward takes, in order."""
    given: list[object] = [values[t.value] for t in unit.receives]
    return given + [values[i.name] for i in unit.inputs] + ([key] if unit.seeds else [])


def name_results(unit: Unit, outputs: Tensor | tuple[Tensor, ...]) -> dict[str, Tensor]:
    """What Stage.forward returns, in order, by the values' names."""
    names = [value for _, value in unit.outputs] + list(dict.fromkeys(t.value for t in unit.sends))
    return dict(zip(names, outputs if isinstance(outputs, tuple) else (outputs,), strict=True))


def load(stage: nn.Module, unit: Unit, state: Mapping[str, Tensor]) -> None:
    """Give a stage the model's weights; names of one tensor share it.

    Raises InternalError where the stage has others.
    """
    own = copy_state(
        {held.canonical: state[held.canonical] for held in unit.state if held.canonical in state}
    )
    names = {name: held.canonical for held in unit.state for name in (held.fqn, *held.aliases)}
    for name, canonical in names.items():
        if canonical in own:
            put(stage, name, own[canonical])
    extra = {n for n, _ in (*stage.named_parameters(), *stage.named_buffers())} - names.keys()
    if extra:
        raise InternalError(
            f"stage {unit.stage} has {', '.join(sorted(extra))}, which it should not", "lift"
        )


def put(stage: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of one that the stage made, which is of equal shape and dtype."""
    owner, _, last = name.rpartition(".")
    module = stage.get_submodule(owner)
    # setattr would take no plain tensor for a parameter
    store = next((store for store in stores(module) if last in store), None)
    if store is None:
        raise InternalError(f"the stage has no {name}", "lift")
    made = store[last]
    if (made.shape, made.dtype) != (tensor.shape, tensor.dtype):
        found, expected = (f"{t.dtype}{list(t.shape)}" for t in (made, tensor))
        raise InternalError(f"the stage makes {name} {found}, not {expected}", "lift")
    store[last] = tensor


def find(stage: nn.Module, name: str) -> Tensor:
    owner, _, last = name.rpartition(".")
    return getattr(stage.get_submodule(owner), last)  # type: ignore[no-any-return]
