"""The lines of one forward: items -> statements, as the user's own statements grouped them.

Values that are read once, within the statement that makes them, are written in place; the names are
those that the user assigned. A line that would not fit is taken apart.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..ir.function import users_class
from ..ir.graph import Graph, Ref, State, TensorMeta, references
from .expression import Expr, plain
from .hints import assigned, assigned_by_call
from .layout import fits, split_top
from .ops import spell
from .scope import Scope
from .tree import Item

nouns = {
    "add": "total", "sub": "difference", "mul": "product", "div": "ratio", "neg": "negated",
    "matmul": "product", "bmm": "product", "pow": "power", "abs": "magnitude", "sum": "total",
    "max": "maximum", "min": "minimum", "any": "found", "all": "found", "round": "rounded",
    "to": "converted", "select": "selected", "slice": "part", "index": "picked", "gather": "picked",
    "split": "part", "split_with_sizes": "part", "chunk": "part", "unbind": "part",
    "cat": "joined", "stack": "stacked", "where": "chosen", "masked_fill": "masked",
    "view": "viewed", "reshape": "reshaped", "flatten": "flat", "transpose": "transposed",
    "permute": "permuted", "expand": "expanded", "unsqueeze": "unsqueezed", "squeeze": "squeezed",
    "scaled_dot_product_attention": "attention", "cross_entropy_loss": "loss",
}  # fmt: skip
"""What to call an operation's result, where its own name is a verb, long, or Python's."""
valued = frozenset(
    ("max", "min", "topk", "sort", "median", "mode", "kthvalue", "cummax", "cummin",
     "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
     "max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices")
)  # fmt: skip
"""Operations that give values and where they are."""


in_place = {"add": "+=", "sub": "-=", "mul": "*=", "div": "/="}


class Spelled(NamedTuple):
    """An expression and what it gives."""

    expr: Expr
    results: tuple[str, ...]
    """Values, "" for one that nothing reads."""
    pattern: str
    """How they are assigned: `{}`, `{}, {}`, `{}, ({}, {})`."""


class CallSpeller(Protocol):
    """Writes a call of a module."""

    def __call__(self, item: Item, writer: "Writer") -> Spelled: ...


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a function, numbers in it still marked."""

    text: str
    indent: int = 0


@dataclass
class Writer:
    """Writes one function."""

    graph: Graph
    metas: Mapping[str, TensorMeta]
    """Of values, parameters and buffers, by every name."""
    scope: Scope
    access: Mapping[str, str]
    """Parameter or buffer -> `self.weight`, or the argument that brings it."""
    spell_call: CallSpeller
    before: Mapping[str, str]
    """Op -> a statement that must run right before it."""
    inside: Mapping[str, str]
    """Value -> the name that the statement gives it that makes it."""
    fixed: Mapping[str, str]
    """Value -> the name that it has in every script."""
    indent: int
    inlined: dict[str, Expr] = field(default_factory=dict)
    last_use: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self.last_use = dict(self.scope.last_use)

    def name(self, ref: Ref | State) -> Expr:
        """How a value or parameter is read here."""
        if isinstance(ref, State):
            return Expr(self.access[ref.fqn])
        return self.inlined[ref.name] if ref.name in self.inlined else Expr(self.scope[ref.name])

    def expression(self, item: Item) -> Spelled:
        if item.call is not None:
            return self.spell_call(item, self)
        single = is_tuple_of_one(item, self.graph)
        pattern = "({},)" if single else ", ".join(["{}"] * len(item.makes))
        return Spelled(spell(item.op, self.name, self.metas), item.makes, pattern)

    def seed(self, item: Item) -> str | None:
        """What must run right before an item."""
        return next((self.before[op.name] for op in item.ops if op.name in self.before), None)

    def group(
        self, items: Sequence[Item], position: int, outside: Mapping[str, int]
    ) -> Iterator[Line]:
        """The lines of one statement. `outside`: how often others read each value."""
        wanted = wanted_names(self.graph, items, outside, self.inside) | dict(self.fixed)
        once = inlinable([i for i in items if not self.seed(i)], items, outside)
        while True:
            self.inlined = {}
            saved = dict(self.scope.names), dict(self.scope.bound)
            lines = list(self.attempt(items, position, once, wanted))
            too_long = next(
                (
                    made
                    for line, made in lines
                    if not fits(plain(line.text), line.indent + self.indent)
                ),
                None,
            )
            if too_long is None or not once & set(too_long):
                break
            once = once - {widest(once & set(too_long), self.inlined)}
            self.scope.names, self.scope.bound = saved
        yield from (line for line, _ in lines)

    def attempt(
        self, items: Sequence[Item], position: int, once: frozenset[str], wanted: Mapping[str, str]
    ) -> Iterator[tuple[Line, tuple[str, ...]]]:
        """Lines with what is written in place in each."""
        inside: dict[str, tuple[str, ...]] = {}
        self.scope.last_use = self.last_use | last_uses(items, position, once, self.last_use)
        for offset, item in enumerate(items):
            expr, results, pattern = self.expression(item)
            parts = tuple(
                p for value in item.reads for p in (value, *inside.get(value, ())) if value in once
            )
            if len(results) == 1 and results[0] in once:
                self.inlined[results[0]], inside[results[0]] = expr, parts
                continue
            if seed := self.seed(item):
                yield Line(seed), ()
            names = [
                self.scope.bind(
                    v, wanted.get(v) or fallback(self.inside, v, item), position + offset
                )
                if v
                else "_"
                for v in results
            ]
            target = f"{pattern.format(*names)} = " if any(results) else ""
            yield Line(augmented(target + expr.text)), parts


