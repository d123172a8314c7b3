"""What a compilation comes from: the spec, the user's files, the versions of what these import.

Files are read, never run. What a file imports by a name that it computes is not seen.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..ir.spec import Spec
from .callables import named_callables
from .files import is_file
from .sources import digest


@dataclass(frozen=True, slots=True)
class Origin:
    """Found before the model is captured: who edits a file meanwhile has a stale compilation."""

    spec: str
    """sha256 of the spec."""
    sources: Mapping[str, str]
    """File of the user's, as the spec would name it -> its sha256."""
    versions: Mapping[str, str]
    """Package that these files import -> its version, without a build's own part (+cpu)."""


def find_origin(spec: Spec) -> Origin:
    """Look at the files that the spec's callables name, and at those which these import."""
    sources: dict[str, str] = {}
    packages = {"torch"}
    for _, target in named_callables(spec):
        place = target.rpartition(":")[0]
        if not place.endswith(".py"):
            packages.add(place.partition(".")[0])
            continue
        base = (spec.folder / place).parent
        for file in with_own_imports(spec.folder / place):
            name = Path(place).parent / file.relative_to(base)
            sources[name.as_posix()] = digest(file)
            packages |= {dotted[0] for dotted in imported(file, base)}
    return Origin(digest(spec.path), dict(sorted(sources.items())), installed(packages))


def with_own_imports(first: Path) -> list[Path]:
    """A file, and those of its folder and of packages there that it imports, directly or not."""
    base = first.parent
    found = [first]
    for file in found:
        for dotted in imported(file, base):
            found += [path for path in modules(base, dotted) if path not in found]
    return found


def imported(file: Path, base: Path) -> Iterator[tuple[str, ...]]:
    """What a file imports: the parts of dotted names, as seen from `base`. `from a import b` may
    mean a module a.b."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # who runs it says more
    package = file.relative_to(base).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: max(0, len(package) - node.level + 1)] if node.level else ()
            start = (*above, *(node.module or "").split(".")) if node.module else above
            yield from ((*start, alias.name) for alias in node.names)


def modules(base: Path, dotted: tuple[str, ...]) -> Iterator[Path]:
    """The files under `base` that an import of a dotted name runs."""
    for end in range(1, len(dotted) + 1):
        place = base.joinpath(*dotted[:end])
        for path in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if is_file(path):
                yield path


def installed(packages: set[str]) -> dict[str, str]:
    """The versions of those that are installed under the name that they are imported by."""
    found = {}
    for name in sorted(packages - sys.stdlib_module_names):
        with suppress(PackageNotFoundError, ValueError):
            found[name] = version(name).partition("+")[0]
    return found
