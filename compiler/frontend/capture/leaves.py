"""The modules that a spec keeps whole: which they are, and how a script builds each of them.

A script imports the class from a copy of the user's file and calls it with the arguments that the
factory gave it. That is rebuilt here and compared, never trusted.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from ...errors import CaptureError, Complaints, Location, PlanError, PpcError
from ...ir.graph import Arg, Constructor, Items, TorchConstant
from ...ir.spec import Spec
from ..sources import module_name
from .arguments import to_arg
from .build import Built
from .fresh import refuse_changed
from .leaf import constructor, describe
from .made import Given
from .private import is_counting_norm
from .user import first_line
from .whole import Leaf

alone = "scripts build a leaf by its constructor alone"
instance_norms = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
"""Their statistics are of one sample each."""


def find_leaves(spec: Spec, built: Built, folder: Path) -> dict[str, Leaf]:
    """The leaves by path. `folder`: the model's.

    Raises PpcError, or Complaints of several, for what names no module and for modules that no
    script can build.
    """
    found: dict[str, Leaf] = {}
    complaints: list[PpcError] = []
    places = dict(outermost(spec, built.model, complaints))
    for path, where in places.items():
        module = built.model.get_submodule(path)
        try:
            refuse_root(spec, path, where)
            refuse_norms(path, module, where)
            given = built.given.get(id(module))
            found[path] = make_leaf(path, module, given, folder, where)
        except PpcError as error:
            complaints.append(error)
    if len(complaints) > 1:
        raise Complaints(complaints)
    if complaints:
        raise complaints[0]
    refuse_unlike_files(found, places, folder)
    return found


def refuse_unlike_files(
    leaves: Mapping[str, Leaf], places: Mapping[str, Location | None], folder: Path
) -> None:
    """Raises CaptureError where a leaf reads what the factory changed in its file."""
    users = [leaf for leaf in leaves.values() if leaf.source]
    first = {type(leaf.module): leaf for leaf in reversed(users)}
    for cls, leaf in first.items():

        def build(again: ModuleType, source: str = leaf.source) -> None:
            """As a script does: what constructors do to their file is the same in each rank."""
            with torch.device("meta"):
                for other in users:
                    if other.source == source:
                        made = getattr(again, type(other.module).__name__)
                        made(*other.make.args, **other.make.keywords)

        refuse_changed(called(leaf.path), cls, leaf.source, folder, places[leaf.path], build)


def outermost(
    spec: Spec, model: nn.Module, complaints: list[PpcError]
) -> Iterator[tuple[str, Location | None]]:
    """Paths of the modules that the spec names, without those inside others, and where it does."""
    paths = {id(module): path for path, module in model.named_modules()}
    every = {path: paths[id(m)] for path, m in model.named_modules(remove_duplicate=False)}
    classes: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        classes.setdefault(type(module).__name__, []).append(path)
    named: dict[str, Location | None] = {}
    for number, name in enumerate(spec.model.leaf):
        where = spec.at(f"model.leaf[{number}]")
        meant = [every[name]] if name in every else classes.get(name, [])
        named |= dict.fromkeys(meant, where)
        if not meant:
            near = get_close_matches(name, [*filter(None, every), *classes], n=3, cutoff=0.5)
            hint = " or ".join(near) or f"one of {', '.join(list(filter(None, every))[:8])}"
            complaints.append(CaptureError(f"the model has no module {name}", where, hint))
    for path, place in named.items():
        if not any(path != other and f"{path}.".startswith(f"{other}.") for other in named):
            yield path, place


def called(path: str) -> str:
    """A leaf, for people."""
    return f"the leaf {path}" if path else "the leaf that is the model"


def refuse_root(spec: Spec, path: str, where: Location | None) -> None:
    """Raises PlanError for the whole model where it is to be cut."""
    if not path and spec.parallel.pipeline > 1:
        raise PlanError(
            f"the whole model is a leaf, and a leaf is never cut: {spec.parallel.pipeline} stages "
            "cannot share it",
            where,
            f"pipeline: 1, data: {spec.parallel.pipeline * spec.parallel.data}",
        )


def refuse_norms(path: str, module: nn.Module, where: Location | None) -> None:
    """Raises CaptureError for batch norms inside: nobody would see what they normalise by."""
    for name, inner in module.named_modules():
        counts = is_counting_norm(inner) and not isinstance(inner, instance_norms)
        if counts and (inner.training or inner.running_mean is None):
            raise CaptureError(
                f"{called(path)} has a batch norm, {name or path}: inside a leaf nobody sees how "
                "many samples it normalises, nor keeps it from counting them twice",
                where,
                "the batch norm in a module of its own outside, or nn.GroupNorm",
            )


def make_leaf(
    path: str, module: nn.Module, given: Given | None, folder: Path, where: Location | None
) -> Leaf:
    """Raises CaptureError where a script could not build an equal module."""
    cls = type(module)
    own = constructor(module)
    if own is not None:  # torch's, which knows no user's file
        arguments = [python(a) for a in own.args], {k: python(a) for k, a in own.kwargs}
        return Leaf(path, module, own, "", partial(cls, *arguments[0], **arguments[1]))
    source = source_of(path, cls, folder, where)
    written = spell(path, cls, given, where)
    args = tuple(python(a) for a in written.args)
    make = partial(cls, *args, **{name: python(a) for name, a in written.kwargs})
    try:
        with torch.device("meta"):
            again = make()
    except Exception as error:
        raise CaptureError(
            f"{called(path)} cannot be built without values, as {cls.__name__}(...): "
            f"{type(error).__name__}: {first_line(error)}",
            where,
            f"{alone}, on the meta device, and fill it afterwards",
        ) from error
    if difference := next(differences(module, again), ""):
        raise CaptureError(
            f"{called(path)} is not what {cls.__name__}(...) builds: {difference}",
            where,
            f"{alone}: do in __init__ what the factory does to it afterwards",
        )
    return Leaf(path, module, written, source, make)


def source_of(path: str, cls: type[nn.Module], folder: Path, where: Location | None) -> str:
    """The module beside the model's that defines a class; raises CaptureError for any other."""
    try:
        file = Path(inspect.getsourcefile(cls) or "")
    except (TypeError, OSError):
        file = Path()
    if file.resolve().parent != folder.resolve():
        raise CaptureError(
            f"the class of {called(path)}, {cls.__name__}, is not defined beside the model, "
            f"but in {cls.__module__}",
            where,
            "a class of your own, in a file beside the model's, that calls it or does as it does",
        )
    if "." in cls.__qualname__:
        message = f"the class of {called(path)}, {cls.__qualname__}, is defined inside another"
        raise CaptureError(message, where, "define it at the top of its file")
    if module_name(file) != file.stem:
        message = f"no script can import {file.name}, which defines {called(path)}"
        raise CaptureError(message, where, "give the file another name")
    return file.stem


