"""Files -> disk: all of them or none, and never over files that ppc did not write."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..errors import OutputError
from ..ir.report import File

run_outputs = ("metrics.jsonl", "weights-rank")
"""What the scripts themselves write beside them."""


def write(files: Sequence[File], folder: Path) -> None:
    """Write a compilation to a folder.

    The files are written beside the folder first and moved into place together; an older
    compilation there is replaced, files that no compilation wrote are a reason to refuse. Raises
    OutputError.
    """
    strangers = foreign(folder)
    if strangers:
        listed = ", ".join(strangers[:3]) + (
            f" and {len(strangers) - 3} more" if len(strangers) > 3 else ""
        )
        raise OutputError(
            f"{folder} holds files that ppc did not write: {listed}",
            hint="give another folder: -o FOLDER",
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            fill(files, fresh)
            replace(folder, fresh)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
    except OSError as error:
        raise OutputError(
            f"{error.filename or folder} cannot be written: {error.strerror}"
        ) from error


def fill(files: Sequence[File], folder: Path) -> None:
    """Write every file into a new folder."""
    folder.chmod(0o755)
    for file in files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.text if isinstance(file.text, bytes) else file.text.encode())


def replace(folder: Path, fresh: Path) -> None:
    """Put a finished folder in the place of an older one, keeping what its runs wrote."""
    if not folder.exists():
        fresh.rename(folder)
        return
    for path in folder.iterdir():
        if path.name.startswith(run_outputs):
            shutil.move(path, fresh / path.name)
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
    folder.rename(old / folder.name)
    fresh.rename(folder)
    shutil.rmtree(old)


def foreign(folder: Path) -> list[str]:
    """Names in a folder that neither a compilation nor a run of its scripts wrote."""
    if not folder.exists():
        return []
    if not folder.is_dir():
        return [folder.name]
    try:
        known = set(json.loads((folder / "manifest.json").read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        known = set()
    found = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return sorted(
        name for name in found
        if name not in known and not name.startswith(run_outputs) and "__pycache__" not in name
    )  # fmt: skip
