"""Files -> disk: all of them or none, and never over what ppc did not write."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from ..errors import OutputError
from ..ir.report import File

run_outputs = ("metrics.jsonl", "weights-rank")
"""What the scripts themselves write beside them."""
earlier = "earlier"
"""Where the outputs of runs of other compilations are kept, by the compilation's name."""
many = 100
"""Names that are looked for before it is told; there may be a whole disk of them."""
elsewhere = "give another folder: -o FOLDER"
or_move = f"{elsewhere}; or move or delete them first"


def write(files: Sequence[File], folder: Path) -> Path | None:
    """Write a compilation to a folder; where what runs of another one left there went, if any did.

    The files are written aside first and then moved into place; an older compilation there is
    replaced, and what is somebody's own stays. Where that stands in a script's place, or somebody
    has changed a script, nothing is written. Raises OutputError.
    """
    folder = folder.resolve() if folder.is_dir() else folder
    refuse_foreign(folder)
    refuse_loss(folder, files)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = folder if folder.exists() else folder.parent  # on the same disk either way
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=beside))
        try:
            fill(files, work / "new")
            kept = exchange(folder, work, files) if folder.exists() else None
            if not folder.exists():
                (work / "new").rename(folder)
            shutil.rmtree(work / "old", ignore_errors=True)
            return kept
        finally:
            if not (work / "old").exists():
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error.strerror}") from error


def fill(files: Sequence[File], folder: Path) -> None:
    """Write every file into a new folder."""
    for file in files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.content)


def exchange(folder: Path, work: Path, files: Sequence[File]) -> Path | None:
    """Move the files of `work/new` into a folder, and what an older compilation wrote there to
    `work/old`. Should a move fail, those before it are taken back."""
    outputs, kept = kept_outputs(folder, work / "new")
    ours = dict.fromkeys((*written(folder), "manifest.json"))
    moves = [(folder / name, work / "old" / name) for name in ours if is_file(folder / name)]
    if (folder / "__pycache__").is_dir():
        moves.append((folder / "__pycache__", work / "old" / "__pycache__"))
    moves += [(path, kept / path.name) for path in outputs if kept]
    moves += [(work / "new" / file.path, folder / file.path) for file in files]
    done: list[tuple[Path, Path]] = []
    try:
        for source, target in moves:
            target.parent.mkdir(parents=True, exist_ok=True)
            done.append((source, target))
            source.rename(target)
    except BaseException:
        for source, target in reversed(done):
            if not is_there(source):
                target.rename(source)
        shutil.rmtree(work / "old", ignore_errors=True)
        raise
    return kept


def kept_outputs(folder: Path, new: Path) -> tuple[list[Path], Path | None]:
    """What runs wrote in a folder, and where it is kept: None for beside the scripts, if they are
    the same, else where nobody takes it for that of the new ones."""
    outputs = [path for path in folder.iterdir() if path.name.startswith(run_outputs)]
    before = str(manifest(folder).get("compilation"))
    if not outputs or before == manifest(new).get("compilation"):
        return outputs, None
    return outputs, folder / earlier / (before if is_within(before) else "unknown")


def refuse_foreign(folder: Path) -> None:
    """Raises OutputError for a folder that is none, or that holds files and no compilation."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is no folder", hint=elsewhere)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        why = "may not be written" if there.is_dir() else "is no folder"
        raise OutputError(f"{folder} cannot be written: {there} {why}", hint=elsewhere)
    if not written(folder) and (strangers := sorted(islice(foreign(folder), many))):
        message = f"{folder} holds files that ppc did not write: {some_of(strangers)}"
        raise OutputError(message, hint=or_move)


def refuse_loss(folder: Path, files: Sequence[File]) -> None:
    """Raises OutputError where somebody's own files or changes are where these would go."""
    if taken := sorted(in_the_way(folder, files)):
        message = f"{folder} holds files of others where ppc writes its own: {some_of(taken)}"
        raise OutputError(message, hint=or_move)
    if changed := sorted(edited(folder, files)):
        message = f"{folder} holds files that were changed since ppc wrote them: "
        raise OutputError(f"{message}{some_of(changed)}", hint=or_move)


def some_of(names: Sequence[str]) -> str:
    more = f"{len(names) - 3}" if len(names) < many else "many"
    return ", ".join(names[:3]) + (f" and {more} more" if len(names) > 3 else "")


def foreign(folder: Path) -> Iterator[str]:
    """Names in a folder that no compilation wrote, but for those that runs of scripts write."""
    for path in folder.rglob("*"):
        place = path.relative_to(folder)
        by_run = place.name.startswith(run_outputs) and len(place.parts) == 1
        kept = by_run or place.parts[0] == earlier or "__pycache__" in place.parts
        if not path.is_dir() and not kept:
            yield place.as_posix()


def in_the_way(folder: Path, files: Sequence[File]) -> Iterator[str]:
    """What is not ppc's in a compilation's folder, where the new one has a file or a folder."""
    ours = {"manifest.json", *written(folder)}
    for place in (Path(file.path) for file in files):
        if is_there(folder / place) and not (place.as_posix() in ours and is_file(folder / place)):
            yield place.as_posix()
        yield from (above.as_posix() for above in place.parents if is_file(folder / above))


def is_there(path: Path) -> bool:
    """Whether a name is taken, by a link to nothing too."""
    return path.exists() or path.is_symlink()


def is_file(path: Path) -> bool:
    """Whether a name is taken by what is no folder."""
    return is_there(path) and not path.is_dir()


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
        files = dict.fromkeys(map(str, files), "")
    if not isinstance(files, dict):
        return {}
    return {name: str(digest) for name, digest in files.items() if is_within(name)}


def is_within(name: str) -> bool:
    """Whether a name cannot lead out of the folder, whoever wrote the manifest."""
    place = Path(name)
    return bool(place.parts) and not place.is_absolute() and ".." not in place.parts


def manifest(folder: Path) -> Mapping[str, object]:
    """What a folder's manifest says; nothing where it has none."""
    try:
        found = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
