"""Whether scripts are still those of their spec and of the user's files, before anything runs."""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import Complaints, Location, RunError
from ..frontend.sources import digest

rewrite = "put back the one that ppc compile wrote; or delete {0} and run ppc compile SPEC -o {0}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a folder was compiled from."""

    spec: str
    """sha256 of the spec."""
    sources: Mapping[str, str]
    """File of the user's, relative to the spec -> its sha256."""
    files: tuple[str, ...]
    """What ppc wrote; somebody may have edited it, to see whether that is still right."""


def spec_of(folder: Path) -> Path:
    """The spec that a folder of scripts was compiled from, by its manifest.

    It names the path from where the compiler ran: that is here, or some folder above the scripts.
    Raises RunError, or Complaints of several, where the spec or a file of the user's has changed.
    """
    manifest, name = read_manifest(folder)
    paths = [name, *(base / name for base in folder.absolute().parents)]
    paths = [path for path in paths if path.is_file()]
    if not paths:
        message = f"{folder} was compiled from {name}, which is not there"
        hint = f"run ppc verify in the folder that holds {name}, or ppc compile SPEC -o {folder}"
        raise RunError(message, hint=hint)
    path = next((path for path in paths if digest(path) == manifest.spec), paths[0])
    complaints = list(changes(folder, manifest, path))
    if len(complaints) > 1:
        raise Complaints(complaints)
    if complaints:
        raise complaints[0]
    return path


def read_manifest(folder: Path) -> tuple[Manifest, Path]:
    """The manifest, and the path of the spec in it."""
    path = folder / "manifest.json"
    if not path.exists():
        scripts = (folder / "run.py").exists()
        hint = (
            rewrite.format(folder) if scripts else "ppc compile SPEC writes a folder that has one"
        )
        raise RunError(f"{folder} has no manifest.json that names its spec", hint=hint)
    try:
        manifest = json.loads(path.read_text())
        sources = {str(Path(name)): str(before) for name, before in manifest["sources"].items()}
        found = Manifest(str(manifest["spec_sha256"]), sources, tuple(manifest["files"]))
        return found, Path(manifest["spec"])
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}", hint="let it be read") from error
    except json.JSONDecodeError as error:
        where = Location(str(path), error.lineno, error.colno)
        raise RunError(f"is not JSON: {error.msg}", where, rewrite.format(folder)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{path} does not say what {folder} was compiled from"
        raise RunError(message, hint=rewrite.format(folder)) from error


def changes(folder: Path, manifest: Manifest, spec: Path) -> Iterator[RunError]:
    """A complaint about each file that is no longer what the folder was compiled from."""
    again = shlex.join(["ppc", "compile", str(spec), "-o", str(folder)])
    for script in (folder / name for name in manifest.files):
        if not script.exists():
            yield RunError(f"{script} is gone, which ppc compile wrote", hint=again)
    files = {spec: manifest.spec}
    files |= {spec.parent / name: before for name, before in manifest.sources.items()}
    for path, before in files.items():
        now, hint = digest(path), again
        if now == before:
            continue
        what = f"has changed since {folder} was compiled from it: sha256 {before[:12]} then, "
        what += f"{now[:12]} now"
        if not now:
            what = f"is gone, from which {folder} was compiled"
            hint = f"put it back; or, where {spec.name} and its files can do without: {hint}"
        yield RunError(f"{path} {what}", hint=hint)
