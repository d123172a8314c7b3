"""What a loss holds beside the model: fixed tensors, under names of their own in the graph."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count

import torch
from torch import nn

from ...errors import CaptureError, Location
from .build import named_tensors
from .private import is_fake
from .python_state import code_line
from .training import Training

Held = Mapping[str, torch.Tensor]


def held_by_loss(training: Training) -> Held:
    """Tensors by the name that a stage gives them: `loss_weight` of a module, a function's globals
    by their own."""
    loss, model = training.loss, training.model
    taken = {n.partition(".")[0] for n, _ in (*named_tensors(model), *model.named_children())}
    taken |= {*training.binding.fields}
    if isinstance(loss, nn.Module):
        held: dict[str, object] = {
            f"loss_{name.replace('.', '_')}": t for name, t in named_tensors(loss)
        }
    else:
        names = loss.__code__.co_names if hasattr(loss, "__code__") else ()
        held = {name: getattr(loss, "__globals__", {}).get(name) for name in names}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in held.items():
        if isinstance(tensor, torch.Tensor):
            free = (name + "_" * n for n in count())
            found[next(n for n in free if n not in taken and n not in found)] = tensor
    return found


def find_held(
    held: Held, program: torch.export.ExportedProgram, target: str
) -> tuple[str | None, torch.Tensor | None]:
    """What a tensor that a trace found is called, if the loss holds it; and its value."""
    value = (program.state_dict | program.constants).get(target)
    if value is None or is_fake(value):
        return None, value
    return next((n for n, tensor in held.items() if spot(tensor) == spot(value)), None), value


def spot(tensor: torch.Tensor) -> tuple[object, ...]:
    """What two names of one tensor agree in."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


@contextmanager
def refuse_assigned(loss: object) -> Iterator[None]:
    """Refuse what a trace would lose: a loss that has other tensors after a call."""
    held: dict[str, torch.Tensor] = {}

    def after(module: nn.Module, *_: object) -> None:
        for name, tensor in named_tensors(module):
            if tensor is not held.get(name):
                raise keeps_state(name, code_line(type(module).forward))

    if not isinstance(loss, nn.Module):
        yield
        return
    before = loss.register_forward_pre_hook(lambda module, _: held.update(named_tensors(module)))
    handles = before, loss.register_forward_hook(after)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def keeps_state(name: str, where: Location | None) -> CaptureError:
    return CaptureError(
        f"the loss changes its {name} from call to call, and scripts keep what belongs to the "
        "model alone",
        where,
        "a model that holds the loss, and returns what it gives: model: {loss: output}",
    )
