"""The user's own code: found, imported and called, its errors traced to its own lines."""

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType

import torch

from ...errors import CaptureError, Location, PpcError
from ...ir.spec import Factory, Spec, Value
from .private import watch_functions
from .registered import is_current, note_registering, refuse_registering
from .remedies import other_ways

own_folder = str(Path(__file__).parents[2])
library_folders = (
    *(
        str(Path(spec.origin).parent)
        for name in ("torch", "ppc")
        if (spec := importlib.util.find_spec(name)) and spec.origin
    ),
    own_folder,
    str(Path(traceback.__file__).parent),
)


def resolve(target: str, folder: Path, where: Location | None) -> object:
    """What `file.py:name` (beside the spec) or `package.module:name` names.

    A file is imported afresh each time, so that an edit between two compilations counts.
    """
    place, _, name = target.partition(":")
    watch_functions()
    with users_errors(where, f"cannot import {target}"), beside(target, folder):
        module = (
            import_file(folder / place) if place.endswith(".py") else importlib.import_module(place)
        )
    found: object = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise CaptureError(
                f"{place} has no {name!r}", where, f"it has {', '.join(public(module))}"
            )
        found = getattr(found, part)
    return found


def public(module: ModuleType) -> list[str]:
    """Names that the module itself defines, for a hint."""
    own = (n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__)
    return [name for name in own if not name.startswith("_")] or ["no function or class of its own"]


def import_file(path: Path) -> ModuleType:
    """Import a file under a name of its own."""
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    name = f"{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    imported[name] = path.name
    spec.loader.exec_module(module)
    refuse_registering(name, path)
    return module


imported: dict[str, str] = {}
"""Name under which a file was imported -> the file's."""
found_beside: set[str] = set()
"""Modules that users' files imported from their own folders."""


@contextmanager
def beside(target: str, folder: Path) -> Iterator[None]:
    """What the file in `target` imports is looked for in its folder first, and afresh, like itself:
    other jobs have other modules of the same name. What registers operations with torch stays while
    its file is as it was."""
    place = target.partition(":")[0]
    base = str((folder / place).resolve().parent)
    if not place.endswith(".py") or base in sys.path:  # the latter within a call
        yield
        return
    old = {name for name in found_beside if not is_current(name, base)}
    for name in old:
        sys.modules.pop(name, None)
    found_beside.difference_update(old)
    known, here = set(sys.modules), Path.cwd()
    importlib.invalidate_caches()
    sys.path.insert(0, base)
    try:
        yield
    finally:
        os.chdir(here)  # the spec's and the output's paths are seen from there
        sys.path.remove(base)
        new = {name for name in set(sys.modules) - known if name.partition(".")[0] not in known}
        own = [name for name in new if is_within(sys.modules[name], base)]
        found_beside.update(own)
        for name in own:
            note_registering(name)


def is_within(module: ModuleType, folder: str) -> bool:
    """Whether a module's file lies in a folder, and not in an environment there."""
    file = getattr(module, "__file__", None) or ""
    return file.startswith(f"{folder}/") and "site-packages" not in file


def call(factory: Factory, folder: Path, where: Location | None) -> object:
    """Call a factory with its arguments; those that are factories themselves are called first."""
    with beside(factory.target, folder):
        function = resolve(factory.target, folder, where)
        if not callable(function):
            hint = "a function or a class, which is called with the spec's arguments"
            raise CaptureError(f"{factory.target} is not callable", where, hint)
        arguments = {name: argument(value, folder, where) for name, value in factory.args.items()}
        hint = "the spec's args are its keyword arguments"
        with users_errors(where, f"{factory.target} failed", hint):
            return function(**arguments)


def model_folder(spec: Spec) -> Path:
    """Where the file of the model's factory lies."""
    return (spec.folder / spec.model.factory.target.partition(":")[0]).parent


def argument(value: Value, folder: Path, where: Location | None) -> object:
    """A value of the spec as Python passes it."""
    if isinstance(value, Factory):
        return call(value, folder, where)
    if isinstance(value, tuple | list):
        return [argument(item, folder, where) for item in value]
    if isinstance(value, dict):
        return {key: argument(item, folder, where) for key, item in value.items()}
    return value


