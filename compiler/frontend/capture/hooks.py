"""Refuses what export drops without a word: hooks on gradients, hooks of all modules at once, and
parameters that forward freezes."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

import torch
from torch import nn

from ...errors import CaptureError, Location
from .build import named_tensors
from .private import global_hooks, gradient_hooks
from .python_state import code_line, forward_line
from .replaced import on_freezing, on_gradient_hook
from .user import call_site

other_way = "a torch.autograd.Function whose backward has its effect"
instead = {
    "forward_pre": "module.register_forward_pre_hook(...) for the modules that it is for",
    "forward": "module.register_forward_hook(...) for the modules that it is for",
    "backward_pre": other_way,
    "backward": other_way,
}
"""Of hooks of all modules at once, by their kind."""


@contextmanager
def refuse_hooks(model: nn.Module) -> Iterator[None]:
    """Raises CaptureError for hooks of the factory, or where forward registers one."""

    def hook() -> NoReturn:
        raise CaptureError("capture would lose this hook on a gradient", call_site(), other_way)

    for kind, remedy in instead.items():
        for made in global_hooks(kind):
            raise CaptureError(
                "capture would lose this hook of every module, which no script has",
                hook_line(made),
                remedy,
            )
    for path, module in model.named_modules():
        for made in gradient_hooks(module):
            raise CaptureError(
                f"capture would lose the hooks on gradients of {path or 'the model'}",
                hook_line(made),
                f"leave it out; in forward {other_way}, or lr and weight_decay by groups of "
                "parameters in the spec",
            )
    with on_gradient_hook(hook):
        yield


def hook_line(hook: object) -> Location | None:
    """Where a hook is defined: a function, a part of one, or an object that is called."""
    while isinstance(hook, partial):
        hook = hook.func
    return code_line(hook) or code_line(vars(type(hook)).get("__call__"))


@contextmanager
def refuse_freezing(model: nn.Module) -> Iterator[None]:
    """Raises CaptureError where forward changes what is trained, or makes a parameter."""
    held: dict[int, tuple[str, torch.Tensor, bool]] = {}
    known: set[str] = set()

    def before(*_: object) -> None:
        held.update((id(t), (name, t, t.requires_grad)) for name, t in named_tensors(model))
        known.update(name for name, _ in named_tensors(model))

    def refuse(tensor: torch.Tensor) -> None:
        if id(tensor) in held:
            raise refusal(held[id(tensor)][0], call_site())

    def after(*_: object) -> None:
        for path in dict(model.named_parameters()):
            if path not in known:
                raise CaptureError(
                    f"forward makes the parameter {path}, which no optimizer knows",
                    forward_line(model),
                    "make it in __init__; lazy modules run once in the factory",
                )
        for name, tensor, trained in held.values():
            if tensor.requires_grad != trained:
                owner = model.get_submodule(name.rpartition(".")[0])
                raise refusal(name, forward_line(owner) or forward_line(model))

    handles = (model.register_forward_pre_hook(before), model.register_forward_hook(after))
    try:
        with on_freezing(refuse):
            yield
    finally:
        for handle in handles:
            handle.remove()


def refusal(name: str, where: Location | None) -> CaptureError:
    return CaptureError(
        f"forward changes requires_grad of {name}: what is trained is settled before the training",
        where,
        f"requires_grad_(False) in the factory; for one use of it {name}.detach()",
    )
