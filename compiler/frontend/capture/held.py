"""Where Python keeps values from one call to the next: attributes of modules and of the user's
objects, globals of the user's files, attributes of classes and functions, cells of closures,
defaults, iterators. All that a model or a loss can reach is found, read, and put back.

Tensors are alike here: what forward does to them is traced.
"""

import functools
import os
import sys
from argparse import Namespace
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from threading import local
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from .frozen import frozen, max_bytes, max_items, plain
from .private import forward_hooks
from .user import is_users

max_holders = 50_000
"""So many are looked at: a model's objects can lead to anything."""
of_modules = frozenset(vars(nn.Module())) - {"training"}
opened = (
    SimpleNamespace, Namespace, UserDict, UserList, ChainMap, local, functools.partial,
    functools._lru_cache_wrapper,
)  # fmt: skip
"""Objects of the standard library that are looked into."""
Roots = Sequence[tuple[object, str]]
"""Where a search begins, each with its name for people."""
Key = tuple[str, str]
"""What holds a value, and the value's name there: `Net`, `cfg.n`."""


@dataclass(frozen=True, slots=True)
class Holder:
    """What has names for values."""

    owner: str
    """`Net`, `the class Net`, `net.py`."""
    names: Callable[[], Mapping[str, object]]
    put: Callable[[str, Any], None]
    drop: Callable[[str], None]
    prefix: str = ""
    """Of an attribute's attribute: `cfg.`."""
    ignored: frozenset[str] = frozenset()

    def read(self) -> dict[str, object]:
        """The values, without Python's own."""
        return {
            name: value
            for name, value in self.names().items()
            if name not in self.ignored and not (name.startswith("__") and name.endswith("__"))
        }


@dataclass
class Walk:
    """Goes through all that some objects lead to, the nearest first."""

    queue: deque[tuple[object, str, str]] = field(default_factory=deque)
    """(object, who owns it, its name there)"""
    seen: dict[int, object] = field(default_factory=dict)
    """By id; they live as long as the walk, or their ids would be given to others."""
    containers: list[Any] = field(default_factory=list)
    tensors: dict[Key, torch.Tensor] = field(default_factory=dict)
    """Those that are no module's attributes."""

    def holders(self) -> Iterator[Holder]:
        """Those that hold values."""
        while self.queue and len(self.seen) < max_holders:
            value, owner, name = self.queue.popleft()
            if isinstance(value, torch.Tensor):
                self.tensors.setdefault((owner, name), value)
            if id(value) in self.seen or isinstance(value, (*plain, torch.Tensor)):
                continue
            self.seen[id(value)] = value
            if isinstance(value, dict | list | tuple | set | deque):
                self.open_container(value, owner, name)
                if is_opened(value):  # of a class that derives from a container
                    yield from self.open_object(value, owner, name)
            elif isinstance(value, FunctionType):
                yield from self.open_function(value)
            elif isinstance(value, type):
                yield from self.open_class(value)
            elif isinstance(value, ModuleType):
                yield from self.open_file(value.__dict__)
            elif isinstance(value, nn.Module) or is_opened(value):
                yield from self.open_object(value, owner, name)
            else:
                self.queue += [(inner, owner, name) for inner in wrapped(value)]
            if isinstance(value, np.ndarray) and value.nbytes <= max_bytes:
                self.containers.append(value)

    def add(self, holder: Holder) -> Holder:
        """Go on with what it holds."""
        for name, value in holder.read().items():
            if not (holder.ignored and isinstance(value, torch.Tensor)):
                self.queue.append((value, holder.owner, holder.prefix + name))
        return holder

    def open_container(self, value: Any, owner: str, name: str) -> None:
        self.containers.append(value)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items if len(value) <= max_items else ():
            if not isinstance(item, plain):
                self.queue.append((item, owner, f"{name}[{key!r}]"))

    def open_function(self, function: FunctionType) -> Iterator[Holder]:
        """Its cells, attributes and defaults; then its file."""
        if not is_users(function.__code__.co_filename):
            self.queue += [(inner, "", "") for inner in wrapped(function)]
            return
        owner = f"the function {function.__qualname__.rpartition('<locals>.')[2]}"
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        yield self.add(
            Holder(
                owner,
                lambda: filled(cells),
                lambda name, content: setattr(cells[name], "cell_contents", content),
                lambda name: delattr(cells[name], "cell_contents"),
            )
        )
        yield self.add(of_dict(owner, function.__dict__))
        yield self.add(of_dict(owner, defaults_of(function)))
        self.queue += [(inner, owner, "") for inner in wrapped(function)]
        yield from self.open_file(function.__globals__)

    def open_class(self, cls: type) -> Iterator[Holder]:
        """Its attributes, and those of what it derives from."""
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        if not is_own(file) or issubclass(cls, Enum):
            return
        yield self.add(
            Holder(
                f"the class {cls.__qualname__.rpartition('<locals>.')[2]}",
                lambda: vars(cls),
                functools.partial(setattr, cls),
                functools.partial(delattr, cls),
            )
        )
        methods = [value for value in vars(cls).values() if isinstance(value, FunctionType)]
        self.queue += [(inner, "", "") for inner in (*methods, *cls.__bases__)]

    def open_file(self, names: dict[str, object]) -> Iterator[Holder]:
        """Its globals, once, if it is the user's."""
        file = str(names.get("__file__") or "")
        if is_own(file) and id(names) not in self.seen:
            self.seen[id(names)] = names
            yield self.add(of_dict(Path(file).name, names))

    def open_object(self, value: Any, owner: str, name: str) -> Iterator[Holder]:
        """Its attributes, in a dict or in slots; then its class."""
        prefix, ignored = f"{name}." if name else "", frozenset[str]()
        if isinstance(value, nn.Module):
            owner, prefix, ignored = owner if not name else type(value).__name__, "", of_modules
            self.containers += [item for item in vars(value).values() if isinstance(item, dict)]
            self.queue += [(inner, type(inner).__name__, "") for inner in value.children()]
            self.queue += [(hook, owner, "") for hook in forward_hooks(value)]
        elif isinstance(value, functools.partial):
            arguments = {"args": value.args, "keywords": value.keywords}
            yield self.add(of_dict(owner, arguments, prefix))
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield self.add(of_dict(owner, attributes, prefix, ignored))
        if slots := slots_of(value):
            yield self.add(
                Holder(
                    owner,
                    lambda: {n: getattr(value, n) for n in slots if hasattr(value, n)},
                    functools.partial(setattr, value),
                    functools.partial(delattr, value),
                    prefix,
                )
            )
        self.queue += [(inner, owner, name) for inner in wrapped(value)]
        self.queue.append((type(value), "", ""))


