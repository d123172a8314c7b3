"""The text of a user's class with all that it reads, so that a script holds it without an import.

Taken are functions and classes of the user's, numbers and text as they are at capture, and imports
from torch and the standard library. The text is run by itself and compared with the class: what was
changed after its definition shows.
"""

import ast
import builtins
import importlib
import inspect
import linecache
import math
import symtable
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from .user import is_users

literals = (bool, int, float, complex, str, bytes, type(None))
own_file = "a file of its own beside the model's for it, which the scripts then import"
ignored = frozenset(
    ("__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__", "__annotations__",
     "__static_attributes__", "__annotate_func__", "__annotations_cache__", "_backward_cls")
)  # fmt: skip
"""What the place of a class makes, or torch."""


class NotCarriedError(Exception):
    """Why a script cannot hold a class, and what would help."""

    def __init__(self, reason: str, hint: str, *, module_helps: bool = True) -> None:
        super().__init__(reason)
        self.hint, self.module_helps = hint, module_helps


@dataclass
class Carrier:
    """Collects what a class needs, what is needed first."""

    parts: dict[str, str] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)

    def take(self, name: str, value: object, scope: Mapping[str, object]) -> None:
        """What a global name of `scope` means. Raises NotCarriedError."""
        if name in self.values:
            if self.values[name] is not value and self.values[name] != value:
                raise NotCarriedError(f"{name} means two things in its files", own_file)
            return
        self.values[name] = value
        if line := import_line(name, value, scope):
            self.imports[name] = line
        elif text := spell_literal(value):
            self.parts[name] = f"{name} = {text}"
        elif isinstance(value, type | FunctionType) and is_users(source_file(value)):
            self.definition(name, value)
        else:
            raise NotCarriedError(f"it reads {name}, {kind_of(value)}", own_file)

    def definition(self, name: str, value: type | FunctionType) -> None:
        """A function or class: what its text reads, then the text."""
        refuse_closure(value)
        text, scope = source(value), globals_of(value)
        if ast.parse(text).body[0].name != name:  # type: ignore[attr-defined]  # a def or class
            raise NotCarriedError(f"it reads {name}, another name of {value.__name__}", own_file)
        for other in sorted(global_names(text) - {name}):
            if other in scope:
                self.take(other, scope[other], scope)
            elif not hasattr(builtins, other):
                raise NotCarriedError(f"it reads {other}, which its file does not have", own_file)
        self.parts[name] = text

    def prove(self) -> None:
        """Raises NotCarriedError where the text, run by itself, makes something else."""
        made: dict[str, object] = {"__name__": "carried"}
        exec("\n".join([*self.imports.values(), *self.parts.values()]), made)  # noqa: S102  # the user's own text
        for name, value in self.values.items():
            for changed in differing(value, made[name]):
                label = f"{name}.{changed}" if changed else name
                raise NotCarriedError(
                    f"{label} is not what its source says",
                    "hand what is chosen later over as an argument of apply",
                    module_helps=False,
                )


def kind_of(value: object) -> str:
    """A value, for people."""
    if isinstance(value, ModuleType):
        return f"the module {value.__name__}"
    name = "tensor" if isinstance(value, torch.Tensor) else type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def import_line(name: str, value: object, scope: Mapping[str, object]) -> str:
    """How to import what a name means from torch or the standard library; "" where that is not
    where it comes from."""
    if isinstance(value, ModuleType):
        if not is_torch_or_standard(value.__name__):
            return ""
        return f"import {value.__name__}" + f" as {name}" * (value.__name__ != name)
    for node in ast.walk(parse(str(scope.get("__file__", "")))):
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        for alias in node.names if is_torch_or_standard(node.module) else ():
            module = importlib.import_module(node.module)
            if (alias.asname or alias.name) == name and getattr(module, alias.name, None) is value:
                known = f" as {alias.asname}" if alias.asname else ""
                return f"from {node.module} import {alias.name}{known}"
    return ""


def is_torch_or_standard(module: str) -> bool:
    root = module.partition(".")[0]
    return root == "torch" or root in sys.stdlib_module_names


def spell_literal(value: object) -> str:
    """A number, text, dtype or a nest of them, as Python; "" for anything else."""
    if isinstance(value, torch.dtype):
        return str(value)
    if type(value) is float and not math.isfinite(value):
        return f'float("{value}")'
    if type(value) in literals:
        return repr(value)
    if type(value) not in (tuple, list, dict, set, frozenset):
        return ""
    try:
        return repr(value) if ast.literal_eval(repr(value)) == value else ""
    except (ValueError, SyntaxError):
        return ""


def functions_of(cls: type) -> Iterator[tuple[str, FunctionType]]:
    """(name, function) of a class's own methods, without what decorators put around them."""
    for name, value in vars(cls).items():
        inner = getattr(value, "__func__", value)
        if callable(inner) and isinstance(found := inspect.unwrap(inner), FunctionType):
            yield name, found


