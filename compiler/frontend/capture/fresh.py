"""What a script finds when it imports a copy of a user's file, beside what is there now: a factory
may have changed it.

Compared is what a class or a function reads: globals of its files by their names, attributes of
classes, texts of functions. Tensors are alike.
"""

import importlib
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from ...errors import CaptureError, Location
from ..sources import with_imports
from .carried import globals_of
from .frozen import frozen, plain
from .held import defaults_of, filled, is_opened, is_own, slots_of, wrapped
from .patched import patched
from .user import users_errors


def refuse_changed(
    what: str, value: type | FunctionType, module: str, folder: Path, where: Location | None,
    build: Callable[[ModuleType], None] = lambda _: None,
) -> None:  # fmt: skip
    """Raises CaptureError where a script that imports a class from a module beside the model's, or
    the module for an operation, given as its function, would not find what is there now. `build`:
    what the script does with the module before it computes."""
    names = globals_of(value)
    mine = read_all([value] if isinstance(value, type) else [*functions_in(names), value])
    with (
        users_errors(where, f"{module}.py cannot be imported once more"),
        afresh(module, folder) as again,
    ):
        build(again)
        functions = functions_in(vars(again))
        made = [getattr(again, value.__name__)] if isinstance(value, type) else functions
        theirs = read_all(made)
    changed = [name for name, held in mine.found.items() if theirs.found.get(name, ...) != held]
    changed += [name for name, held in mine.patched.items() if theirs.patched.get(name) is held]
    if not changed:
        return
    some = f"{', '.join(sorted(changed)[:3])}{', ...' if changed[3:] else ''}"
    taker = "__init__" if isinstance(value, type) and issubclass(value, nn.Module) else what
    raise CaptureError(
        f"{what} reads {some}, changed after {module}.py was imported; a script imports the file "
        "as it is",
        where,
        f"write it so in the file; what the factory chooses is an argument of {taker}",
    )


def read_all(values: list[Any]) -> "Reading":
    """What classes and functions of one file read."""
    reading = Reading()
    for value in values:
        reading.later(value, value.__name__)
    while reading.queue:
        reading.take(*reading.queue.popleft())
    return reading


def functions_in(names: Mapping[str, object]) -> list[FunctionType]:
    """The functions of a file, among them those that are to become operations."""
    inner = [v.function if isinstance(v, CustomOpDef) else v for v in names.values()]
    file = names.get("__file__")
    return [f for f in inner if isinstance(f, FunctionType) and f.__code__.co_filename == file]


@dataclass
class Reading:
    """Goes through what is read."""

    found: dict[str, Hashable] = field(default_factory=dict)
    """By a name for people: `pick.FACTOR`, `Pick.gain`."""
    patched: dict[str, object] = field(default_factory=dict)
    """Functions of the user's in the place of others' own, such as `torch.nn.functional.gelu`."""
    seen: dict[int, object] = field(default_factory=dict)
    libraries: set[tuple[int, frozenset[str]]] = field(default_factory=set)
    queue: deque[tuple[Any, str, frozenset[str]]] = field(default_factory=deque)

    def later(self, value: object, name: str, read: frozenset[str] = frozenset()) -> None:
        """What one leads to may be nested at any depth."""
        self.queue.append((value, name, read))

    def take(self, value: Any, name: str, read: frozenset[str]) -> None:
        """A value under a name. `read`: the attributes that its reader names."""
        if isinstance(value, ModuleType):
            self.take_module(value, read)
            return
        if name in self.found:
            return
        self.found[name] = frozen(value)
        if id(value) in self.seen or isinstance(value, (*plain, torch.Tensor)):
            return
        self.seen[id(value)] = value
        if isinstance(value, FunctionType):
            self.take_function(value, name)
        elif isinstance(value, type):
            self.take_class(value)
        elif isinstance(value, dict | list | tuple | set):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                if not isinstance(item, plain):
                    self.later(item, f"{name}[{key!r}]", read)
        elif is_opened(value):
            self.take_object(value, name, read)
        else:
            self.found[name] = frozen(value), getattr(value, "__name__", "")
        for inner in filter(None, wrapped(value)):
            self.later(inner, f"{name} ", read)

    def take_module(self, module: ModuleType, names: frozenset[str]) -> None:
        """What a reader names of it; of a library, what is the user's."""
        if is_own(getattr(module, "__file__", None)):
            self.take_names(vars(module), names)
            return
        if (id(module), names) in self.libraries:
            return
        self.libraries.add((id(module), names))
        for name in names & vars(module).keys():
            value = vars(module)[name]
            if isinstance(value, ModuleType):
                self.later(value, name, names)
            elif isinstance(value, FunctionType) and is_own(value.__code__.co_filename):
                self.patched[f"{module.__name__}.{name}"] = value

    def take_object(self, value: object, name: str, read: frozenset[str]) -> None:
        """Its attributes; then its class."""
        held = dict(getattr(value, "__dict__", {}))
        held |= {slot: getattr(value, slot, None) for slot in slots_of(value)}
        for attribute, item in held.items():
            self.later(item, f"{name}.{attribute}", read)
        self.take_class(type(value))

    def take_function(self, function: FunctionType, name: str) -> None:
        """What it does, and what it reads by name."""
        code = function.__code__
        if not is_own(code.co_filename):
            return
        names = names_in(code)
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        for inner, value in (filled(cells) | defaults_of(function)).items():
            self.later(value, f"{name}.{inner}", names)
        self.take_names(function.__globals__, names)

    def take_names(self, scope: Mapping[str, object], names: frozenset[str]) -> None:
        """Globals of a file."""
        stem = Path(str(scope.get("__file__"))).stem
        for name in sorted(names & scope.keys()):
            self.later(scope[name], f"{stem}.{name}", names)

    def take_class(self, cls: type) -> None:
        """Its attributes and methods, and those of what it derives from."""
        if not is_own(getattr(sys.modules.get(cls.__module__), "__file__", None)):
            return
        for name, value in vars(cls).items():
            special = name.startswith("__") and not isinstance(value, FunctionType)
            if not special and name != "_backward_cls":
                self.later(value, f"{cls.__name__}.{name}")
        for base in cls.__bases__:
            self.later(base, base.__name__)


def names_in(code: CodeType) -> frozenset[str]:
    """Globals and attributes that a function names, and those inside it."""
    inner = [names_in(c) for c in code.co_consts if isinstance(c, CodeType)]
    return frozenset(code.co_names).union(*inner)


class CustomOpDef:
    """In the place of torch's class of this name: what a file registers a second time would take
    the place of the operation that the model calls."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function

    def __getattr__(self, name: str) -> Callable[..., object]:
        """register_fake and its like, as calls or as decorators."""
        return lambda *given, **_: given[-1] if given and callable(given[-1]) else lambda f: f


def custom_op(_: str, function: Callable[..., object] | None = None, /, **__: object) -> object:
    """Stands in for torch.library.custom_op."""
    return CustomOpDef(function) if function else CustomOpDef


@contextmanager
def afresh(module: str, folder: Path) -> Iterator[ModuleType]:
    """A module beside the model's, imported as a script does, with the files that it imports. What
    is known under their names comes back afterwards."""
    names = [name.removesuffix(".py") for name in with_imports(folder / f"{module}.py")]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(folder.resolve()))
    importlib.invalidate_caches()
    try:
        with patched(torch.library, custom_op=custom_op):
            yield importlib.import_module(module)
    finally:
        sys.path.remove(str(folder.resolve()))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)
