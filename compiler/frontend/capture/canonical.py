"""Brings traced ops to one form: what does nothing is dropped, in-place becomes functional where
that is the same, and an update of a buffer stands beside its value.

The order matters: identities first, so that the rest sees what is really read and written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...ir.graph import Arg, CallId, Op, Ref, State, TensorMeta
from .arguments import numbers_of, to_arg
from .autocast import is_autocast
from .overloads import functional_form
from .raw import Raw
from .record import max_inline_elements
from .rewrite import name_states, rewrite, substitute, substitute_call, with_sizes

Known = dict[str, Arg]
"""Value that is gone -> what stands for it."""


def canonicalise(raw: Raw) -> Raw:
    """Before: ops as traced. After: no identity, no dead op; every name that is read exists."""
    raw = replace(raw, ops=name_states(with_sizes(raw.ops, raw.states | raw.values)))
    ops, known = drop_identities(raw)
    raw = copy_written_inputs(raw, make_functional(ops, raw), known)
    output = substitute(raw.output, known)
    ops = drop_dead(move_buffer_updates(raw), output)
    calls = {key: substitute_call(call, known) for key, call in raw.calls.items()}
    return replace(raw, ops=list(ops), calls=calls, output=output)


def drop_identities(raw: Raw) -> tuple[list[Op], Known]:
    """Drop assertions, casts to the dtype that is there, copies of literals, `+ 0` and `* 1.0`."""
    known: Known = {}
    literals: set[str] = set()
    metas = raw.states | raw.values
    memory = storages(raw.ops)
    written = {base for op in raw.ops for name in op.mutates for base in memory.get(name, {name})}
    free = set(raw.inputs)  # what no gradient flows through
    ops = []
    for traced in raw.ops:
        op = rewrite(traced, known)
        if op.target.startswith(("aten._assert", "aten.sym_constrain")):
            continue
        source = op.args[0] if op.args else None
        free |= set() if op.grad else set(op.outputs)
        if isinstance(source, State) and source.fqn in raw.constants and is_copy(op):
            ops.append(literal(op, raw))
            literals.add(op.name)
        elif (op.target == "aten.detach_.default" and str(source) in literals) or (
            is_identity(op, metas)
            and (op.grad or shows_itself(op) or str(source) in free)
            and (
                shows(op) or written.isdisjoint(memory.get(str(source), {str(source)}) | {op.name})
            )
        ):
            known[op.name] = op.args[0]
        elif op.target == "aten.cat.default":
            joined = without_empty(op, raw)
            if isinstance(joined, Op):
                ops.append(joined)
            else:
                known[op.name] = joined
        elif op.target == "aten.broadcast_tensors.default" and broadcasts_nothing(op, raw):
            known |= dict(zip(op.outputs, op.args[0], strict=True))  # type: ignore[arg-type]
        else:
            ops.append(op)
    return ops, known


def broadcasts_nothing(op: Op, raw: Raw) -> bool:
    """Whether all tensors have one shape already: losses broadcast what they compare, always."""
    metas = raw.states | raw.values
    return len({metas[str(ref)].shape for ref in op.operands}) == 1


def storages(ops: Sequence[Op]) -> dict[str, set[str]]:
    """Value that shows others -> whose memory it shows."""
    found: dict[str, set[str]] = {}
    for op in ops:
        bases = {base for name in op.views for base in found.get(name, {name})}
        found |= {name: bases for name in op.outputs if name and bases}
    return found


def copy_written_inputs(raw: Raw, ops: Sequence[Op], known: Known) -> Raw:
    """The ops with a copy of each input that they write to: other stages read it as it came."""
    memory = storages(ops)
    written = {base for op in ops for name in op.mutates for base in memory.get(name, {name})}
    values, copies = dict(raw.values), []
    for name in filter(written.__contains__, raw.inputs):
        copy = f"{name}_copy"
        values[copy], known[name] = raw.values[name], Ref(copy)
        copies.append(
            Op(
                copy, "aten.clone.default", (Ref(name),), (), ("self",), (copy,), ("", 0),
                spelling="method",
            )
        )  # fmt: skip
    return replace(raw, values=values, ops=[*copies, *(rewrite(op, known) for op in ops)])


def shows(op: Op) -> bool:
    """Whether an op's result is in the memory of its first argument."""
    return bool(op.views) or shows_itself(op)


def shows_itself(op: Op) -> bool:
    """Whether an op that does nothing returns its very argument, with its gradient."""
    return op.target.startswith(("aten.to.", "aten.lift_fresh.", "aten.dropout."))


def is_copy(op: Op) -> bool:
    return op.target in (
        "aten.lift_fresh_copy.default",
        "aten.lift_fresh.default",
        "aten.clone.default",
    )


def literal(op: Op, raw: Raw) -> Op:
    """A constant of forward: written out when small, else a tensor that the stage holds."""
    value = raw.constants[str(op.args[0])]
    if value.numel() > max_inline_elements:
        return op
    dtype = to_arg(value.dtype, lambda _: None)
    data = to_arg(numbers_of(value), lambda _: None)
    return replace(
        op,
        target="ppc.tensor.default",
        args=(data,),
        kwargs=(("dtype", dtype),),
        arg_names=("data",),
        views=(),
    )


