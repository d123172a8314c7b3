"""Class weights: cross_entropy divides by the sum of those of a microbatch's samples, so the mean
over samples of several microbatches is another number than the global batch's."""

import torch

from ...errors import CaptureError
from ...ir.graph import Arg, Op, Ref, State
from ...ir.spec import Spec
from .coupled import loss_line
from .raw import Raw
from .user import location

mean = 1
"""torch's number of the reduction."""


def weighted_mean(spec: Spec, raw: Raw) -> str:
    """The user's line of such a loss, or its name where torch wrote it; "" for none.

    Raises CaptureError there where several microbatches have a mean that nobody asked for: the spec
    gives no weight, and does not accept that each is a batch of its own.
    """
    several = spec.parallel.microbatches * spec.parallel.data > 1
    told = spec.model.weight.kind not in ("samples", "tokens")
    found = next((op for op in raw.ops if divides(op, raw)), None)
    if not several or told or found is None:
        return ""
    line = found.where or loss_line(spec)
    if spec.model.coupled == "accept":
        return line or spec.model.loss
    over = spec.model.weight.kind
    ignored = argument(found, "ignore_index")
    counted = f"labels[labels != {ignored}]" if isinstance(ignored, int) else "labels"
    raise CaptureError(
        "cross_entropy with class weights divides by the sum of the weights in each microbatch, so "
        f"a mean over {over} is not that of the global batch",
        location(line) or spec.at("model.loss"),
        "what a microbatch's samples weigh: def weight(labels): return W.to(labels.device)"
        f"[{counted}].sum(), by your names, and model: {{weight: file.py:weight}}; or model: "
        "{coupled: accept}, "
        "and each microbatch counts by its share of the samples",
    )


def argument(op: Op, name: str) -> Arg:
    """What an operation is given under a name; None for its default."""
    given: dict[str, Arg] = dict(zip(op.arg_names, op.args, strict=True)) | dict(op.kwargs)
    return given.get(name)


def divides(op: Op, raw: Raw) -> bool:
    """Whether an op is a mean over classes that weigh differently. A target of probabilities is
    divided by the number of samples."""
    if not op.target.startswith(("aten.cross_entropy_loss.", "aten.nll_loss")):
        return False
    given: dict[str, Arg] = dict(zip(op.arg_names, op.args, strict=True)) | dict(op.kwargs)
    weight, target = given.get("weight"), given["target"]
    if given.get("reduction", mean) != mean or not isinstance(weight, Ref | State):
        return False
    value = raw.constants.get(str(weight))
    if value is not None and bool((value == value.flatten()[:1]).all()):
        return False
    meta = (raw.states | raw.values)[str(target)]
    return not getattr(torch, meta.dtype).is_floating_point
