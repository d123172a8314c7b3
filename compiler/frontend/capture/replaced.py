"""Public functions of torch's that others stand in for while a user's code runs."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from .patched import patched
from .user import is_users


def fakes_convert() -> AbstractContextManager[None]:
    """Let model.to(...) convert tensors without values: their data is set, as torch swaps none."""
    return patched(torch.utils, swap_tensors=lambda old, new: setattr(old, "data", new))


def libraries_export() -> AbstractContextManager[None]:
    """Let libraries compute as they do during export, where transformers makes masks that it leaves
    to the attention else. A user's own line is told the truth: it is to do the same either way."""

    def exporting() -> bool:
        frame = inspect.currentframe()
        caller = frame and frame.f_back
        return bool(caller and "site-packages" in caller.f_code.co_filename)

    return patched(torch.compiler, is_compiling=exporting, is_exporting=exporting)


def on_tensor_hook(refuse: Callable[[], object]) -> AbstractContextManager[None]:
    """Call `refuse` where a user's line puts a hook on a tensor's gradient; torch does so, too."""
    original = torch.Tensor.register_hook

    def register_hook(tensor: torch.Tensor, hook: Callable[..., object]) -> object:
        frame = inspect.currentframe()
        if frame and frame.f_back and is_users(frame.f_back.f_code.co_filename):
            refuse()
        return original(tensor, hook)  # type: ignore[no-untyped-call]

    return patched(torch.Tensor, register_hook=register_hook)
