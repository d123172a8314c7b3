"""What a trace would bake into the script without a word: numbers that forward keeps in Python from
call to call, and draws of generators that no script has."""

import inspect
import random
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...errors import CaptureError, Complaints, Location, PpcError
from .build import seeded
from .held import Key, Roots, read, reader, walk
from .restored import restored
from .training import Training
from .trees import tree_leaves
from .user import is_users, place

trace_seed = 0x9E3779B9
"""Nobody seeds torch with this, so that any seeding in forward shows."""


def numpy_state() -> Hashable:
    """Of numpy's global generator, to compare."""
    state = np.random.get_state(legacy=False)  # noqa: NPY002  # the one that users draw from
    return (bytes(state["state"]["key"]), state["state"]["pos"], state["gauss"])


generators: dict[str, tuple[Callable[[], Hashable], str]] = {
    "draws from Python's random": (random.getstate, "torch.rand(()), and torch.where for an `if`"),
    "draws from numpy.random": (numpy_state, "torch.rand"),
    "seeds torch's generator": (
        torch.default_generator.initial_seed,
        "leave it out: the spec's train: {seed: ...} seeds every layer",
    ),
}
"""What forward must not do -> a state that shows whether it did, and the remedy."""
counting_loss = (
    "a loss has no buffers: count in the model, self.register_buffer(...), whose forward may hand "
    "the count to the loss, or return the loss itself: model: {loss: output}"
)


@contextmanager
def refuse_python_state(training: Training, again: Callable[[], object]) -> Iterator[None]:
    """Around a trace: leaves Python's values and generators as they were. `again` runs forward and
    the loss once more.

    Raises CaptureError at the forward that draws from a foreign generator, and at the line that
    keeps a number, a string or a list of them which is another after each call.
    """
    roots = roots_of(training)
    before, between, after = read(roots), dict[Key, Hashable](), dict[Key, Hashable]()
    tensors = tensors_of(roots)
    with restored(roots), seeded(trace_seed):
        ends = [
            training.model.register_forward_hook(lambda *_: between.update(read(roots))),
            training.register_forward_hook(lambda *_: after.update(read(roots))),
        ]
        try:
            with refuse_draws(training):
                yield
        finally:
            for end in ends:
                end.remove()
        replaced = replaced_in(tensors, roots)
    if after != before or replaced:
        with restored(roots), seeded(trace_seed):
            changed = changed_again(roots, again)
            in_loss = {key for key in changed if between.get(key) == before.get(key)}
            raise_all(refusal(training, k, again, in_loss=k in in_loss) for k in changed)
            if replaced:
                refuse_read(training, again)


def tensors_of(roots: Roots) -> dict[Key, torch.Tensor]:
    """Tensors in objects, files and closures, where no module has them."""
    return walk(roots)[1].tensors


def replaced_in(before: dict[Key, torch.Tensor], roots: Roots) -> list[Key]:
    """Where another tensor is now."""
    now = tensors_of(roots)
    return [key for key, tensor in before.items() if now.get(key, tensor) is not tensor]


