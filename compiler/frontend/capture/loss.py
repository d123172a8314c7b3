"""The spec's loss: found, and what it takes."""

import inspect
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F  # as everyone calls it
from torch import nn

from ...errors import CaptureError
from ...ir.spec import Spec
from .build import seeded
from .loss_module import make_module
from .user import resolve

Results = Mapping[str, torch.Tensor]
"""`loss`, then the metrics, each of one number."""
Loss = Callable[..., object]
"""Gives the loss, or what take_apart knows."""


def find_loss(spec: Spec) -> Loss:
    """The function that takes the model's output and the fields that feed no input."""
    name, where = spec.model.loss, spec.at("model.loss")
    if name == "output":
        return returned_loss
    if ":" in name:
        with seeded(spec.train.seed):  # a loss may draw tensors; it is found more than once
            loss = resolve(name, spec.folder, where)
    else:
        loss = cross_entropy if name == "cross_entropy" else getattr(F, name, None)
    if not callable(loss):
        what = f"{name} is not callable" if loss else f"{name!r} is not in torch.nn.functional"
        raise CaptureError(what, where, "name a function of your own: losses.py:loss")
    is_module = isinstance(loss, nn.Module) or (
        isinstance(loss, type) and issubclass(loss, nn.Module)
    )
    return make_module(spec, loss) if is_module else loss


def signature(loss: Loss) -> inspect.Signature:
    """What a loss takes. Raises ValueError for torch's own functions in C."""
    return inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)


def arguments(loss: Loss) -> tuple[inspect.Parameter, ...]:
    """What a loss takes after the model's output, by position."""
    try:
        taken = list(signature(loss).parameters.values())
    except ValueError:  # torch's own functions in C
        return (inspect.Parameter("target", inspect.Parameter.POSITIONAL_ONLY),)
    return tuple(p for p in taken[1:] if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def output_name(loss: Loss) -> str:
    """What a loss calls the model's output: the name of its first argument."""
    name = next(iter(signature(loss).parameters))
    return "output" if name == "input" else name


def take_apart(result: object) -> Results:
    """What a loss gave: the loss; or a mapping of it and of metrics; or the loss and a mapping.

    Raises TypeError for anything else.
    """
    if isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[1], Mapping):
        result = {"loss": result[0], **result[1]}
    named = dict(result) if isinstance(result, Mapping) else {"loss": result}
    if "loss" not in named:
        raise TypeError(f"the loss gives {', '.join(map(str, named))}, none of which is `loss`")
    found: dict[str, torch.Tensor] = {}
    for name in sorted(named, key="loss".__ne__):  # the loss first
        value = named[name]
        if not isinstance(value, torch.Tensor) or value.dim() != 0:
            what = type(value).__name__
            if isinstance(value, torch.Tensor):
                what = f"a tensor of shape {list(value.shape)}"
            raise TypeError(f"{name} is {what}, not a tensor of one number: its mean, no .item()")
        found[str(name)] = value
    return found


def check_output(loss: Loss, output: object) -> None:
    """Raises TypeError for what a loss of torch's own cannot take."""
    torchs = loss is cross_entropy or loss is getattr(F, getattr(loss, "__name__", ""), None)
    if torchs and not isinstance(output, torch.Tensor):
        raise TypeError(
            f"the model returned a {type(output).__name__}, and {loss.__name__} takes a tensor: "
            "return one, or name a function that takes it apart: losses.py:loss"
        )


def returned_loss(output: object) -> object:
    """The loss that a model returns: a scalar, or `.loss` or the first element of its output. In a
    plain dict further scalars are metrics."""
    if type(output) is dict and isinstance(output.get("loss"), torch.Tensor):
        scalars = {n: v for n, v in output.items() if isinstance(v, torch.Tensor) and v.dim() == 0}
        if "loss" in scalars:
            return scalars
    if isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    elif hasattr(output, "loss"):
        output = output.loss
    elif isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, torch.Tensor) or output.dim() != 0:
        found = type(output).__name__
        if isinstance(output, torch.Tensor):
            found = f"a tensor of shape {list(output.shape)}"
        raise TypeError(
            f"the model returned {found}, not a loss; name one in the spec: model: {{loss: ...}}"
        )
    return output


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """F.cross_entropy, also for classes in the last dimension, as language models have them.

    Raises ValueError where both readings fit: (batch, n, n) with labels (batch, n).
    """
    last = logits.shape[:-1] == labels.shape
    second = logits.shape[:1] + logits.shape[2:] == labels.shape
    if last and second and logits.dim() > 2:
        raise ValueError(
            f"cross_entropy of {list(logits.shape)} and {list(labels.shape)} could take its "
            "classes from the second or from the last dimension; "
            "name a function of your own: losses.py:loss"
        )
    if last and logits.dim() > 2:
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())
    return F.cross_entropy(logits, labels)
