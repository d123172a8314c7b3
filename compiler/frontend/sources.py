"""Where a compilation's inputs lie, and how its output will find them. Nothing here runs them."""

import ast
import glob
import hashlib
import keyword
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import SpecError
from ..ir.spec import Arrays, Dataset, Spec, Text, Tokens
from .files import is_file


def source_name(spec: Spec) -> str:
    """The spec's path for people: relative to the working directory if it is inside."""
    path = spec.path.resolve()
    here = Path.cwd().resolve()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else path.name


def digest(path: Path) -> str:
    """sha256 of a file; "" for what is none (an installed module)."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if is_file(path) else ""


def data_paths(spec: Spec, folder: Path) -> tuple[str, ...]:
    """The data's files as scripts in `folder` find them: relative to it, or absolute as given."""
    data = spec.data
    if isinstance(data, Text | Tokens):
        pattern = isinstance(data, Text) or not data.one_file
        return tuple(relative(path, spec, folder, pattern=pattern) for path in data.files)
    if isinstance(data, Arrays):
        files = [data.files] if isinstance(data.files, str) else list(data.files.values())
        return tuple(relative(path, spec, folder) for path in files)
    if isinstance(data, Dataset) and data.source.partition(":")[0].endswith(".py"):
        return (module_name(Path(data.source.partition(":")[0])) + ".py",)
    return ()


def relative(path: str, spec: Spec, folder: Path, *, pattern: bool = False) -> str:
    """A path from `folder`; of a pattern, what stands before it is meant letter for letter."""
    if path.startswith("{stdlib}") or Path(path).is_absolute():
        return path
    start, end = str(spec.folder.resolve()), str(folder.resolve())
    if pattern:
        start, end = glob.escape(start), glob.escape(end)
    return Path(os.path.relpath(Path(start) / path, end)).as_posix()


def copied_modules(spec: Spec, registering: Iterable[str] = ()) -> dict[str, str]:
    """The user's modules that the scripts import, which are copied beside them: name -> text.
    `registering`: those beside the model's that register operations.

    Raises SpecError where two that differ would have one name.
    """
    found: dict[str, str] = {}
    for place, field in imported_files(spec, registering):
        for name, text in with_imports(spec.folder / place).items():
            if is_script(own := name.removesuffix(".py")):
                message = f"{place} imports a module {own}, whose file would take a script's place"
                raise SpecError(message, spec.at(field), "give it another name")
            if found.setdefault(name, text) != text:
                message = f"two files bring a module {name}, {place} one of them"
                raise SpecError(message, spec.at(field), "give one of them another name")
    return found


def imported_files(spec: Spec, registering: Iterable[str] = ()) -> Iterator[tuple[str, str]]:
    """(path, the spec's key) of the users' files that scripts import."""
    if isinstance(spec.data, Dataset) and ".py:" in spec.data.source:
        yield spec.data.source.partition(":")[0], "data.source"
    if ".py:" in spec.model.weight.kind:
        yield spec.model.weight.kind.partition(":")[0], "model.weight"
    if ".py:" in spec.train.lr_schedule.name:
        yield spec.train.lr_schedule.name.partition(":")[0], "train.lr_schedule"
    if spec.train.after_step and ".py:" in spec.train.after_step:
        yield spec.train.after_step.partition(":")[0], "train.after_step"
    model = Path(spec.model.factory.target.partition(":")[0])
    for name in registering:
        yield str(model.with_name(f"{name}.py")), "model.factory"


def with_imports(path: Path) -> dict[str, str]:
    """A module and the modules beside it that it imports: name -> text."""
    texts = {module_name(path): path.read_text(encoding="utf-8")}
    queue = list(texts.values())
    while queue:
        for name in imports(queue.pop()):
            beside = path.with_name(f"{name}.py")
            if name not in texts and is_file(beside):
                texts[name] = beside.read_text(encoding="utf-8")
                queue.append(texts[name])
    return {f"{name}.py": text for name, text in texts.items()}


def script_module(target: str) -> str:
    """The module that a script imports for `file.py:name` or `package.module:name`."""
    place = target.partition(":")[0]
    return module_name(Path(place)) if place.endswith(".py") else place


def imports(text: str) -> list[str]:
    """The top-level names that a module imports."""
    names: dict[str, None] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= dict.fromkeys(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names[node.module.partition(".")[0]] = None
    return list(names)


def module_name(path: Path) -> str:
    """What scripts call a copied module: its own name, unless that is none or means another."""
    name = re.sub(r"\W", "_", path.stem)
    taken = name in (*sys.stdlib_module_names, "torch", "numpy") or is_script(name)
    own = name.isidentifier() and not keyword.iskeyword(name) and not taken
    return name if own else f"users_{name}"


def is_script(name: str) -> bool:
    """Whether a script that ppc writes has this name."""
    return name == "run" or re.match(r"rank\d", name) is not None
