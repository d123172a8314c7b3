"""What an operation's schema says about a traced node."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from .private import Argument, FunctionSchema, schema_of

machine_flags = frozenset(("cudnn_enable", "cudnn_enabled"))
"""Torch passes what the machine has; the script's machine decides for itself."""


def running_statistics(node: Node) -> list[Node]:
    """Buffers that a norm writes in training, which its schema keeps quiet about."""
    names = (argument.name for argument in schema_of(node.target).arguments)
    arguments = dict(zip(names, node.args, strict=False))
    if not (arguments.get("training") or arguments.get("use_input_stats")):
        return []
    found = (arguments.get(name) for name in ("running_mean", "running_var"))
    return [value for value in found if isinstance(value, Node)]


def given_positionals(schema: FunctionSchema, args: Sequence[object]) -> int:
    """How many positional arguments say something: trailing defaults do not."""
    said = [
        not (a.has_default_value() and is_default(a, v))
        for a, v in zip(schema.arguments, args, strict=False)
    ]
    return max((i + 1 for i, says in enumerate(said) if says), default=0)


def is_default(argument: Argument, value: object) -> bool:
    """Whether a value is what the schema takes anyway; flags of the machine count as such."""
    if argument.name in machine_flags:
        return True
    if not argument.has_default_value():
        return False
    default = argument.default_value
    if isinstance(default, list):  # a traced list is of a type of its own
        return isinstance(value, list | tuple) and list(value) == default
    numbers = type(default) in (int, float) and type(value) in (int, float)
    return (numbers or type(default) is type(value)) and default == value


def dropped(schema: FunctionSchema, name: str, value: object) -> bool:
    """Whether a keyword argument says nothing, or nothing to this form of the operation."""
    argument = next((a for a in schema.arguments if a.name == name), None)
    return argument is None or name in ("pin_memory", "layout") or is_default(argument, value)


def draws(target: Any, args: Iterable[object], kwargs: Mapping[str, object]) -> bool:
    """Whether an operation draws random numbers as it is called: not dropout with p = 0, say."""
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    arguments = schema_of(target).arguments
    given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    given |= {**dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
    if given.get("train", True) is False or given.get("training", True) is False:
        return False
    chance = given.get("dropout_p", 1)
    if "train" in given:  # else p is that of a draw, which p = 0 does not spare
        chance = given.get("p", given.get("dropout", chance))
    return bool(chance != 0)
