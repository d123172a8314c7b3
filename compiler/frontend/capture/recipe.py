"""Recipes of initialisation, brought to their simplest form: most are one line.

In that form `self` is the tensor being initialised, already allocated; random operations fill a
tensor in place.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import zip_longest

from ...ir.graph import Arg, Items, Op, Recipe, Ref

empties = frozenset(("aten.empty.memory_format", "aten.empty_strided.default"))
full_overwrites = frozenset(
    (
        "aten.normal_.default", "aten.uniform_.default", "aten.exponential_.default",
        "aten.bernoulli_.float", "aten.random_.default", "aten.random_.from", "aten.random_.to",
        "aten.cauchy_.default", "aten.geometric_.default", "aten.log_normal_.default",
        "aten.fill_.Scalar", "aten.zero_.default", "aten.copy_.default",
        "ppc.trunc_normal_.default",
    )
)  # fmt: skip
"""In-place operations whose result does not depend on what was there."""


def is_fill(op: Op) -> bool:
    """Whether a random operation fills one tensor, or makes one and fills it."""
    return op.target in full_overwrites or op.target in fills


fills: Mapping[str, tuple[str, tuple[Arg, ...]]] = {
    "aten.randn.default": ("aten.normal_.default", (0.0, 1.0)),
    "aten.rand.default": ("aten.uniform_.default", (0.0, 1.0)),
    "aten.zeros.default": ("aten.fill_.Scalar", (0,)),
    "aten.ones.default": ("aten.fill_.Scalar", (1,)),
}
"""Operations that make a tensor and fill it -> the same filling, in place."""


nothing = Op(
    "zeros", "aten.fill_.Scalar", (Ref("self"), 0), (), ("self", "value"), ("self",), ("", 0)
)
zeros = Recipe((nothing,), "self")
"""Of a buffer that the factory leaves as it found it."""


def simplify(ops: Iterable[Op], result: str) -> Recipe:
    """Before: recorded operations, the tensor's name among their results. After: as above."""
    steps = drop_copy([step for op in ops for step in split_fill(op)], result)
    maker = next((op for op in steps if result in op.outputs and not op.mutates), None)
    if maker is not None and (maker.target in empties or is_refilled(maker, steps)):
        steps = [substitute(op, {result: "self"}) for op in steps if op is not maker]
        result = "self"
    steps = [op for op, after in zip_longest(steps, steps[1:]) if not overwritten(op, after)]
    if (
        len(steps) == 1
        and steps[0].target == "ppc.tensor.default"
        and not isinstance(steps[0].args[0], tuple)
    ):
        steps, result = (
            [
                replace(
                    steps[0],
                    target="aten.fill_.Scalar",
                    args=(Ref("self"), *steps[0].args),
                    kwargs=(),
                )
            ],
            "self",
        )
    return Recipe(tuple(steps), result)


def drop_copy(steps: list[Op], result: str) -> list[Op]:
    """The steps without a copy at their end of what they made: deep copies of layers end so."""
    last = steps[-1] if steps else None
    if last is None or last.target != "aten.clone.default" or last.outputs != (result,):
        return steps
    source = str(last.args[0])
    if not any(source in op.outputs and not op.mutates for op in steps):
        return steps
    return [substitute(op, {source: result}) for op in steps[:-1]]


def is_refilled(literal: Op, steps: Iterable[Op]) -> bool:
    """Whether a constant is filled with something else before anything reads it."""
    made = Ref(literal.outputs[0])
    first = next((op for op in steps if made in op.operands), None)
    return (
        literal.target == "ppc.tensor.default"
        and first is not None
        and first.target in full_overwrites
        and first.operands.count(made) == 1
        and first.args[0] == made
    )


def overwritten(op: Op, after: Op | None) -> bool:
    """Whether an op fills a tensor that the next one fills again."""
    return (
        after is not None
        and after.target in full_overwrites
        and op.target in full_overwrites
        and op.args[0] == after.args[0]
        and op.args[0] not in after.args[1:]
    )


def split_fill(op: Op) -> tuple[Op, ...]:
    """Making and filling a tensor, apart; filling in one spelling."""
    if op.target == "aten.zero_.default":
        return (
            replace(
                op, target="aten.fill_.Scalar", args=(*op.args, 0), arg_names=("self", "value")
            ),
        )
    target, values = fills.get(op.target, (op.target, ()))
    if op.target == "aten.full.default":
        target, values = "aten.fill_.Scalar", op.args[1:2]
    if target == op.target:
        return (op,)
    (name,) = op.outputs
    make = replace(
        op,
        name=f"{op.name}_empty",
        target="aten.empty.memory_format",
        args=op.args[:1],
        arg_names=op.arg_names[:1],
        random=False,
    )
    fill = replace(
        op,
        target=target,
        args=(Ref(name), *values),
        kwargs=(),
        arg_names=("self",),
        mutates=(name,),
    )
    return (make, fill)


def substitute(op: Op, names: Mapping[str, str]) -> Op:
    """The op with values renamed."""

    def rename(argument: Arg) -> Arg:
        if isinstance(argument, Ref):
            return Ref(names.get(argument.name, argument.name))
        if isinstance(argument, tuple):
            return tuple(map(rename, argument))
        if isinstance(argument, Items):
            return Items(tuple((key, rename(value)) for key, value in argument.items))
        return argument

    return replace(
        op,
        args=tuple(map(rename, op.args)),
        kwargs=tuple((key, rename(value)) for key, value in op.kwargs),
        outputs=tuple(names.get(name, name) for name in op.outputs),
        mutates=tuple(names.get(name, name) for name in op.mutates),
    )


def assign_seeds(recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """Each random operation gets one seed key: its owner's name, then `#1`, `#2` for its next ones.

    The owner is the first tensor whose recipe has the operation, so that tensors that share it
    (`clone(randn)`, weight norm's length of a random weight) agree. `recipes` is in the model's
    order.
    """
    keys: dict[str, str] = {}
    result = {}
    for fqn, recipe in recipes.items():
        random = [op.name for op in recipe.ops if op.random]
        owned = 0
        for name in random:
            if name not in keys:
                keys[name] = fqn if owned == 0 else f"{fqn}#{owned}"
                owned += 1
        result[fqn] = replace(recipe, seeds=tuple((name, keys[name]) for name in random))
    return result