class Reads(TorchFunctionMode):
    """Notes what operations are given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, object] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.given |= {id(leaf): leaf for leaf in tree_leaves((args, kwargs or {}))}
        return func(*args, **(kwargs or {}))


def refuse_read(training: Training, again: Callable[[], object]) -> None:
    """Raises CaptureError where a call computes with a tensor that the one before put there."""
    roots = roots_of(training)
    before = tensors_of(roots)
    with Reads() as reads:
        again()
    for owner, name in replaced_in(before, roots):
        if id(before[owner, name]) in reads.given:
            raise CaptureError(
                f"{name} of {owner} is a tensor that each call computes from the last one's, and "
                "no module's: the script would begin with the same one in every step",
                forward_line(training.model) or training.where,
                f"a buffer of a module is kept: {counted(name)}",
            )


def changed_again(roots: Roots, again: Callable[[], object]) -> list[Key]:
    """Which values each of two more calls changes: what is computed once and kept does no harm."""
    again()
    once = read(roots)
    again()
    return [key for key, value in read(roots).items() if value != once.get(key)]


def counted(name: str) -> str:
    """A buffer in the place of a Python value."""
    plain = re.sub(r"\W.*", "", name.rpartition(".")[2])
    return f'self.register_buffer("{plain}", torch.tensor(0))'


def raise_all(errors: Iterable[CaptureError]) -> None:
    """Raises what there is, one complaint for a line."""
    found: dict[Location | None, PpcError] = {}
    for error in errors:
        found.setdefault(error.where, error)
    if len(found) > 1:
        raise Complaints([*found.values()])
    for only in found.values():
        raise only


def roots_of(training: Training) -> Roots:
    """The modules of a model, by path, and its loss."""
    modules = training.model.named_modules()
    return [(m, path or type(m).__name__) for path, m in modules] + [(training.loss, "the loss")]


def refusal(
    training: Training, key: Key, again: Callable[[], object], *, in_loss: bool
) -> CaptureError:
    """Of a value that each call changes once more."""
    owner, name = key
    where = changing_line(again, reader(roots_of(training), key))
    if in_loss:
        who, fallback, hint = "the loss", code_line(training.loss), counting_loss
    else:
        modules = {path or type(m).__name__: m for path, m in training.model.named_modules()}
        who, fallback = "forward", forward_line(modules.get(owner, training.model))
        value = reader(roots_of(training), key)()
        number = isinstance(value, str) and re.fullmatch(r"[-+.\de]+|True|False", value)
        kept = f"a buffer is kept: {counted(name)}, and torch.where for an `if`"
        drawn = "buffers of a module are kept, and what draws belongs to torch: torch.rand(())"
        hint = f"{kept if number else drawn}; leave out what is only logged"
    return CaptureError(
        f"{who} changes {name} of {owner}, a Python value: the script would compute in every "
        "step with the one it has here",
        where or fallback or training.where,
        hint,
    )


def changing_line(again: Callable[[], object], value: Callable[[], Hashable]) -> Location | None:
    """The user's line that changes a value when it runs again."""
    before, found = value(), list[Location]()
    last: tuple[str, int] | None = None

    def watch(frame: FrameType, _: str, __: object) -> Any:
        nonlocal last
        if not is_users(frame.f_code.co_filename):
            return None
        if last and not found and value() != before:
            found.append(place(*last))
        last = frame.f_code.co_filename, frame.f_lineno
        return watch

    tracing = sys.gettrace()
    sys.settrace(watch)
    try:
        again()
    finally:
        sys.settrace(tracing)
    return found[0] if found else None


@contextmanager
def refuse_draws(
    training: Training, harm: str = "the script would do in every step what it does here"
) -> Iterator[None]:
    """Compare the generators whenever a module's call begins or ends: the module that was running
    in between is it. `harm`: what becomes of it."""
    states = {what: state() for what, (state, _) in generators.items()}
    running: list[nn.Module] = []

    def compare() -> None:
        for what, (state, hint) in generators.items():
            if state() != states[what]:
                module = running[-1] if running else training
                who = "the loss" if module is training else f"forward of {type(module).__name__}"
                raise CaptureError(
                    f"{who} {what}: {harm}",
                    training.where if module is training else forward_line(module),
                    hint,
                )

    def before(module: nn.Module, _: object) -> None:
        compare()
        running.append(module)

    def after(*_: object) -> None:
        compare()
        running.pop()

    modules = tuple(training.model.modules())
    handles = [module.register_forward_pre_hook(before) for module in modules]
    handles += [module.register_forward_hook(after) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    compare()


def forward_line(module: nn.Module) -> Location | None:
    """Where the user's forward begins."""
    return code_line(inspect.unwrap(type(module).forward))


def code_line(function: object) -> Location | None:
    """Where a function of the user's begins."""
    code = getattr(function, "__code__", None)
    if code is None or not is_users(code.co_filename):
        return None
    return place(code.co_filename, code.co_firstlineno)