def of_dict(
    owner: str, names: dict[str, Any], prefix: str = "", ignored: frozenset[str] = frozenset()
) -> Holder:
    return Holder(owner, lambda: names, names.__setitem__, names.__delitem__, prefix, ignored)


def defaults_of(function: FunctionType) -> dict[str, object]:
    """Arguments' defaults by name."""
    values = function.__defaults__ or ()
    code = function.__code__
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return dict(zip(names, values, strict=True)) | (function.__kwdefaults__ or {})


def filled(cells: Mapping[str, CellType]) -> dict[str, object]:
    """What is in a function's cells; a name that is assigned later has none yet."""
    found = {}
    for name, cell in cells.items():
        with suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def slots_of(value: object) -> list[str]:
    """The names that classes give an object's places."""
    named = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    lists = [(names,) if isinstance(names, str) else tuple(names) for names in named]
    return [name for names in lists for name in names if not name.startswith("__")]


def wrapped(value: object) -> Iterator[object]:
    """What stands inside of a method, a property, a partial, a decorated function."""
    if isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, property):
        yield from (value.fget, value.fset)
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    elif isinstance(value, functools.cached_property):
        yield value.func
    elif isinstance(value, FunctionType | functools._lru_cache_wrapper):
        yield getattr(value, "__wrapped__", None)


def is_own(file: str | None) -> bool:
    """Whether a file is the user's, and not an installed library's."""
    return bool(file) and is_users(str(file)) and "site-packages" not in str(file)


def is_opened(value: object) -> bool:
    """Whether an object is of a user's class, or of an installed library's such as a config."""
    root = type(value).__module__.partition(".")[0]
    inside = root in sys.stdlib_module_names or root in ("torch", "numpy", "ppc")
    return isinstance(value, opened) or not inside


def walk(roots: Roots) -> tuple[list[Holder], Walk]:
    """All that some objects lead to."""
    environment = Holder(
        "os.environ", lambda: os.environ, os.environ.__setitem__, os.environ.__delitem__
    )
    going = Walk(deque((value, owner, "") for value, owner in roots))
    return [environment, *going.holders()], going


def read(roots: Roots) -> dict[Key, Hashable]:
    """The plain values among them, to compare."""
    found: dict[Key, Hashable] = {}
    for holder in walk(roots)[0]:
        for name, value in holder.read().items():
            key = holder.owner, holder.prefix + name
            before = found.get(key, ())  # two functions may bear one name
            found[key] = (*before, frozen(value))  # type: ignore[misc]
    return found


def reader(roots: Roots, key: Key) -> Callable[[], Hashable]:
    """Reads one of them again."""
    found = [
        (holder, name)
        for holder in walk(roots)[0]
        for name in holder.read()
        if (holder.owner, holder.prefix + name) == key
    ]
    return lambda: tuple(frozen(holder.read().get(name)) for holder, name in found)