def spell(
    path: str, cls: type[nn.Module], given: Given | None, where: Location | None
) -> Constructor:
    """The call of the constructor: what has no default by position, the rest where it differs."""
    if given is None or type(given.module) is not cls:
        raise CaptureError(
            f"{called(path)} was not built by its constructor (it may be a copy)",
            where,
            f"{alone}: build each with {cls.__name__}(...)",
        )
    if given.changed:
        raise CaptureError(
            f"{called(path)}: {cls.__name__}.__init__ changes {given.changed[0]} before it calls "
            "super().__init__()",
            where,
            "call super().__init__() first",
        )
    defaults = {n: p.default for n, p in inspect.signature(cls.__init__).parameters.items()}
    empty = inspect.Parameter.empty
    args, kwargs = [], []
    for name, value in given.arguments.items():
        try:
            arg, usual = to_arg(value, lambda _: None), defaults.get(name, empty)
            if (usual is empty and name in defaults) or given.star:
                args.append(arg)
            elif usual is empty or repr(value) != repr(usual):
                kwargs.append((name, arg))
        except TypeError as error:
            raise CaptureError(
                f"{cls.__name__} of {called(path)} is given {name}, a {type(value).__name__}, "
                "which no script can write",
                where,
                "give __init__ numbers, strings and lists of them; build the rest in it",
            ) from error
    args += [to_arg(value, lambda _: None) for value in given.star]
    return Constructor(cls.__name__, tuple(args), tuple(kwargs))


def python(argument: Arg) -> object:
    """A constructor's argument as a script has it."""
    if isinstance(argument, tuple):
        return tuple(map(python, argument))
    if isinstance(argument, Items):
        return {name: python(value) for name, value in argument.items}
    return getattr(torch, argument.name) if isinstance(argument, TorchConstant) else argument


def differences(module: nn.Module, again: nn.Module) -> Iterator[str]:
    """How a leaf differs from the one built anew."""
    mine, theirs = dict(module.named_modules()), dict(again.named_modules())
    for path in mine.keys() ^ theirs.keys():
        yield f"{path} is {'missing' if path in mine else 'there'}"
    for path, one in reversed(mine.items()):  # what a module is made of before the module
        other = theirs[path]
        if any(isinstance(value, torch.Tensor) for value in vars(one).values()):
            yield f"{path or 'it'} has a tensor that is neither a parameter nor a buffer"
        if type(one) is not type(other):
            yield f"{path or 'it'} is a {type(one).__name__}"
        elif bare(describe(one)) != bare(describe(other)):
            yield f"{path or 'it'} has other attributes or tensors"
    trained = {name: p.requires_grad for name, p in again.named_parameters()}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not trained[name]:
            yield f"{name} is trained"


def bare(described: tuple[object, ...]) -> str:
    """A description without addresses in memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(described))
