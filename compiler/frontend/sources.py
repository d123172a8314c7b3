"""Where a compilation's inputs lie, and how its output will find them. Nothing here runs them."""

import hashlib
import os
from pathlib import Path

from ..ir.spec import Arrays, Dataset, Spec, Text


def source_name(spec: Spec) -> str:
    """The spec's path for people: relative to the working directory if it is inside."""
    path = spec.path.resolve()
    here = Path.cwd().resolve()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else path.name


def digest(path: Path) -> str:
    """sha256 of a file; "" for what is none (an installed module)."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def model_file(spec: Spec) -> Path:
    """The file that defines the model's factory, if it lies beside the spec."""
    return spec.folder / spec.model.factory.target.partition(":")[0]


def data_paths(spec: Spec, folder: Path) -> tuple[str, ...]:
    """The data's files as scripts in `folder` find them: relative to it, or absolute as given."""
    data = spec.data
    if isinstance(data, Text):
        return tuple(relative(path, spec, folder) for path in data.files)
    if isinstance(data, Arrays):
        files = [data.files] if isinstance(data.files, str) else list(data.files.values())
        return tuple(relative(path, spec, folder) for path in files)
    if isinstance(data, Dataset) and data.source.partition(":")[0].endswith(".py"):
        return (Path(data.source.partition(":")[0]).name,)
    return ()


def relative(path: str, spec: Spec, folder: Path) -> str:
    if path.startswith("{stdlib}") or Path(path).is_absolute():
        return path
    return Path(os.path.relpath(spec.folder.resolve() / path, folder.resolve())).as_posix()


def copied_modules(spec: Spec) -> dict[str, str]:
    """The user's modules that the scripts import, which are copied beside them: name -> text."""
    place = spec.data.source.partition(":")[0] if isinstance(spec.data, Dataset) else ""
    if not place.endswith(".py"):
        return {}
    path = spec.folder / place
    return {path.name: path.read_text(encoding="utf-8")}
