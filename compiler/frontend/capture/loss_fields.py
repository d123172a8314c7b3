"""Which of the data's fields go to the loss: those that its arguments name, and for an argument
that it must have and no field names, the one that is left."""

import inspect
from collections.abc import Sequence

from ...errors import CaptureError
from ...ir.spec import Spec
from .loss import find_loss, signature

targets = ("labels", "label", "targets", "target", "y")
"""What a field is called that a loss compares with."""
Fed = tuple[tuple[str, ...], dict[str, str]]
"""Fields by position, in the order of the arguments; argument -> field where one before it is left
at its default."""


def feed_loss(spec: Spec, taken: Sequence[inspect.Parameter], rest: Sequence[str]) -> Fed:
    """`taken`: what the loss takes after the model's output; `rest`: the fields that feed no input.
    A field that the loss does not take is not read.

    Raises CaptureError where several fields are left for one argument.
    """
    named = {p.name for p in taken if p.name in rest}
    others = [name for name in rest if name not in named]
    needed = [p.name for p in taken if p.default is p.empty and p.name not in named]
    own = ":" in spec.model.loss
    if takes_any(spec) or (own and needed and not named and len(needed) < len(rest) <= len(taken)):
        return tuple(rest), {}  # by position, as they come
    if len(others) > len(needed) == 1 and (known := [n for n in others if n in targets]):
        others = known
    if needed and len(others) > len(needed):
        raise CaptureError(
            f"the loss {spec.model.loss} takes {' and '.join(needed)}; which field is that? "
            f"the model leaves {', '.join(others)}",
            spec.at("model.loss"),
            "a function whose arguments have the fields' names: loss: losses.py:loss",
        )
    left = dict(zip(needed, others, strict=False))
    fed = {p.name: p.name if p.name in named else left.get(p.name) for p in taken}
    values = list(fed.values())
    gap = values.index(None) if None in values else len(values)
    by_position = tuple(value for value in values[:gap] if value)
    return by_position, {name: field for name, field in list(fed.items())[gap:] if field}


def takes_any(spec: Spec) -> bool:
    """Whether the loss takes `*fields`."""
    try:
        parameters = signature(find_loss(spec)).parameters.values()
    except ValueError:  # torch's own functions in C
        return False
    return any(p.kind is p.VAR_POSITIONAL for p in parameters)
