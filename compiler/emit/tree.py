"""What a function of an emitted class runs: ops of its own and calls of modules inside it.

A call of the user's model that is whole on a stage becomes an item, its ops hidden in a module; one
that is cut by a stage's border is dissolved, its parts standing where it stood.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..ir.graph import Call, CallId, Dim, Graph, Module, Op, Ref, TensorMeta, references
from ..ir.unit import Unit
from ..ir.values import has_batch
from .functional import outputs_of
from .hints import name_inside


@dataclass(frozen=True, slots=True)
class Item:
    """One step of a function."""

    ops: tuple[Op, ...]
    """One for an op; for a call all that run inside it."""
    call: Call | None
    statement: int
    reads: tuple[str, ...]
    """Values from outside, once for each time they are read; of a call, each once."""
    makes: tuple[str, ...]
    """Values made here that are read outside, in order; all outputs of an op, "" for unused."""

    @property
    def grad(self) -> bool:
        return any(op.grad for op in self.ops)

    def autocast(self, usual: str | None) -> str | None:
        """The dtype of the autocast around it; `usual` for a call inside which there are several,
        or none."""
        found = {op.autocast for op in self.ops}
        return found.pop() if len(found) == 1 else usual

    @property
    def op(self) -> Op:
        (op,) = self.ops
        return op


@dataclass(frozen=True)
class Tree:
    """The calls of a unit, as far as they are whole."""

    graph: Graph
    unit: Unit
    whole: frozenset[CallId]
    ops_of: Mapping[CallId, tuple[Op, ...]]
    """Every op inside a call, at any depth."""
    read_outside: Mapping[CallId, frozenset[str]]
    """Values made in a call and read outside of it."""
    position: Mapping[str, int]
    """Op -> its place in the unit."""
    hints: Mapping[str, str]
    """Value -> what to call it outside of the statement that makes it."""
    inside: Mapping[str, str]
    """Value -> what the statement calls it that makes it."""
    metas: Mapping[str, TensorMeta]
    """Of values, parameters and buffers, by every name."""

    def items(self, call: CallId | None) -> list[Item]:
        """The items of a call's function, or of the stage's for None, in order."""
        found: dict[CallId | str, list[Op]] = {}
        for op in self.ops_of[call] if call else self.unit.ops:
            found.setdefault(self.child(op, call) or op.name, []).append(op)
        ordered = sorted(found.items(), key=lambda entry: self.position[entry[1][-1].name])
        return [
            self.op_item(ops[0]) if isinstance(key, str) else self.call_item(key)
            for key, ops in ordered
        ]

    def child(self, op: Op, call: CallId | None) -> CallId | None:
        """The outermost whole call around an op, inside `call`; None for the call's own op."""
        chain = list(ancestors(self.graph, op.call))
        inside = chain[: chain.index(call)] if call else chain
        return next((c for c in reversed(inside) if c in self.whole), None)

    def op_item(self, op: Op) -> Item:
        reads = tuple(ref.name for ref in op.operands if isinstance(ref, Ref))
        model = self.graph.calls["", 0] if op.target == whole_model(self.graph) else None
        return Item((op,), model, op.statement, reads, outputs_of(op))

    def call_item(self, key: CallId) -> Item:
        ops, call = self.ops_of[key], self.graph.calls[key]
        made = {name for op in ops for name in op.outputs}
        reads = dict.fromkeys(
            ref.name
            for op in ops
            for ref in op.operands
            if isinstance(ref, Ref) and ref.name not in made
        )
        returned = [ref.name for ref in references(call.output) if isinstance(ref, Ref)]
        outside = self.read_outside[key]
        makes = dict.fromkeys(
            [n for n in returned if n in outside]
            + [n for op in ops for n in op.outputs if n in outside]
        )
        return Item(ops, call, call.statement, tuple(reads), tuple(makes))

    def needs_batch(self, item: Item) -> bool:
        """Whether a call's function has a size that grows with the batch and no value to see the
        number of samples from."""
        if item.call is None or item.call.path in self.graph.leaves:
            return False
        if any(map(is_batched, (self.metas[v] for v in item.reads))):
            return False
        key = (item.call.path, item.call.number)
        return key in self.whole and self.reads_batch(self.items(key))

    def reads_batch(self, items: Sequence[Item]) -> bool:
        """Whether a function with these items needs the number of samples."""
        own = (
            op for item in items if item.call is None or item.call.path in self.graph.leaves
            for op in item.ops
        )  # fmt: skip
        return any(has_batch((op.args, op.kwargs)) for op in own) or any(
            map(self.needs_batch, items)
        )