def augmented(text: str) -> str:
    """`x += y` for `x = x.add_(y)`."""
    found = re.fullmatch(r"(\w+) = \1\.(add|sub|mul|div)_\((.+)\)", text)
    if found is None or len(split_top(found[3])) > 1:
        return text
    return f"{found[1]} {in_place[found[2]]} {found[3]}"


def last_uses(
    items: Sequence[Item], position: int, once: frozenset[str], last_use: Mapping[str, float]
) -> dict[str, float]:
    """Where values are last read that a statement reads last: what is written in place is read
    where it is written."""
    where: dict[str, float] = {}
    found: dict[str, float] = {}
    for offset, item in reversed(list(enumerate(items))):
        at = where[item.makes[0]] if item.makes and item.makes[0] in once else position + offset
        for value in item.reads:
            where[value] = max(where.get(value, at), at)
            if last_use[value] < position + len(items):
                found[value] = where[value]
    return found


def widest(values: Iterable[str], texts: Mapping[str, Expr]) -> str:
    return max(sorted(values), key=lambda value: len(plain(texts[value].text)))


def is_tuple_of_one(item: Item, graph: Graph) -> bool:
    """Whether an op gives a list of one tensor (`x.split(...)` in one piece)."""
    if item.op.target in graph.functions:
        return len(item.makes) == 1 and graph.functions[item.op.target].in_tuple
    namespace, name, _ = item.op.target.split(".")
    lists = name in ("split", "chunk", "unbind", "split_with_sizes") and namespace == "aten"
    return len(item.makes) == 1 and lists


def inlinable(
    free: Sequence[Item], items: Sequence[Item], outside: Mapping[str, int]
) -> frozenset[str]:
    """Values that are made by a free item and read just once, in this statement."""
    if any(op.mutates for item in items for op in item.ops if item.call is None):
        return frozenset()
    reads = Counter(value for item in items for value in mentions(item))
    return frozenset(
        item.makes[0]
        for item in free
        if len(item.makes) == 1 and reads[item.makes[0]] == 1 and not outside.get(item.makes[0])
    )


def mentions(item: Item) -> list[str]:
    """What an item reads, as often as its text may name it: `attention(x, x, x)`."""
    given = [a for _, a in item.call.arguments] if item.call else [item.op.args, *item.op.kwargs]
    named = [ref.name for ref in references(tuple(given)) if isinstance(ref, Ref)]
    return named + [value for value in item.reads if value not in named]


def wanted_names(
    graph: Graph, items: Sequence[Item], outside: Mapping[str, int], inside: Mapping[str, str]
) -> dict[str, str]:
    """The names that the user's statement assigns, for the values that leave it."""
    statement = graph.statements.get(items[0].statement)
    if statement is None or not statement.targets:
        return {}
    last = items[-1]
    named = (
        assigned_by_call(statement, last.call.output)
        if last.call
        else assigned(statement, last.makes)
    )
    if len(statement.targets) > 1 and named:
        return dict(named)
    leaving = [value for item in items for value in item.makes if value and outside.get(value)]
    if len(leaving) == len(statement.targets):
        return dict(zip(leaving, statement.targets, strict=True))
    if len(statement.targets) == 1:
        several = {
            v: inside[v] for item in items if len(item.makes) > 1 for v in item.makes if v in inside
        }
        return {v: statement.targets[0] for item in items for v in item.makes if v} | several
    return {}


def fallback(inside: Mapping[str, str], value: str, item: Item) -> str:
    """A name for a value that the statement does not name: the one that it has where it is made,
    the module's own, or the operation's."""
    if value in inside:
        return inside[value]
    if item.call is not None:
        parts = [part for part in item.call.path.split(".") if not part.isdigit()]
        return parts[-1] if parts else "x"
    name = item.op.target.split(".")[1].strip("_")
    if users_class(item.op.target):
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    if name in valued and len(item.makes) > 1:
        return ("values", "indices")[item.makes.index(value)]
    return nouns.get(name, name)
