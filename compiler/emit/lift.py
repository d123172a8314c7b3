"""A unit -> the classes of its script, as a person would write them.

Each kind of module that is whole on the stage becomes a class with the user's names; what the
stage's border cuts, and the containers around it, are written out in the class Stage.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ..ir.graph import CallId, Graph
from ..ir.unit import Unit
from .attributes import Attributes, Holding, construct, empty_tensor
from .body import Line
from .calls import Calls, signature
from .classes import Class, Draft, unify, whole
from .expression import Expr, call, plain, quote
from .function import Function, FunctionWriter
from .functions import function_names
from .leaves import imported, own_name
from .loops import LoopFinder
from .scope import script
from .tree import Item, Tree, is_leaf, make_tree


@dataclass(frozen=True, slots=True)
class Lifted:
    """A stage in text."""

    classes: tuple[Class, ...]
    """Those that others use first."""
    stage: Class
    results: tuple[str, ...]
    """The values that Stage.forward returns, in order."""


def lift(
    graph: Graph,
    unit: Unit,
    hints: Mapping[str, str],
    boundary: Mapping[str, str],
    default_dtype: str,
) -> Lifted:
    """Text for a unit. `hints` and `boundary` name the graph's values (hints.py, boundary.py).

    Before: a verified unit. After: text that computes exactly the unit; `check` compares them."""
    return Lifter(graph, unit, hints, boundary, default_dtype).lift()


@dataclass
class Lifter:
    """Writes the classes of one unit, innermost first."""

    graph: Graph
    unit: Unit
    hints: Mapping[str, str]
    boundary: Mapping[str, str]
    default_dtype: str
    tree: Tree = field(init=False)
    instances: dict[str, Expr] = field(default_factory=dict)
    """Path of a lifted module -> how to make it."""
    chains: frozenset[str] = frozenset()
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Of the layers that are modules called once, by path."""

    def __post_init__(self) -> None:
        self.tree = make_tree(self.graph, self.unit, self.hints)
        self.seeds = {op: f"seed_layer(key, {quote(path)})" for op, path in self.unit.seeds}
        layers = [layer for layer in self.graph.layers if layer.call]
        calls = Counter(path for path, _ in self.graph.calls)
        self.kinds = {layer.path: layer.kind for layer in layers if calls[layer.path] == 1}
        self.chains = frozenset(key[0] for key in self.tree.whole if self.is_chain(key))

    def lift(self) -> Lifted:
        classes: list[Class] = []
        heights = self.heights()
        for height in range(1, max(heights.values(), default=0) + 1):
            paths = [path for path, value in heights.items() if value == height]
            kinds = {path: self.kind(path) for path in paths}
            firsts = {kind: path for path, kind in reversed(kinds.items())}
            drafts = {kind: self.draft(path) for kind, path in reversed(firsts.items())}
            alike = [replace(drafts[kind], path=path) for path, kind in kinds.items()]
            own = function_names(self.graph, self.unit)
            taken = script.union((c.name for c in classes), imported(self.graph), own)
            made, instances = unify(alike, taken)
            classes += made
            self.instances |= instances
        sends = tuple(dict.fromkeys(t.value for t in self.unit.sends))
        results = tuple(value for _, value in self.unit.outputs) + sends
        return Lifted(tuple(classes), self.stage(results), results)

    def kind(self, path: str) -> tuple[object, ...]:
        """Equal for modules whose text is the same: those at one place in layers of one kind."""
        inside = [
            (name.removeprefix(path), module.cls, module.constructor)
            for name, module in self.graph.modules.items()
            if name == path or name.startswith(f"{path}.")
        ]
        names = (name for held in self.unit.state for name in (held.fqn, *held.aliases))
        state = [name.removeprefix(path) for name in names if name.startswith(f"{path}.")]
        parts = path.split(".")
        around = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        layer = next((name for name in around if name in self.kinds), None)
        if layer is None:
            return (path,)
        return self.kinds[layer], path.removeprefix(layer), tuple(inside), tuple(state)

    def heights(self) -> dict[str, int]:
        """Paths of the modules to lift -> 1 where they use no other lifted module, and so on."""
        found: dict[str, int] = {}

        def visit(key: CallId | None) -> int:
            inner = [
                visit((i.call.path, i.call.number))
                for i in self.tree.items(key)
                if i.call and not is_leaf(self.graph.modules[i.call.path])
            ]
            height = max(inner, default=0)
            if key and key[0] not in self.chains:
                height += 1
                found[key[0]] = max(found.get(key[0], 0), height)
            return height

        visit(None)
        return found

    def is_chain(self, key: CallId) -> bool:
        """Whether a call runs an nn.Sequential's children one after the other, as they stand."""
        module = self.graph.modules[key[0]]
        if not module.sequential or not all(name.isdigit() for name in module.children):
            return False
        items = {i.call.path: i for i in self.tree.items(key) if i.call}
        if len(items) != len(self.tree.items(key)):
            return False
        previous: str | None = None
        for name in module.children:
            path = f"{key[0]}.{name}"
            item = items.get(path)
            if item is None:
                if not is_leaf(self.graph.modules[path]):
                    return False
                continue
            if (
                len(item.reads) != 1
                or len(item.makes) != 1
                or (previous and item.reads[0] != previous)
                or self.tree.needs_batch(item)
            ):
                return False
            previous = item.makes[0]
        return previous is not None and self.tree.call_item(key).makes == (previous,)

    def make(self, path: str) -> Expr:
        """How to build a module."""
        module = self.graph.modules[path]
        if module.constructor is not None:
            return construct(own_name(self.graph, module))
        if path in self.chains:
            return call(
                "nn.Sequential", [self.make(f"{path}.{name}").text for name in module.children]
            )
        return self.instances[path]

    def draft(self, path: str) -> Draft:
        """The class of a lifted module."""
        numbers = [n for p, n in self.graph.calls if p == path and (p, n) in self.tree.whole]
        item = self.tree.call_item((path, numbers[0]))
        form = signature(self.tree, item)
        items = self.tree.items((path, numbers[0]))
        names = [
            name
            for held in self.unit.state
            for name in (held.fqn, *held.aliases)
            if name.startswith(f"{path}.")
        ]
        attributes = Attributes(self.holdings(path, items, names), self.graph, path)
        access = {name: attributes.access(name.removeprefix(f"{path}.")) for name in names}
        access |= {fqn: name for name, fqn in form.states}
        function = Function(
            form.arguments,
            tuple(items),
            form.results,
            LoopFinder(self.tree, attributes, path, {}).find(items, form.results),
            given_batch=form.batch,
            without_grad=not item.grad,
            autocast=item.autocast(self.graph.autocast),
        )
        writer = FunctionWriter(
            self.graph,
            function,
            access,
            Calls(self.tree, attributes, path, self.chains),
            {},
            {},
        )
        lines = tuple(writer.lines())
        module = self.graph.modules[path]
        arguments = (*writer.argument_names, *["batch"] * form.batch)
        arguments += tuple(name for name, _ in form.states)
        init, base = tuple(attributes.lines()), attributes.own_class
        return Draft(path, module.cls, module.where, init, arguments, lines, base)

    def stage(self, results: tuple[str, ...]) -> Class:
        """The class Stage."""
        items = self.tree.items(None)
        names = [name for held in self.unit.state for name in (held.fqn, *held.aliases)]
        attributes = Attributes(self.holdings("", items, names), self.graph, "")
        access = {name: attributes.access(name) for name in names}
        arguments = [(self.boundary[t.value], t.value) for t in self.unit.receives]
        arguments += [(i.name, i.name) for i in self.unit.inputs]
        function = Function(
            tuple(arguments),
            tuple(items),
            results,
            LoopFinder(self.tree, attributes, "", self.seeds).find(items, results),
            autocast=self.graph.autocast,
        )
        writer = FunctionWriter(
            self.graph,
            function,
            access,
            Calls(self.tree, attributes, "", self.chains),
            self.seeds,
            self.boundary,
        )
        lines = whole(writer.lines())
        names_ = (*writer.argument_names, *(("key",) if self.unit.seeds else ()))
        init = tuple(line.text for line in whole(Line(text) for text in attributes.lines()))
        if "" not in self.graph.leaves:
            return Class("Stage", "", (), init, names_, lines, attributes.own_class)
        base = own_name(self.graph, self.graph.modules[""])
        given = plain(construct(base).text).removeprefix(base.cls)[1:-1]
        return Class("Stage", "", (), init, names_, lines, base.cls, given)

    def holdings(self, base: str, items: list[Item], names: list[str]) -> dict[str, Holding]:
        """What a class holds: the modules that it calls, and the state that none of them has."""
        if "" in self.graph.leaves:  # the stage is the model
            return {}
        prefix = f"{base}." if base else ""
        modules = dict.fromkeys(item.call.path for item in items if item.call)
        found = {
            path.removeprefix(prefix): Holding(path.removeprefix(prefix), self.make(path))
            for path in modules
        }
        for name in names:
            if any(name.startswith(f"{path}.") for path in modules):
                continue
            owner = self.leaf_around(name, base)
            relative = (owner or name).removeprefix(prefix)
            found.setdefault(
                relative,
                Holding(relative, self.make(owner)) if owner else self.tensor(name, relative),
            )
        covered = {path for path in found for other in found if path.startswith(f"{other}.")}
        order = {path: i for i, path in enumerate(self.model_order())}
        kept = [path for path in found if path not in covered]
        return {
            path: found[path]
            for path in sorted(kept, key=lambda path: order.get(prefix + path, len(order)))
        }

    def leaf_around(self, name: str, base: str) -> str | None:
        """The outermost of torch's own modules inside `base` around a parameter, if all that it
        would hold is here."""
        parts = name.split(".")
        start = len(base.split(".")) + 1 if base else 1
        paths = (".".join(parts[:i]) for i in range(start, len(parts)))
        leaf = next((path for path in paths if is_leaf(self.graph.modules.get(path))), None)
        here = {name for held in self.unit.state for name in (held.fqn, *held.aliases)}
        whole = {name for name in self.graph.canonical if name.startswith(f"{leaf}.")} <= here
        return leaf if whole else None

    def tensor(self, name: str, path: str) -> Holding:
        """A parameter or buffer of the class's own."""
        parameter = self.graph.parameters[self.graph.canonical[name]]
        empty = empty_tensor(parameter.meta, self.default_dtype)
        if parameter.buffer:
            return Holding(path, empty, buffer=True, persistent=parameter.persistent)
        return Holding(path, call("nn.Parameter", [empty.text]), parameter=True)

    def model_order(self) -> Iterator[str]:
        """Every path in the order in which the user's modules define them."""
        for path, module in self.graph.modules.items():
            yield path
            prefix = f"{path}." if path else ""
            yield from (prefix + name for name in (*module.parameters, *module.buffers))
