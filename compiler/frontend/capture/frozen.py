"""What a Python value is at one moment, to compare it with what it is later, or elsewhere."""

import random
import warnings
from collections import deque
from collections.abc import Hashable, Iterator
from enum import Enum
from types import CodeType, FunctionType, GeneratorType

import numpy as np
import torch

plain = (bool, int, float, complex, str, bytes, np.generic, type(None))
max_bytes = 1 << 20
"""Of an array whose numbers are compared."""
max_items = 100_000
"""Of a container that is looked into."""
max_depth = 50


def frozen(value: object, inside: tuple[int, ...] = ()) -> Hashable:
    """A plain value, or a nest of them; all tensors are alike, other objects by their classes.
    `inside`: ids of what it lies in."""
    if isinstance(value, plain):
        return repr(value)
    if isinstance(value, torch.Tensor) or id(value) in inside or len(inside) > max_depth:
        return ...
    inner = (*inside, id(value))
    if isinstance(value, dict | list | tuple | deque | set) and len(value) > max_items:
        return len(value)
    if isinstance(value, dict):
        return tuple((frozen(key, inner), frozen(item, inner)) for key, item in value.items())
    if isinstance(value, list | tuple | deque):
        return tuple(frozen(item, inner) for item in value)
    if isinstance(value, set | frozenset):
        return frozenset(frozen(item, inner) for item in value)
    if isinstance(value, FunctionType):
        return value.__qualname__, frozen_code(value.__code__)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, np.ndarray):
        return value.shape, str(value.dtype), value.tobytes() if value.nbytes <= max_bytes else ""
    if isinstance(value, type):
        return value.__qualname__
    return type(value).__qualname__, frozen_state(value, inner)


def frozen_state(value: object, inside: tuple[int, ...]) -> Hashable:
    """How far a generator or an iterator has come, without moving it."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return frozen(value.get_state(legacy=False), inside)
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        return (frame.f_lasti, frozen(frame.f_locals, inside)) if frame else None
    if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
        try:
            with warnings.catch_warnings(action="ignore"):  # itertools' goes in Python 3.14
                parts = value.__reduce__()
        except TypeError:  # a file's lines
            parts = repr(value) if type(value).__name__ == "count" else ""
        return frozen(parts, inside)
    return None


def frozen_code(code: CodeType) -> Hashable:
    """What a function does, wherever it stands."""
    constants = tuple(
        frozen_code(c) if isinstance(c, CodeType) else frozen(c) for c in code.co_consts
    )
    return code.co_code, code.co_names, constants
