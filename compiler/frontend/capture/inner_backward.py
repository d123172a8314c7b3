"""A backward inside forward (forces, penalties on gradients) is for leaves: no trace follows it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from ...errors import CaptureError, Location
from .patched import patched
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

    with patched(torch.autograd, grad=refuse, backward=refuse):
        yield


@contextmanager
def backward_noted() -> Iterator[list[Location | None]]:
    """The user's lines that go back."""
    found: list[Location | None] = []

    def noting(own: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: object, **kwargs: object) -> Any:
            found.append(call_site())
            return own(*args, **kwargs)

        return note

    own = {name: noting(getattr(torch.autograd, name)) for name in ("grad", "backward")}
    with patched(torch.autograd, **own):
        yield found
