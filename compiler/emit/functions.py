"""The user's autograd functions in a script: the text of their classes, or an import of it."""

from collections.abc import Iterable, Iterator, Mapping

from ..errors import CaptureError, Location
from ..ir.function import UsersFunction
from ..ir.graph import Graph
from ..ir.unit import Unit
from .layout import width
from .scope import script

usual = {name: f"import {name}" for name in script} | {
    "nn": "import torch.nn as nn",
    "F": "import torch.nn.functional as F",
    "dist": "import torch.distributed as dist",
    "Path": "from pathlib import Path",
}
"""How a script imports what it has anyway."""


def functions_of(graph: Graph, unit: Unit) -> list[UsersFunction]:
    """Those that a stage applies, in the order in which it does first."""
    targets = dict.fromkeys(op.target for op in unit.ops)
    return [graph.functions[target] for target in targets if target in graph.functions]


def function_names(graph: Graph, unit: Unit) -> set[str]:
    """What they and their parts are called: no class of a module can be called so."""
    functions = functions_of(graph, unit)
    return {name for function in functions for name in (function.name, *names_of(function))}


def names_of(function: UsersFunction) -> Iterator[str]:
    yield from (name for name, _ in (*function.imports, *function.parts))


def view_functions(graph: Graph, unit: Unit) -> dict[str, object]:
    """Their texts, each part once, and what they import.

    Raises CaptureError for a name that means something else in the script."""
    parts: dict[str, str] = {}
    imports: dict[str, str] = {}
    for function in functions_of(graph, unit):
        for found, named in ((parts, function.parts), (imports, function.imports)):
            for name, text in named:
                other = {**parts, **imports}.get(name, text)
                if other != text or (name in script and usual.get(name) != text):
                    raise taken(function, name)
                found[name] = text
        if function.module:
            line = f"from {function.module} import {function.name}"
            if imports.setdefault(function.name, line) != line or function.name in script:
                raise taken(function, function.name)
    where = {function.name: function.where for function in functions_of(graph, unit)}
    lines = [line for name, line in imports.items() if usual.get(name) != line]
    return {"functions": list(blocks(parts, where)), "function_modules": lines}


def taken(function: UsersFunction, name: str) -> CaptureError:
    file, _, line = function.where.rpartition(":")
    return CaptureError(
        f"{name} means something else in the script that {function.name} goes into",
        Location(file, int(line)),
        "give it another name",
    )


def blocks(parts: Mapping[str, str], where: Mapping[str, str]) -> Iterator[list[str]]:
    """Runs of lines with two empty ones between them: constants together, each definition alone."""
    constants = [text for text in parts.values() if not is_definition(text)]
    if constants:
        yield constants
    for name, text in parts.items():
        if is_definition(text):
            yield list(commented(text.splitlines(), where.get(name, "")))


def is_definition(text: str) -> bool:
    return text.startswith(("class ", "def ", "@"))


def commented(lines: Iterable[str], where: str) -> Iterator[str]:
    """The lines of a class, its place behind the first."""
    first, *rest = lines
    line = f"{first}  # {where}"
    fits = where and first.endswith(":") and "#" not in first and len(line) <= width
    yield line if fits else first
    yield from rest