def refuse_closure(value: type | FunctionType) -> None:
    """Raises NotCarriedError where a function around it gives it values."""
    functions = [f for _, f in functions_of(value)] if isinstance(value, type) else [
        inspect.unwrap(value)
    ]  # fmt: skip
    names = {name for f in functions for name in f.__code__.co_freevars} - {"__class__"}
    if names:
        raise NotCarriedError(
            f"{value.__name__} reads {', '.join(sorted(names))} of the function around it",
            f"{value.__name__} at the top level of its file, {', '.join(sorted(names))} as "
            f"argument{'s' * (len(names) > 1)} of apply",
            module_helps=False,
        )


def source_file(value: type | FunctionType) -> str:
    """The file of a function or class: also where its module has been imported anew since."""
    if isinstance(value, FunctionType):
        return str(inspect.unwrap(value).__code__.co_filename)
    inner = (f.__code__.co_filename for _, f in functions_of(value))
    return next(inner, str(getattr(sys.modules.get(value.__module__), "__file__", "")))


def globals_of(value: type | FunctionType) -> Mapping[str, object]:
    """The names that a function or class finds in its file."""
    if isinstance(value, FunctionType):
        found: FunctionType = inspect.unwrap(value)
        return found.__globals__
    inner = (f.__globals__ for _, f in functions_of(value))
    return next(inner, vars(sys.modules[value.__module__]))


def parse(file: str) -> ast.Module:
    return ast.parse("".join(linecache.getlines(file)))


def find_node(value: type | FunctionType) -> ast.ClassDef | ast.FunctionDef:
    """Where a function or class is defined in its file. Raises NotCarriedError."""
    if isinstance(value, FunctionType):
        kind: type[ast.AST] = ast.FunctionDef
        lines = {inspect.unwrap(value).__code__.co_firstlineno}
    else:
        kind = ast.ClassDef
        lines = {f.__code__.co_firstlineno for _, f in functions_of(value)}
    found: list[tuple[int, Any]] = []
    for node in ast.walk(parse(source_file(value))):
        if isinstance(node, kind) and getattr(node, "name", "") == value.__name__:
            span = range(first_line(node), (getattr(node, "end_lineno", None) or 0) + 1)
            found.append((sum(line in span for line in lines), node))
    most, best = max(found, key=lambda pair: pair[0], default=(0, None))
    if best is None or (lines and not most):
        raise NotCarriedError(f"the source of {value.__name__} is not found", own_file)
    return best  # type: ignore[no-any-return]


def first_line(node: ast.AST) -> int:
    """Of a definition, its decorators included."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min(int(part.lineno) for part in (node, *decorators))  # type: ignore[attr-defined]


def source(value: type | FunctionType) -> str:
    """The text of a function or class as the user wrote it."""
    node = find_node(value)
    lines = linecache.getlines(source_file(value))[first_line(node) - 1 : node.end_lineno]
    return textwrap.dedent("".join(lines)).rstrip()


def defined_at(value: type) -> str:
    """`/folder/net.py:7`; "" where that is not known."""
    try:
        return f"{source_file(value)}:{find_node(value).lineno}"
    except NotCarriedError:
        return ""


def global_names(text: str) -> set[str]:
    """The names that a definition's text reads and does not define. Raises NotCarriedError where it
    writes such a name."""
    found = set()
    tables = [symtable.symtable(text, "carried", "exec")]
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            name, top = symbol.get_name(), table.get_type() == "module"
            if symbol.is_declared_global() and symbol.is_assigned():
                raise NotCarriedError(
                    f"it changes the global {name}", "ctx, which keeps values", module_helps=False
                )
            if symbol.is_referenced() and (symbol.is_global() or top):
                found.add(name)
    return found


def differing(value: object, made: object) -> Iterator[str]:
    """What of a function ("") or class (the attribute's name) another one has otherwise."""
    if isinstance(value, FunctionType) and isinstance(made, FunctionType):
        if not same_code(inspect.unwrap(value).__code__, inspect.unwrap(made).__code__):
            yield ""
    elif isinstance(value, type) and isinstance(made, type) and value is not made:
        mine, theirs = dict(functions_of(value)), dict(functions_of(made))
        for name in sorted((vars(value).keys() | vars(made).keys()) - ignored):
            one, other = vars(value).get(name), vars(made).get(name)
            if name in mine and name in theirs:
                if not same_code(mine[name].__code__, theirs[name].__code__):
                    yield name
            elif spell_literal(one) != spell_literal(other) or type(one) is not type(other):
                yield name


def same_code(one: CodeType, other: CodeType) -> bool:
    """Whether two functions do the same, wherever they stand."""
    parts = zip(one.co_consts, other.co_consts, strict=False)
    return (one.co_code, one.co_names, len(one.co_consts)) == (
        other.co_code, other.co_names, len(other.co_consts),
    ) and all(
        same_code(a, b)
        if isinstance(a, CodeType) and isinstance(b, CodeType)
        else repr(a) == repr(b)
        for a, b in parts
    )  # fmt: skip


def beside(cls: type, folder: Path) -> str:
    """The module beside the model's that a class can be imported from; "" where there is none."""
    module = cls.__module__
    top = cls.__qualname__ == cls.__name__
    is_there = Path(source_file(cls)) == folder.resolve() / f"{module}.py"
    return module if top and is_there else ""