def is_batched(meta: TensorMeta) -> bool:
    return any(isinstance(size, Dim) for size in meta.shape)


def ancestors(graph: Graph, call: CallId) -> Iterator[CallId]:
    """A call and those around it, innermost first."""
    found: CallId | None = call
    while found is not None:
        yield found
        found = graph.calls[found].parent if found in graph.calls else None


def make_tree(graph: Graph, unit: Unit, hints: Mapping[str, str]) -> Tree:
    """The tree of a unit's calls."""
    ops_of: dict[CallId, list[Op]] = {}
    for op in unit.ops:
        for call in ancestors(graph, op.call):
            ops_of.setdefault(call, []).append(op)
    whole = frozenset(
        call for call in unit.calls if call in ops_of and may_fold(graph, unit, call, ops_of[call])
    )
    results = {value for _, value in unit.outputs} | {t.value for t in unit.sends}
    uses = Counter(str(ref) for op in unit.ops for ref in op.operands)
    tree = Tree(
        graph,
        unit,
        whole,
        {call: tuple(ops) for call, ops in ops_of.items()},
        {call: read_outside(ops, uses, results) for call, ops in ops_of.items()},
        {op.name: i for i, op in enumerate(unit.ops)},
        hints,
        name_inside(graph),
        {name: graph.parameters[fqn].meta for name, fqn in graph.canonical.items()}
        | dict(graph.values),
    )
    return replace(tree, whole=whole.difference(unlike_first(tree), given_otherwise(tree)))


def given_otherwise(tree: Tree) -> Iterator[CallId]:
    """Calls of torch's own modules that read what they were not given, as weights that
    torch.func.functional_call puts in place of their own: no call says that."""
    for call in tree.whole:
        if is_leaf(tree.graph.modules[call[0]]):
            item = tree.call_item(call)
            given = {str(ref) for _, a in tree.graph.calls[call].arguments for ref in references(a)}
            if not given.issuperset(item.reads):
                yield call


def unlike_first(tree: Tree) -> Iterator[CallId]:
    """Calls of a module that compute something else than its first call does, on other sizes or
    with other arguments: one forward cannot be both, so they are dissolved."""
    first: dict[str, tuple[object, ...]] = {}
    for call in sorted(tree.whole):
        if is_leaf(tree.graph.modules[call[0]]):
            continue
        found = structure(tree.call_item(call))
        if first.setdefault(call[0], found) != found:
            yield call


def structure(item: Item) -> tuple[object, ...]:
    """What a call computes, its values numbered."""
    numbers: dict[str, int] = {}

    def shown(argument: object) -> object:
        if isinstance(argument, Ref):
            return "value", numbers.setdefault(argument.name, len(numbers))
        return tuple(map(shown, argument)) if isinstance(argument, tuple) else argument

    arguments = item.call.arguments if item.call else ()
    given = [(name, shown(value)) for name, value in arguments if any(references(value))]
    ops = [
        (
            op.target,
            shown(op.args),
            shown(op.kwargs),
            shown(tuple(map(Ref, op.outputs))),
            op.grad,
            op.autocast,
        )
        for op in item.ops
    ]
    return *given, *ops, shown(tuple(map(Ref, item.makes)))


def read_outside(ops: Iterable[Op], uses: Mapping[str, int], results: set[str]) -> frozenset[str]:
    """Values made by some ops that others read, or that leave the stage."""
    ops = tuple(ops)
    inside = Counter(str(ref) for op in ops for ref in op.operands)
    return frozenset(
        name
        for op in ops
        for name in op.outputs
        if name and (uses[name] > inside[name] or name in results)
    )


def may_fold(graph: Graph, unit: Unit, call: CallId, ops: Sequence[Op]) -> bool:
    """Whether a call can be hidden in a module: unless the generator is seeded somewhere inside it.

    A layer that is a call is seeded before it, so its own call and those inside can be hidden.
    """
    names = {op.name for op in ops}
    seeded = {op for op, _ in unit.seeds if op in names}
    layers = [layer.call for layer in graph.layers if seeded & set(layer.ops)]
    around = set(ancestors(graph, call))
    return all(layer in around for layer in layers)


def whole_model(graph: Graph) -> str:
    """The target of the one op that is all of the model; "" where there is none."""
    return "ppc.leaf.default" * ("" in graph.leaves)


def is_leaf(module: Module | None) -> bool:
    """Whether a module is one of torch's own, built as the user built it."""
    return module is not None and module.constructor is not None