@contextmanager
def users_errors(where: Location | None, what: str, hint: str | None = None) -> Iterator[None]:
    """Turn any exception into a CaptureError at the user's own line, or at `where` without one,
    with the hint if no better one is known."""
    try:
        yield
    except PpcError:
        raise
    except (Exception, SystemExit) as error:
        place = users_line(error)
        text = f"{what}: {type(error).__name__}: {first_line(error)}"
        remedy = known_remedy(error) or (None if place else hint)
        raise CaptureError(text, place or where, remedy) from error


def known_remedy(error: BaseException) -> str | None:
    """What to write instead, for errors of torch that come from how ppc runs a model."""
    text = str(error)
    if isinstance(error, SystemExit):
        return 'what only a program of its own does goes below `if __name__ == "__main__":`'
    if "attempted relative import" in text:
        return (
            "leave out the dot if the module lies beside this file; or install the package, and "
            "name package.module:name in the spec"
        )
    if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
        return f"install {error.name} where ppc is, or put {error.name}.py beside this file"
    if "more than 1 value per channel" in text:
        return "more samples in a microbatch: fewer parallel.microbatches, data: {last_batch: drop}"
    if "FlexAttention does not support" in text:
        return other_ways["flex_attention"]
    if "index out of range in self" in text:
        return "an embedding with more rows, or smaller numbers in the data"
    if "from fake tensor input" in text:
        return "hold a tensor that forward writes in a module: self.register_buffer(...)"
    if re.search(r"not (compiled|linked) with .*cuda", text, re.IGNORECASE):
        return "the device of a tensor that is there, x.device: the scripts choose theirs"
    if ".numpy() is not supported" in text:
        return "torch's own operations in place of numpy's"
    if "Inference tensors cannot be saved" in text:
        return "torch.no_grad() in place of torch.inference_mode()"
    if "no fake impl registered" in text:
        return "its register_fake, which tells the shape of the result without computing it"
    wide = any(name in text for name in ("Double", "complex128", "complex<double>"))
    if wide and "inplace" not in text and torch.get_default_dtype() is torch.float64:
        return (
            "precision fp64 made parameters and data float64: let forward take a dtype from them, "
            "h.to(x.dtype), where it names one"
        )
    return None


def first_line(error: BaseException) -> str:
    """The first line of an error's text, which may run to pages."""
    return named_by_file((str(error).strip().splitlines() or [""])[0])


def named_by_file(text: str) -> str:
    """The text with the user's files in place of the names that they were imported under."""
    return re.sub(r"\b\w+_[0-9a-f]{8}\b", lambda name: imported.get(name[0], name[0]), text)


def users_line(error: BaseException) -> Location | None:
    """The innermost line of the traceback outside torch, the standard library and ppc."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.lineno and is_users(frame.filename):
            return place(frame.filename, frame.lineno)
    return None


def location(where: str, folder: Path | None = None) -> Location | None:
    """The place that an op bears, `gpt.py:58`, relative to the spec's folder if one is given."""
    file, _, line = where.rpartition(":")
    if folder and (folder / file).is_file():
        file = str((folder / file).resolve())
    return place(file, int(line)) if line else None


def place(file: str, line: int) -> Location:
    """A line of the user's, its file as seen from the working directory."""
    path = Path(file)
    here = Path.cwd()
    return Location(str(path.relative_to(here)) if path.is_relative_to(here) else file, line)


def is_users(filename: str) -> bool:
    """Whether a file is neither torch's, nor ppc's, nor the standard library's own."""
    if filename.startswith("<"):
        return False
    if "site-packages" in filename:
        return not filename.startswith(library_folders[:-1])
    return not filename.startswith(library_folders)


def running_lines() -> list[tuple[CodeType, int]]:
    """The user's code that is running now, and its lines, innermost first: what ppc runs, not what
    runs ppc."""
    stack = traceback.walk_stack(inspect.currentframe())
    lines = [(frame.f_code, line) for frame, line in stack]
    own = [at for at, (code, _) in enumerate(lines) if code.co_filename.startswith(own_folder)]
    return [found for found in lines[: own[-1]] if is_users(found[0].co_filename)]


def call_site() -> Location | None:
    """The user's line that is running now."""
    return next((place(code.co_filename, line) for code, line in running_lines()), None)
