"""Whether scripts are still those of their spec and of the user's files, before anything runs."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import Complaints, RunError
from ..frontend.sources import digest


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
        raise RunError(message, hint="run ppc verify in the folder that ppc compile ran in")
    path = next((path for path in paths if digest(path) == manifest["spec_sha256"]), paths[0])
    complaints = list(changes(folder, manifest, path))
    if len(complaints) > 1:
        raise Complaints(complaints)
    if complaints:
        raise complaints[0]
    return path


def read_manifest(folder: Path) -> tuple[Mapping[str, Any], Path]:
    """The manifest, and the path of the spec in it."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        dict(manifest["sources"], spec=manifest["spec_sha256"])
        return manifest, Path(manifest["spec"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "ppc compile SPEC writes a folder that has one"
        raise RunError(f"{folder} has no manifest.json that names its spec", hint=hint) from error


def changes(folder: Path, manifest: Mapping[str, Any], spec: Path) -> Iterator[RunError]:
    """A complaint about each file that is no longer what the folder was compiled from."""
    files = {spec: manifest["spec_sha256"]}
    files |= {spec.parent / name: before for name, before in manifest["sources"].items()}
    for path, before in files.items():
        now = digest(path)
        if now == before:
            continue
        what = f"has changed since {folder} was compiled from it: sha256 {before[:12]} then, "
        what += f"{now[:12]} now"
        if not now:
            what = f"is gone, from which {folder} was compiled"
        yield RunError(f"{path} {what}", hint=f"ppc compile {spec} -o {folder}")
