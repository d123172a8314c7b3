"""What the constructors of a model's modules were given, noted while the factory runs."""

import dis
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType

from torch import nn


@dataclass(frozen=True, slots=True)
class Given:
    """The arguments of one constructor, defaults included."""

    module: nn.Module
    arguments: Mapping[str, object]
    star: tuple[object, ...]
    """What *args took."""
    changed: tuple[str, ...]
    """Arguments that __init__ had assigned anew before it called nn.Module's."""


@contextmanager
def noting_arguments(*, wanted: bool) -> Iterator[dict[int, Given]]:
    """By id of the module, of none where nobody wants to know. Every constructor comes to
    nn.Module's, where those above it still have their arguments."""
    found: dict[int, Given] = {}
    original = nn.Module.__init__

    def init(self: nn.Module, *args: object, **kwargs: object) -> None:
        frame = outermost(self, inspect.currentframe())
        if frame is not None:
            found[id(self)] = read(self, frame)
        elif type(self).__init__ is init:  # a class without a constructor of its own
            found[id(self)] = Given(self, kwargs, args, ())
        original(self, *args, **kwargs)

    if wanted:
        nn.Module.__init__ = init  # type: ignore[method-assign]
    try:
        yield found
    finally:
        nn.Module.__init__ = original  # type: ignore[method-assign]


def outermost(module: nn.Module, frame: FrameType | None) -> FrameType | None:
    """The __init__ of the module's own class, of those that are running."""
    found = None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount:
            found = frame if frame.f_locals.get(code.co_varnames[0]) is module else found
        frame = frame.f_back
    return found


def read(module: nn.Module, frame: FrameType) -> Given:
    """The arguments of a running __init__."""
    code, values = frame.f_code, frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    named = {name: values[name] for name in code.co_varnames[1:count]}
    rest, star = list(code.co_varnames[count:]), ()
    if code.co_flags & inspect.CO_VARARGS:
        star = tuple(values[rest.pop(0)])
    if code.co_flags & inspect.CO_VARKEYWORDS:
        named |= values[rest.pop(0)]
    return Given(module, named, star, assigned(code, frame.f_lasti))


def assigned(code: CodeType, until: int) -> tuple[str, ...]:
    """Arguments that a function assigns up to an instruction."""
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    names = (
        str(step.argval)
        for step in dis.get_instructions(code)
        if step.opname in ("STORE_FAST", "STORE_DEREF") and step.offset < until
    )
    return tuple(dict.fromkeys(name for name in names if name in arguments))
