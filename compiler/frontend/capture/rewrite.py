"""What comes before the canonical form: operands that give only a shape become sizes, and what is
gone gets the name of what stands for it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...ir.graph import Arg, CallId, Items, Op, Ref, State, TensorMeta
from .export import RawCall

by_shape = {
    "aten.expand_as.default": ("aten.expand.default", "size"),
    "aten.view_as.default": ("aten.view.default", "size"),
    "aten.reshape_as.default": ("aten.reshape.default", "shape"),
}
"""Operations that read a tensor for its shape -> the same with sizes."""


def with_sizes(ops: Sequence[Op], metas: Mapping[str, TensorMeta]) -> list[Op]:
    """`x.expand_as(y)` as `x.expand(...)`: no stage needs y, and none waits for its gradient."""
    return [with_size(op, metas) if op.target in by_shape else op for op in ops]


def with_size(op: Op, metas: Mapping[str, TensorMeta]) -> Op:
    target, name = by_shape[op.target]
    sizes = metas[str(op.args[1])].shape
    return replace(op, target=target, args=(op.args[0], sizes), arg_names=(op.arg_names[0], name))


def name_states(ops: Sequence[Op]) -> list[Op]:
    """`count.add_(1)` is count: in another call of its module it is read by that name, for the
    value that the first one gave is seen only there."""
    results: dict[str, tuple[State, CallId]] = {}
    found = []
    for traced in ops:
        elsewhere = {name: state for name, (state, call) in results.items() if call != traced.call}
        op = rewrite(traced, elsewhere)
        if op.mutates and isinstance(op.args[0], State) and op.args[0].fqn in op.mutates:
            results[op.name] = op.args[0], op.call
        found.append(op)
    return found


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
