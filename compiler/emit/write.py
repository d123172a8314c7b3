"""Files -> disk: all of them or none, and never over what ppc did not write."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..errors import OutputError
from ..ir.report import File

run_outputs = ("metrics.jsonl", "weights-rank")
"""What the scripts themselves write beside them."""
earlier = "earlier"
"""Where the outputs of runs of other compilations are kept, by the compilation's name."""


def write(files: Sequence[File], folder: Path) -> Path | None:
    """Write a compilation to a folder; where what runs of another one left there went, if any did.

    The files are written beside the folder first and moved into place together; an older
    compilation there is replaced; files that no compilation wrote, or that somebody has changed
    since, are a reason to refuse. Raises OutputError.
    """
    folder = folder.resolve() if folder.is_dir() else folder
    refuse_foreign(folder, files)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            fill(files, work / "new")
            return swap(folder, work)
        finally:
            if folder.exists() or not (work / "old").exists():
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error.strerror}") from error


def fill(files: Sequence[File], folder: Path) -> None:
    """Write every file into a new folder."""
    for file in files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.content)


def swap(folder: Path, work: Path) -> Path | None:
    """Put `work/new` in the place of an older folder, which goes to `work/old`."""
    new, old = work / "new", work / "old"
    if folder.exists():
        folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    return keep_outputs(old, folder) if old.exists() else None


def keep_outputs(old: Path, folder: Path) -> Path | None:
    """Move what runs wrote from an older folder into the new one: beside the scripts if they are
    the same, else where nobody takes it for theirs."""
    if (old / earlier).exists():
        (old / earlier).rename(folder / earlier)
    outputs = [path for path in old.iterdir() if path.name.startswith(run_outputs)]
    before = manifest(old).get("compilation")
    if not outputs or before == manifest(folder).get("compilation"):
        kept = folder
    else:
        kept = folder / earlier / str(before)
        kept.mkdir(parents=True, exist_ok=True)
    for path in outputs:
        path.replace(kept / path.name)
    return kept if kept != folder else None


def refuse_foreign(folder: Path, files: Sequence[File]) -> None:
    """Raises OutputError for a folder that is none, or that holds files or changes of others."""
    elsewhere = "give another folder: -o FOLDER"
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is no folder", hint=elsewhere)
    if strangers := sorted(foreign(folder)):
        message = f"{folder} holds files that ppc did not write: {some_of(strangers)}"
        raise OutputError(message, hint=elsewhere)
    if changed := sorted(edited(folder, files)):
        message = f"{folder} holds files that were changed since ppc wrote them: "
        hint = f"{elsewhere}; or move or delete them first"
        raise OutputError(f"{message}{some_of(changed)}", hint=hint)


def some_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def foreign(folder: Path) -> Iterator[str]:
    """Names in a folder that neither a compilation nor a run of its scripts wrote."""
    if not folder.exists():
        return
    ours = {"manifest.json", *files} if (files := written(folder)) else set()
    for path in folder.rglob("*"):
        place = path.relative_to(folder)
        by_run = place.name.startswith(run_outputs) and len(place.parts) == 1
        kept = by_run or place.parts[0] == earlier or "__pycache__" in place.parts
        if not path.is_dir() and not kept and place.as_posix() not in ours:
            yield place.as_posix()


def edited(folder: Path, files: Sequence[File]) -> Iterator[str]:
    """Files that a compilation wrote, and that are neither as it did nor as they will be now."""
    new = {file.path: file.sha256 for file in files}
    for name, digest in written(folder).items():
        path = folder / name
        if digest and path.is_file():
            found = hashlib.sha256(path.read_bytes()).hexdigest()
            if found not in (digest, new.get(name)):
                yield name


def written(folder: Path) -> Mapping[str, str]:
    """The files of the compilation in a folder -> their sha256, by its manifest; "" where that is
    of a version of ppc that did not note it."""
    files = manifest(folder).get("files")
    if isinstance(files, list):
        return dict.fromkeys(files, "")
    return files if isinstance(files, dict) else {}


def manifest(folder: Path) -> Mapping[str, object]:
    """What a folder's manifest says; nothing where it has none."""
    try:
        found = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
