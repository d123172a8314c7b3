"""The op of a user's autograd function, and what a script holds of its class."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from ...errors import CaptureError
from ...ir.function import UsersFunction, prefix
from ...ir.graph import Arg, Op, Ref
from .carried import Carrier, NotCarriedError, beside, defined_at
from .functions import Application, in_order
from .replay import classes
from .rewrite import substitute
from .user import location


def make_op(
    op: Op, call: Application, tensors: Sequence[Arg], folder: Path
) -> tuple[Op, UsersFunction]:
    """The traced op as one of the class's own, and what a script holds of that. `folder`: the
    model's. Raises CaptureError for a class that no script can hold."""
    function, target = find_function(call, op, folder)
    classes[target] = call.cls
    known = {str(i): tensor for i, tensor in enumerate(tensors)}
    values = [op.outputs[int(r.name)] if isinstance(r, Ref) else "" for r in in_order(call.result)]
    return replace(
        op,
        target=target,
        args=tuple(substitute(value, known) for value in call.args),
        arg_names=tuple(argument_names(call)),
        kwargs=(),
        outputs=tuple(values),
        views=tuple(str(known[name]) for name in call.views),
        random=call.random,
        at_default=frozenset(),
        spelling="",
    ), function


def argument_names(call: Application) -> Iterator[str]:
    """The arguments of a call by forward's names, without ctx where it has one."""
    cls: Any = call.cls
    parameters = list(signature(cls.forward).parameters.values())
    has_context = cls.setup_context is torch.autograd.Function.setup_context
    for i, _ in enumerate(call.args, start=int(has_context)):
        plain = i < len(parameters) and parameters[i].kind is not parameters[i].VAR_POSITIONAL
        yield parameters[i].name if plain else f"argument_{i}"


def find_function(call: Application, op: Op, folder: Path) -> tuple[UsersFunction, str]:
    """What a script holds of a class, and the target of its ops."""
    cls, carrier = call.cls, Carrier()
    name, where = cls.__name__, defined_at(cls)
    in_tuple = isinstance(call.result, tuple)
    try:
        carrier.definition(name, cls)
        carrier.values[name] = cls
        carrier.prove()
        parts, imports = tuple(carrier.parts.items()), tuple(carrier.imports.items())
        function = UsersFunction(name, where, parts, imports, "", in_tuple)
        texts = (*carrier.imports.values(), *carrier.parts.values())
    except NotCarriedError as error:
        module = beside(cls, folder) if error.module_helps else ""
        if not module:
            place = location(where)
            known = f"{name} ({Path(place.file).name}:{place.line})" if place else name
            message = f"no script can hold {known}: {error}"
            raise CaptureError(message, location(op.where), error.hint) from error
        function = UsersFunction(name, where, module=module, in_tuple=in_tuple)
        texts = ((folder / f"{module}.py").read_text(),)
    digest = sha256("\n".join((str(in_tuple), *texts)).encode()).hexdigest()[:8]
    return function, f"{prefix}.{name}.{digest}"
