"""Puts what stands for values that are gone in their place: in ops, arguments and calls."""

from collections.abc import Mapping
from dataclasses import replace

from ...ir.graph import Arg, Items, Op, Ref
from .export import RawCall

Known = dict[str, Arg]
"""Value that is gone -> what stands for it."""


def rewrite(op: Op, known: Mapping[str, Arg]) -> Op:
    """The op with what is gone replaced."""
    if not any(str(ref) in known for ref in op.operands) and not any(
        name in known for name in (*op.views, *op.mutates)
    ):
        return op
    return replace(
        op,
        args=tuple(substitute(a, known) for a in op.args),
        kwargs=tuple((key, substitute(a, known)) for key, a in op.kwargs),
        views=tuple(str(known.get(name, name)) for name in op.views),
        mutates=tuple(str(known.get(name, name)) for name in op.mutates),
    )


def substitute(argument: Arg, known: Mapping[str, Arg]) -> Arg:
    """An argument with what is gone replaced."""
    if isinstance(argument, Ref):
        return known.get(argument.name, argument)
    if isinstance(argument, tuple):
        return tuple(substitute(item, known) for item in argument)
    if isinstance(argument, Items):
        return Items(tuple((key, substitute(item, known)) for key, item in argument.items))
    return argument


def substitute_call(call: RawCall, known: Mapping[str, Arg]) -> RawCall:
    arguments = tuple((name, substitute(value, known)) for name, value in call.arguments)
    return RawCall(arguments, call.positional, substitute(call.output, known))
