"""Classes of the user's own that a script imports: those of modules that are kept whole."""

from collections.abc import Iterator
from dataclasses import replace

from ..ir.graph import Constructor, Graph, Module
from ..ir.unit import Unit
from .scope import script


def name_class(cls: str) -> str:
    """What a script calls a class that it imports."""
    return f"{cls}_" if cls in script else cls


def imported(graph: Graph) -> frozenset[str]:
    """The names of all such classes."""
    return frozenset(name_class(graph.modules[path].cls) for path in graph.leaves)


def own_name(graph: Graph, module: Module) -> Constructor:
    """How to build one of torch's modules, or a leaf by its name in the script."""
    if module.constructor is None:
        raise ValueError(f"{module.path} has no constructor")
    if module.path not in graph.leaves:
        return module.constructor
    return replace(module.constructor, cls=name_class(module.cls))


def held_leaves(graph: Graph, unit: Unit) -> Iterator[str]:
    """Paths of the leaves that a stage holds."""
    names = [op.call[0] for op in unit.ops] + [held.fqn for held in unit.state]
    for path in graph.leaves:
        if any(f"{name}.".startswith(f"{path}.") for name in names):
            yield path


def import_lines(graph: Graph, unit: Unit) -> list[str]:
    """Imports of the leaves' classes."""
    found: dict[str, set[str]] = {}
    for path in held_leaves(graph, unit):
        cls = graph.modules[path].cls
        name = cls if name_class(cls) == cls else f"{cls} as {name_class(cls)}"
        found.setdefault(graph.leaves[path], set()).add(name)
    return [f"from {module} import {', '.join(sorted(found[module]))}" for module in sorted(found)]


def leaf_modules(graph: Graph, unit: Unit) -> set[str]:
    """The modules that these import from."""
    return {graph.leaves[path] for path in held_leaves(graph, unit)}
