"""Public functions of torch's that others stand in for while a user's code runs."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import torch

from .patched import patched
from .user import is_users


def fakes_convert() -> AbstractContextManager[None]:
    """Let model.to(...) convert tensors without values: their data is set, as torch swaps none."""
    return patched(torch.utils, swap_tensors=lambda old, new: setattr(old, "data", new))


def libraries_export() -> AbstractContextManager[None]:
    """Let libraries compute as they do during export, where transformers makes masks that it leaves
    to the attention else. A user's own line is told the truth."""

    def exporting() -> bool:
        frame = inspect.currentframe()
        caller = frame and frame.f_back
        return bool(caller and "site-packages" in caller.f_code.co_filename)

    return patched(torch.compiler, is_compiling=exporting, is_exporting=exporting)


def users_run_plainly() -> AbstractContextManager[None]:
    """Let a user's own line compute during export as it does without: scripts run it plainly."""

    def told(original: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: not is_called_by_user(inspect.currentframe()) and original()

    names = ("is_compiling", "is_exporting")
    return patched(torch.compiler, **{name: told(getattr(torch.compiler, name)) for name in names})


@contextmanager
def on_gradient_hook(refuse: Callable[[], object]) -> Iterator[None]:
    """Call `refuse` where a user's line puts a hook on gradients, or on what is kept for them;
    torch does so, too."""

    def refusing(original: Callable[..., object]) -> Callable[..., object]:
        def register(*args: object, **kwargs: object) -> object:
            if is_called_by_user(inspect.currentframe()):
                refuse()
            return original(*args, **kwargs)

        return register

    with ExitStack() as stack:
        for owner, names in gradient_hooks.items():
            patches = {name: refusing(getattr(owner, name)) for name in names}
            stack.enter_context(patched(owner, **patches))
        yield


gradient_hooks: Mapping[Any, tuple[str, ...]] = MappingProxyType(
    {
        torch.Tensor: ("register_hook", "register_post_accumulate_grad_hook"),
        torch.nn.Module: (
            "register_full_backward_hook",
            "register_full_backward_pre_hook",
            "register_backward_hook",
        ),
        torch.autograd.graph: ("register_multi_grad_hook",),
        torch.autograd.graph.saved_tensors_hooks: ("__init__",),
    }
)
"""What registers them."""


def is_called_by_user(frame: FrameType | None) -> bool:
    """Whether a user's line calls what runs in a frame."""
    caller = frame and frame.f_back
    return caller is not None and is_users(caller.f_code.co_filename)


def on_freezing(refuse: Callable[[torch.Tensor], object]) -> AbstractContextManager[None]:
    """Call `refuse` with a tensor whose requires_grad is about to be another."""
    original = torch.Tensor.requires_grad_

    def requires_grad_(tensor: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:  # noqa: FBT001, FBT002  # torch's
        if tensor.requires_grad != requires_grad:
            refuse(tensor)
        return original(tensor, requires_grad)

    return patched(torch.Tensor, requires_grad_=requires_grad_)


@contextmanager
def inference_noted() -> Iterator[None]:
    """Let a user's torch.inference_mode be a torch.no_grad, which a trace notes: they compute the
    same, and a tensor that is then kept for a backward is found where the model really runs."""
    own: Any = torch.inference_mode
    enter, leave = own.__enter__, own.__exit__
    entered: list[Any] = []

    def begin(mode: Any) -> None:
        if is_users_region(inspect.currentframe()):
            entered.append(torch.no_grad() if mode.mode else torch.enable_grad())
            entered[-1].__enter__()
        else:
            entered.append(None)
            enter(mode)

    def end(mode: Any, *error: object) -> None:
        region = entered.pop()
        leave(mode, *error) if region is None else region.__exit__(*error)

    with patched(own, __enter__=begin, __exit__=end):
        yield


def is_users_region(frame: FrameType | None) -> bool:
    """Whether a user's line enters a context in a frame, by `with` or by a decorator."""
    frame = frame and frame.f_back
    while frame and Path(frame.f_code.co_filename).stem in ("_contextlib", "contextlib"):
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code.co_filename)
