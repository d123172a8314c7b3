"""Refuses a backward inside forward (forces, penalties on gradients), which no trace follows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch

from ...errors import CaptureError
from .user import call_site


@contextmanager
def refuse_inner_backward(remedy: Callable[[], str]) -> Iterator[None]:
    """Raises CaptureError at the user's line. `remedy`: how to keep whole what runs there."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise CaptureError(
            "forward goes back by torch.autograd, which no trace follows",
            call_site(),
            remedy() or "a module of its own for it, and model: {leaf: [its path]}",
        )

    originals = torch.autograd.grad, torch.autograd.backward
    torch.autograd.grad = torch.autograd.backward = refuse
    try:
        yield
    finally:
        torch.autograd.grad, torch.autograd.backward = originals
