"""What a trace would bake into the script without a word: numbers that forward keeps in Python from
call to call, and draws of generators that no script has."""

import inspect
import random
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import _lru_cache_wrapper
from types import ModuleType

import numpy as np
import torch
from torch import nn

from ...errors import CaptureError, Location
from .build import seeded
from .training import Training
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


@contextmanager
def refuse_python_state(training: Training, again: Callable[[], object]) -> Iterator[None]:
    """Around a trace: leaves modules and generators as they were. `again` runs forward once more.

    Raises CaptureError at the forward that draws from a foreign generator, or that keeps a number,
    a string or a list of them which is another after each call.
    """
    holders = find_holders(training)
    with restored(holders), seeded(trace_seed):
        before, after = read(holders), {}
        end = training.register_forward_hook(lambda *_: after.update(read(holders)))
        try:
            with refuse_draws(training):
                yield
        finally:
            end.remove()
        if after != before:  # what is computed once and kept does no harm
            again()
            once = read(holders)
            again()
            refuse_change(training, once, read(holders))


def find_holders(training: Training) -> dict[str, dict[str, object]]:
    """Attributes of all modules, by path, and the globals of the files that the user wrote."""
    modules = modules_of(training)
    owners = (*map(type, modules.values()), training.loss)
    files = {sys.modules.get(getattr(owner, "__module__", "")) for owner in owners}
    holders = {path: module.__dict__ for path, module in modules.items()}
    return holders | {f"file {f.__name__}": f.__dict__ for f in files if f and is_own(f)}


def modules_of(training: Training) -> dict[str, nn.Module]:
    """Those of the model by path, and those of a loss that is one."""
    modules = dict(training.model.named_modules())
    if isinstance(training.loss, nn.Module):
        own = training.loss.named_modules(prefix="the loss")
        modules |= {path: module for path, module in own if path not in modules}
    return modules


def is_own(module: ModuleType) -> bool:
    """Whether a file is the user's, and not an installed library's."""
    file = getattr(module, "__file__", None) or ""
    return is_users(file) and "site-packages" not in file


@contextmanager
def restored(holders: dict[str, dict[str, object]]) -> Iterator[None]:
    """Whatever happens to attributes, lists and caches inside is undone."""
    kept = {path: dict(attributes) for path, attributes in holders.items()}
    contents = [
        (value, value.copy())
        for attributes in kept.values()
        for name, value in attributes.items()
        if isinstance(value, dict | list | set) and not name.startswith("__")
    ]
    clear_caches(holders)
    try:
        yield
    finally:
        for path, attributes in holders.items():
            for name in attributes.keys() - kept[path].keys():
                del attributes[name]
            attributes.update(kept[path])
        for value, before in contents:
            refill(value, before)
        clear_caches(holders)


def refill(value: dict | list | set, before: dict | list | set) -> None:  # type: ignore[type-arg]
    """Give a container its contents back; it is never empty meanwhile, for it may be Python's."""
    if isinstance(value, list):
        value[:] = before
        return
    for key in [key for key in value if key not in before]:
        value.pop(key) if isinstance(value, dict) else value.remove(key)
    value.update(before)


def clear_caches(holders: dict[str, dict[str, object]]) -> None:
    """Forget what functools.cache keeps for the user's functions: it belongs to one trace."""
    for attributes in holders.values():
        for value in attributes.values():
            if isinstance(value, _lru_cache_wrapper) and is_users(
                value.__wrapped__.__code__.co_filename
            ):
                value.cache_clear()


@contextmanager
def refuse_draws(training: Training) -> Iterator[None]:
    """Compare the generators whenever a module's call begins or ends: the module that was running
    in between is it."""
    states = {what: state() for what, (state, _) in generators.items()}
    running: list[nn.Module] = []

    def compare() -> None:
        for what, (state, hint) in generators.items():
            if state() != states[what]:
                module = running[-1] if running else training
                who = "the loss" if module is training else f"forward of {type(module).__name__}"
                raise CaptureError(
                    f"{who} {what}: the script would do in every step what it does here",
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


def read(holders: dict[str, dict[str, object]]) -> dict[tuple[str, str], Hashable]:
    """The plain values among attributes."""
    ignored = vars(nn.Module()).keys() - {"training"}
    return {
        (path, name): frozen(value)
        for path, attributes in holders.items()
        for name, value in attributes.items()
        if name not in ignored and not name.startswith("__")
    }


def frozen(value: object) -> Hashable:
    """A plain value, or a nest of them, to compare; all tensors and other objects are alike."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, dict):
        return tuple((str(key), frozen(item)) for key, item in value.items())
    if isinstance(value, list | tuple | deque):
        return tuple(map(frozen, value))
    if isinstance(value, set | frozenset):
        return frozenset(map(frozen, value))
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    return ...


def refuse_change(
    training: Training,
    before: dict[tuple[str, str], Hashable],
    after: dict[tuple[str, str], Hashable],
) -> None:
    """Raises CaptureError where another call of forward changed a value once more."""
    for (path, name), value in after.items():
        if value == before.get((path, name)):
            continue
        module, owner = training.model, path.removeprefix("file ")
        if not path.startswith("file "):
            module = modules_of(training)[path]
            owner = path or type(module).__name__
        raise CaptureError(
            f"forward changes {name} of {owner}, a Python value: the script would compute in every "
            "step with the one it has here",
            forward_line(module) or training.where,
            f'a buffer is kept: self.register_buffer("{name}", torch.tensor(0)), and torch.where '
            "for an `if`; what draws it belongs to torch: torch.rand(())",
        )


def forward_line(module: nn.Module) -> Location | None:
    """Where the user's forward begins."""
    return code_line(inspect.unwrap(type(module).forward))


def code_line(function: object) -> Location | None:
    """Where a function of the user's begins."""
    code = getattr(function, "__code__", None)
    if code is None or not is_users(code.co_filename):
        return None
    return place(code.co_filename, code.co_firstlineno)
