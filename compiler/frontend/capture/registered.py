"""Operations of the user's own, made by torch.library.custom_op in a file beside the model: they
stay whole in the graph, and the scripts import a copy of the file.

Torch holds one operation of each name, in a private table. To import its file again replaces it,
and whoever holds the one before calls what is gone.
"""

import sys
from pathlib import Path

from ...errors import CaptureError, Location
from ...ir.graph import Graph, Op, Ref, State
from .private import OpOverload, OwnOperation, own_operations

texts: dict[str, bytes] = {}
"""What stood in the file of a module that registers operations, when it was imported."""


def registered_by(module: str) -> list[str]:
    """The operations, `bench::sleep`, that a module registered."""
    return [name for name, made in own_operations().items() if made.function.__module__ == module]


def find_operation(target: str) -> OwnOperation | None:
    """What torch.library.custom_op made of `bench.sleep.default`."""
    namespace, name, _ = target.split(".")
    return own_operations().get(f"{namespace}::{name}")


def module_file(module: str) -> Path:
    return Path(getattr(sys.modules.get(module), "__file__", None) or "")


def note_registering(module: str) -> None:
    """Remember the text of a module that registers operations."""
    if registered_by(module):
        texts[module] = module_file(module).read_bytes()


def is_current(module: str, folder: str) -> bool:
    """Whether a module of this folder registers operations, and its file is as it was imported."""
    file = module_file(module)
    inside = file.is_relative_to(folder) and file.is_file()
    return inside and texts.get(module) == file.read_bytes()


def refuse_registering(module: str, file: Path) -> None:
    """Raises CaptureError for the operation of a file that is imported again and again."""
    for name in registered_by(module):
        raise CaptureError(
            f"{file.name} registers the operation {name} beside other things",
            definition(own_operations()[name]),
            "a file of its own beside this one, which this one imports, and the scripts import too",
        )


def definition(made: OwnOperation) -> Location:
    """Where an operation's function stands."""
    code = made.function.__code__
    file, here = Path(code.co_filename), Path.cwd()
    shown = file.relative_to(here) if file.is_relative_to(here) else file
    return Location(str(shown), code.co_firstlineno)


def module_of(target: OpOverload, folder: Path, path: str, where: Location | None) -> str:
    """The module, its file in the folder, that registers an operation which is not torch's.

    Raises CaptureError for any other, and for an operation that writes its arguments.
    """
    made = find_operation(str(target))
    module = made.function.__module__ if made else ""
    if made is None or module_file(module) != folder.resolve() / f"{module}.py":
        raise CaptureError(
            f"{target} in {path} is an operation of {target.namespace}'s own, "
            "which a script would have to import",
            where,
            "choose an implementation made of torch's own operations, or register it by "
            "torch.library.custom_op in a file of its own beside the model's"
            + "; experts: experts_implementation='batched_mm' in the model's config"
            * ("grouped_mm" in str(target)),
        )
    if made.schema.is_mutable:
        raise CaptureError(
            f"{made.name} writes its arguments, which an operation of one's own may not yet",
            definition(made),
            "return what it computes, with mutates_args=()",
        )
    return module


def refuse_underivable(graph: Graph) -> None:
    """Raises CaptureError where a gradient would end at an operation that has no backward."""
    for op in graph.ops:
        made = find_operation(op.target)
        if made and not made.has_backward and op.grad and needs_gradient(op, graph):
            raise CaptureError(
                f"{made.name} has no backward, and what it reads needs a gradient",
                definition(made),
                f"{made.function.__name__}.register_autograd, or the call under torch.no_grad()",
            )


def needs_gradient(op: Op, graph: Graph) -> bool:
    """Whether a gradient should flow to an operand."""

    def needed(ref: Ref | State) -> bool:
        if isinstance(ref, Ref):
            return graph.values[ref.name].requires_grad
        return graph.parameters[graph.canonical[ref.fqn]].meta.requires_grad

    return any(map(needed, op.operands))