def is_identity(op: Op, metas: Mapping[str, TensorMeta]) -> bool:
    """Whether an op's result is its first argument, value for value and gradient for gradient."""
    if not op.target.startswith("aten."):
        return False
    if not op.args or not isinstance(op.args[0], Ref | State):
        return False
    source, result = metas.get(str(op.args[0])), metas.get(op.outputs[0])
    if (
        source is None
        or result is None
        or (source.shape, source.dtype) != (result.shape, result.dtype)
    ):
        return False
    name = op.target.split(".")[1]
    if name in ("alias", "lift_fresh", "view", "reshape", "expand", "slice"):
        return True  # of equal shape
    if name == "dropout":
        return op.args[1] == 0 or op.args[2] is False
    if name == "to":
        return not any(key in ("memory_format", "copy") and value for key, value in op.kwargs)
    if name in ("add", "sub"):
        exact = not source.dtype.startswith(("float", "bfloat", "complex"))
        return exact and op.args[1] == 0 and not op.kwargs
    return name in ("mul", "div") and op.args[1] == 1 and not op.kwargs


def without_empty(op: Op, raw: Raw) -> Op | Arg:
    """A concatenation without its empty one-dimensional pieces (caches start with such), which
    torch allows beside any shape."""
    pieces = op.args[0] if isinstance(op.args[0], tuple) else ()
    full = tuple(
        piece for piece in pieces if raw.values.get(str(piece), TensorMeta((1,), "")).shape != (0,)
    )
    if len(full) == 1:
        return full[0]
    return replace(op, args=(full, *op.args[1:]))


def make_functional(ops: Sequence[Op], raw: Raw) -> list[Op]:
    """`relu_` -> `relu` where the target is a value that shows no other and is shown by none.

    While it traces, torch lets every later use of the target read the result: nothing is renamed.
    """
    shown = [(op, set(op.views) - set(op.mutates)) for op in ops]
    viewed = {view for _, sources in shown for view in sources}
    views = {name for op, sources in shown if sources for name in op.outputs}
    made = {*raw.inputs, *(name for op in ops for name in op.outputs)}
    result = []
    for op in ops:
        target = functional_form(op.target) if op.mutates else None
        (written, *others) = op.mutates or ("",)
        if (
            target
            and not others
            and written in made - views
            and written not in viewed
            and same_dtype(replace(op, target=target), raw.values)
        ):
            result.append(replace(op, target=target, mutates=(), views=()))
        else:
            result.append(op)
            views |= set(op.outputs) if op.mutates else set()  # `ema.mul_(d).add_(x)` is ema
    return result


def same_dtype(op: Op, values: Mapping[str, TensorMeta]) -> bool:
    """Whether no operand would lift the functional result to another dtype, and no autocast, which
    leaves alone what is in place."""
    dtype = values[op.outputs[0]].dtype
    operands = [values[str(ref)].dtype for ref in op.operands if str(ref) in values]
    if op.autocast:
        return not is_autocast(op.target) and all(fits(other, dtype) for other in operands)
    return all(other == dtype for other in operands)


def fits(operand: str, dtype: str) -> bool:
    """Whether an operand leaves a result's dtype as it is: bfloat16 beside float32 does."""
    return operand == dtype or (operand, dtype) == ("bfloat16", "float32")


def move_buffer_updates(raw: Raw) -> list[Op]:
    """What forward assigned to a buffer is written at the very end: put it after the statement that
    assigned it, in the call of the module that owns the buffer, and after the last reader."""
    result = [op for op in raw.ops if op.name not in raw.updates]
    for update in (op for op in raw.ops if op.name in raw.updates):
        buffer, value = update.args[0], update.args[1]
        maker = next((op for op in result if str(value) in op.outputs), update)
        inner = calls_within(maker.call, str(buffer).rpartition(".")[0], raw)
        before = [
            i
            for i, op in enumerate(result)
            if str(value) in op.outputs
            or buffer in op.operands
            or (len(inner) > 1 and inner[-2] in calls_around(op.call, raw))
        ]
        statement = raw.call_statements[inner[-2]] if len(inner) > 1 else maker.statement
        moved = replace(update, call=inner[-1], statement=statement, where=maker.where)
        result.insert(max(before, default=-1) + 1, moved)
    return result


def calls_around(call: CallId, raw: Raw) -> list[CallId]:
    """A call and those that made it, innermost first."""
    found = [call]
    while found[-1] in raw.parents:
        found.append(raw.parents[found[-1]])
    return found


def calls_within(call: CallId, path: str, raw: Raw) -> list[CallId]:
    """The same, up to a call of the module at `path`; the call alone if that did not make it."""
    found = calls_around(call, raw)
    end = next((i for i, (owner, _) in enumerate(found) if owner == path), 0)
    return found[: end + 1]


def drop_dead(ops: Sequence[Op], output: Arg) -> list[Op]:
    """Drop ops that nothing reads; those that write or draw random numbers stay."""
    live = {str(ref) for ref in Op("", "", (output,), (), (), (), ("", 0)).operands}
    kept = []
    for op in reversed(ops):
        if op.mutates or op.random or live & set(op.outputs):
            live |= {str(ref) for ref in op.operands}
            kept.append(op)
    return [
        replace(op, outputs=tuple(name if name in live else "" for name in op.outputs))
        for op in reversed(kept)
    ]
