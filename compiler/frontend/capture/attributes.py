"""What forward does to tensors that are attributes of modules: it may assign to buffers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import nn

from ...errors import CaptureError
from .build import plain_tensors
from .private import node_name, version_of
from .python_state import changing_line, forward_line
from .training import Training


@dataclass
class Assigned:
    """What forward assigns to attributes. Built up while it is traced, then read only."""

    tensors: dict[str, str] = field(default_factory=dict)
    """Plain tensor -> the traced node that it becomes."""
    late: set[str] = field(default_factory=set)
    """The traced nodes that write into buffers at the end what was assigned to them."""


@contextmanager
def note_assignments(model: nn.Module, assigned: Assigned) -> Iterator[None]:
    """Write what forward assigns to a buffer into the buffer, at the end: torch would forget it.
    Note which plain tensors it assigns, and what."""
    held: dict[str, torch.Tensor] = {}

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        return chain(model.named_parameters(), model.named_buffers(), plain_tensors(model))

    def before(*_: object) -> None:
        held.update(tensors())

    def after(*_: object) -> None:
        buffers = dict(model.named_buffers())
        for name, value in tensors():
            if name not in held or value is held[name]:
                continue
            if name in buffers:
                if (value.shape, value.dtype) != (held[name].shape, held[name].dtype):
                    owner = model.get_submodule(name.rpartition(".")[0])
                    raise CaptureError(
                        f"forward gives the buffer {name} another shape or dtype, "
                        f"{show(value)} instead of {show(held[name])}",
                        forward_line(owner),
                        f"self.{name.rpartition('.')[2]}.copy_(...) keeps both; "
                        "a value of this call alone needs no buffer",
                    )
                with torch.no_grad() if value.requires_grad else nullcontext():
                    written = held[name].copy_(value)
                assigned.late.add(node_name(written) or "")
            elif node := node_name(value):
                assigned.tensors[name] = node

    with around_forward(model, before, after):
        yield


@contextmanager
def around_forward(
    model: nn.Module, before: Callable[..., None], after: Callable[..., None]
) -> Iterator[None]:
    """Call these whenever the model's forward begins and ends."""
    handles = (model.register_forward_pre_hook(before), model.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def show(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{[*tensor.shape]}"


@contextmanager
def refuse_written_attributes(training: Training, again: Callable[[], object]) -> Iterator[None]:
    """Around a trace. Raises CaptureError at the line of forward that writes in place to a tensor
    that is an attribute of a module, and neither a parameter nor a buffer. `again` runs forward
    once more."""
    model = training.model
    held: dict[str, tuple[torch.Tensor, int]] = {}
    written: list[str] = []

    def before(*_: object) -> None:
        held.update({name: (tensor, version_of(tensor)) for name, tensor in plain_tensors(model)})

    def after(*_: object) -> None:
        now = dict(plain_tensors(model))
        for name, (tensor, version) in held.items():
            if now.get(name) is tensor and version_of(tensor) != version:
                written.append(name)

    try:
        with around_forward(model, before, after):
            yield
    finally:
        if written:  # torch's own error, where there is one, does not say so
            refuse_written(model, written[0], again)


def refuse_written(model: nn.Module, fqn: str, again: Callable[[], object]) -> None:
    """Raises CaptureError at the line that writes to an attribute."""
    tensor = dict(plain_tensors(model))[fqn]
    owner, _, name = fqn.rpartition(".")
    raise CaptureError(
        f"forward writes to {fqn}, which is no buffer",
        changing_line(again, lambda: version_of(tensor))
        or forward_line(model.get_submodule(owner)),
        f'self.register_buffer("{name}", ...) in __init__',
    )
