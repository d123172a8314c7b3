"""The user's initialisation as code: one branch for all tensors that start alike.

A branch is chosen by the end of the name, the shortest that no tensor of another branch ends in.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from ..ir.graph import Arg, Device, Graph, Op, Recipe, Ref, State
from ..ir.unit import Unit
from .arguments import spell_arg
from .expression import Expr, plain, quote
from .layout import wrap
from .ops import spell
from .scope import Scope

tensor_name = "tensor"


@dataclass(frozen=True, slots=True)
class Weights:
    """The body of init_weights."""

    lines: tuple[str, ...]
    draws: bool
    """Something is random."""
    saved: bool
    """Something is read from a file."""


def spell_weights(graph: Graph, unit: Unit) -> Weights:
    """The initialisation of all that a stage holds."""
    branches: dict[tuple[str, ...], list[str]] = {}
    buffers = False
    recipes = {}
    for held in unit.state:
        parameter = graph.parameters[held.canonical]
        recipes[held.fqn] = parameter.recipe
        buffers |= parameter.buffer
        code = tuple(spell_recipe(held.fqn, held.canonical, parameter.recipe))
        branches.setdefault(code, []).append(held.fqn)
    names = (
        "(*stage.named_parameters(), *stage.named_buffers())"
        if buffers
        else "stage.named_parameters()"
    )
    lines = [f"    for name, {tensor_name} in {names}:"]
    conditions = {
        code: condition(members, [name for name in recipes if name not in members])
        for code, members in branches.items()
    }
    ordered = sorted(branches, key=lambda code: len(conditions[code]))  # the longest is `else`
    for i, code in enumerate(ordered):
        head = f"{'elif' if i else 'if'} {conditions[code]}:" if i < len(ordered) - 1 else "else:"
        lines += wrap(head, 8) if len(ordered) > 1 else []
        lines += [line for text in code for line in wrap(text, 12 if len(ordered) > 1 else 8)]
    if not branches:
        lines = ["    pass  # this stage has no parameters"]
    ops = [op for recipe in recipes.values() for op in recipe.ops]
    return Weights(
        tuple(lines), any(op.random for op in ops), any(r.saved for r in recipes.values())
    )


def condition(members: Sequence[str], others: Sequence[str]) -> str:
    """`name.endswith((...))` with the shortest ends that tell the members from the others."""
    ends: list[str] = []
    for name in members:
        if not any(name.endswith(end) for end in ends):
            ends.append(shortest_end(name, others))
    if len(members) == 1 and ends == list(members):
        return f"name == {quote(members[0])}"
    exact = [end for end in ends if any(other.endswith(end) for other in others)]
    if exact:  # one name ends in another
        comma = "," if len(members) == 1 else ""
        return f"name in ({', '.join(map(quote, members))}{comma})"
    if len(ends) == 1:
        return f"name.endswith({quote(ends[0])})"
    return f"name.endswith(({', '.join(map(quote, ends))}))"


def shortest_end(name: str, others: Sequence[str]) -> str:
    """The shortest run of parts at a name's end that no other name ends in."""
    parts = name.split(".")
    starts = [i for i in range(len(parts) - 1, -1, -1) if not parts[i].isdigit()]
    ends = (".".join(parts[i:]) for i in starts)
    return next((end for end in ends if not any(other.endswith(end) for other in others)), name)


def spell_recipe(name: str, canonical: str, recipe: Recipe) -> Iterator[str]:
    """The statements that fill `tensor`, which a stage knows by `name`."""
    if recipe.saved:
        key = "name" if name == canonical else quote(canonical)
        yield f"{tensor_name}.copy_(saved[{key}])"
        return
    keys = dict(recipe.seeds)
    names = {"self": tensor_name}
    last = {str(ref): float(i) for i, op in enumerate(recipe.ops) for ref in op.operands}
    scope = Scope(last | {recipe.result: inf})
    for i, op in enumerate(map(without_device, recipe.ops)):
        for output in op.outputs:
            if output not in names:
                names[output] = scope.bind(output, "value", i)
        if op.random:
            yield spell_draw(op, names, keys[op.name], name)
        else:
            yield spell_step(op, names)
    if recipe.result != "self":
        yield f"{tensor_name}.copy_({names[recipe.result]})"


def without_device(op: Op) -> Op:
    """Initialisation runs on the CPU, whatever the device."""
    return replace(
        op, kwargs=tuple((key, value) for key, value in op.kwargs if not isinstance(value, Device))
    )


def spell_draw(op: Op, names: Mapping[str, str], key: str, name: str) -> str:
    """`draw(tensor, name, torch.Tensor.normal_, 0.0, 0.02)`."""
    target = op.target.split(".")[1]
    fill = "nn.init.trunc_normal_" if target == "trunc_normal_" else f"torch.Tensor.{target}"
    spelled_key = (
        "name"
        if key == name
        else f'name + "{key.removeprefix(name)}"'
        if key.startswith(f"{name}#")
        else quote(key)
    )
    numbers = [plain(spell_arg(value, no_values).text) for value in op.args[1:]]
    numbers += [f"{k}={plain(spell_arg(value, no_values).text)}" for k, value in op.kwargs]
    return f"draw({', '.join([names[str(op.args[0])], spelled_key, fill, *numbers])})"


def spell_step(op: Op, names: Mapping[str, str]) -> str:
    """A statement of a recipe of several."""

    def name(ref: Ref | State) -> Expr:
        return Expr(names[str(ref)])

    if op.target == "aten.fill_.Scalar":
        value = plain(spell_arg(op.args[1], name).text)
        method = "zero_()" if value in ("0", "0.0") else f"fill_({value})"
        return f"{names[str(op.args[0])]}.{method}"
    text = plain(spell(op, name, {}).text).replace(", device=device", "")
    targets = ", ".join(names[output] for output in op.outputs)
    return text if op.mutates else f"{targets} = {text}"


def no_values(ref: Arg) -> Expr:
    raise TypeError(f"a number was expected, not {ref}")
