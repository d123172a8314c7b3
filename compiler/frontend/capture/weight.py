"""What the mean of the loss is over: samples, tokens that count, or what a function of the user's
says."""

import inspect
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ...errors import CaptureError
from ...ir.spec import Spec
from .fields import Binding
from .user import resolve, users_errors


def weight_fields(spec: Spec, binding: Binding) -> tuple[str, ...]:
    """The fields that the weight of a microbatch follows from; () for its number of samples.

    Raises CaptureError where a field is none that the model or the loss takes.
    """
    weight, known = spec.model.weight, binding.fields
    if weight.kind == "samples":
        return ()
    if weight.kind == "tokens":
        targets = (*binding.loss, *binding.loss_keywords.values()) or tuple(
            n for n in known if n in ("labels", "targets", "target")
        )
        if weight.field is None and len(targets) != 1:
            raise CaptureError(
                "weight: tokens counts the elements of the loss's target; which field is that?",
                spec.at("model.weight"),
                f"weight: {{kind: tokens, field: {(targets or known)[-1]}}}",
            )
        wanted: tuple[str, ...] = (weight.field or targets[0],)
    else:
        wanted = tuple(inspect.signature(find_function(spec)).parameters)
    for name in wanted:
        if name not in known:
            raise CaptureError(
                f"the weight reads {name}, a field that neither the model nor the loss takes",
                spec.at("model.weight"),
                f"they take {', '.join(known)}",
            )
    return wanted


def find_function(spec: Spec) -> Callable[..., object]:
    """The user's function."""
    where = spec.at("model.weight")
    function = resolve(spec.model.weight.kind, spec.folder, where)
    if not callable(function):
        hint = "a function of the data's fields that gives a microbatch's weight"
        raise CaptureError(f"{spec.model.weight.kind} is not callable", where, hint)
    return function


def weigh(spec: Spec, fields: Sequence[str], part: Mapping[str, Tensor], samples: int) -> float:
    """The weight of a microbatch of so many samples. `fields`: those of weight_fields."""
    weight = spec.model.weight
    if weight.kind == "samples" or not samples:
        return float(samples)
    if weight.kind == "tokens":
        return float((part[fields[0]] != weight.ignore_index).sum())
    with users_errors(spec.at("model.weight"), f"{weight.kind} fails"), torch.no_grad():
        return float(find_function(spec)(*(part[name] for name in fields)))  # type: ignore[arg-type]
