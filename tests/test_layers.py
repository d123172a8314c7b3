"""The rules of the code's shape: who may import whom, no cycles, sizes of files and functions."""

import ast
import graphlib
import sys
from pathlib import Path

import pytest

root = Path(__file__).parent.parent / "compiler"

# layer: (layers of ppc it may import, third-party packages). A longer name has a row of its own.
table = {
    "errors": ([], []),
    "version": ([], []),
    "signals": ([], []),
    "ir": (["errors"], []),
    "frontend": (["ir", "errors"], ["ruamel", "jsonschema"]),
    "frontend.capture": (
        ["frontend", "frontend.samples", "ir", "errors", "version"],
        ["torch", "numpy", "safetensors"],
    ),
    "frontend.samples": (
        ["frontend", "frontend.capture", "ir", "errors"],
        ["torch", "numpy", "safetensors"],
    ),
    "analysis": (["ir", "errors"], ["numpy", "scipy", "networkx"]),
    "passes": (["analysis", "ir", "errors"], ["numpy", "scipy", "networkx"]),
    "emit": (["ir", "errors"], ["jinja2"]),
    "check": (
        ["emit", "frontend", "frontend.capture", "frontend.samples", "ir", "errors"],
        ["torch", "safetensors"],
    ),
    "pipeline": (
        [
            "check", "emit", "passes", "analysis", "frontend", "frontend.capture", "ir", "errors",
            "version",
        ],
        [],
    ),
    "run": (
        [
            "pipeline", "check", "emit", "passes", "analysis", "frontend", "frontend.capture",
            "frontend.samples", "ir", "errors",
        ],
        ["torch", "numpy", "safetensors"],
    ),
    "cli": (
        ["", "run", "pipeline", "emit", "frontend", "ir", "errors", "version", "signals"],
        ["typer"],
    ),
    "": (["pipeline", "emit", "frontend", "errors", "version"], []),  # __init__.py: public names
    "__main__": (["cli"], []),
}  # fmt: skip

files = {}
for file in sorted(root.rglob("*.py")):
    parts = file.relative_to(root).with_suffix("").parts
    files[".".join(part for part in parts if part != "__init__")] = file


def layer(module: str) -> str:
    """The row of the table that a module belongs to."""
    parts = module.split(".")
    rows = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((row for row in rows if row in table), module)


def imports(module: str, source: str) -> tuple[set[str], set[str]]:
    """(modules of ppc, third-party packages) that a module imports, anywhere in its text."""
    package = module if files[module].name == "__init__.py" else module.rpartition(".")[0]
    own, others = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            others |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            others.add(node.module.partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".") if package else []
            base = parts[: len(parts) - node.level + 1] + (node.module or "").split(".")
            target = ".".join(part for part in base if part)
            for alias in node.names:
                inner = f"{target}.{alias.name}".lstrip(".")
                own.add(inner if inner in files else target)
    return own, others - set(sys.stdlib_module_names)


def faults(module: str, source: str) -> list[str]:
    """What the module imports although the table does not let it."""
    row = layer(module)
    layers, packages = table[row]
    own, others = imports(module, source)
    wrong = [m for m in own if layer(m) not in [*layers, row] or m not in files]
    if module.startswith("passes."):
        mine = module.split(".")[1]
        wrong += [m for m in own if m.startswith("passes.") and m.split(".")[1] != mine]
    return sorted(wrong) + sorted(others - set(packages))


@pytest.mark.parametrize("module", files)
def test_imports(module):
    assert faults(module, files[module].read_text()) == []


@pytest.mark.parametrize(
    ("module", "line", "found"),
    [
        ("ir.spec", "from ..analysis.cost import price", ["analysis.cost"]),
        ("ir.spec", "import numpy", ["numpy"]),
        ("frontend.load", "from torch import nn", ["torch"]),
        ("frontend.load", "def f():\n    import torch", ["torch"]),
        ("errors", "from . import cli", ["cli"]),
        ("errors", "import ppc.ir", ["ppc"]),
        ("passes.roll", "from .communicate import communicate", ["passes.communicate"]),
        ("passes.roll", "from ..ir.program import Loop", []),
    ],
)
def test_a_wrong_import_is_found(module, line, found):
    assert faults(module, line) == found


def test_no_cycles():
    graph = {name: imports(name, path.read_text())[0] - {name} for name, path in files.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


@pytest.mark.parametrize("module", files)
def test_no_private_name_crosses_files(module):
    for node in ast.walk(ast.parse(files[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            names = [alias.name for alias in node.names]
            private = [n for n in names if n.startswith("_") and not n.endswith("__")]
            assert private == [], f"line {node.lineno}"


@pytest.mark.parametrize("module", files)
def test_sizes(module):
    """At most 300 lines a file and 40 a function, without its decorators."""
    text = files[module].read_text()
    assert len(text.splitlines()) <= 300
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, functions):
            assert node.end_lineno - node.lineno < 40, f"{node.name}, line {node.lineno}"
