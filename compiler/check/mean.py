"""check_mean: whether cutting a batch into microbatches changes the loss."""

from collections.abc import Iterator, Sequence

import torch

from ..frontend.capture.build import build_model, numerics
from ..frontend.capture.fields import bind, read_fields
from ..frontend.capture.training import make_training
from ..frontend.capture.user import users_errors
from ..frontend.capture.weight import weigh, weight_fields
from ..ir.graph import Graph
from ..ir.spec import Spec
from .outcome import is_small
from .real import microbatch


def check_mean(spec: Spec, graph: Graph, sizes: Sequence[int]) -> tuple[str, ...]:
    """A word where the loss of a batch is not the mean of its microbatches' losses, weighted as the
    spec says; () where it is, and where the model is too large or too random to tell.

    Microbatches are what the spec asks for, and what `ppc verify` compares with; but a sum over
    samples, a mean over tokens that count, and batch norm look at more than a sample.
    """
    sizes = [size for size in sizes if size]
    batch = sum(sizes)
    drawn = any(op.random for op in graph.ops)
    if len(sizes) < 2 or drawn or not is_small(graph, batch):
        return ()
    with numerics(spec):  # and gradients on, which forward may ask for
        ((_, whole),) = losses(spec, [batch])
        found = list(losses(spec, sizes))
        total = sum(weight for weight, _ in found)
        parts = sum(weight / total * loss for weight, loss in found if weight)
    rounding = 1e-2 if any(op.autocast for op in graph.ops) else 1e-5
    if abs(whole - parts) <= rounding * abs(whole):
        return ()
    message = (
        f"the loss of {batch} samples at once is {whole:.6g}, the mean over {len(sizes)} "
        f"microbatches {parts:.6g}: the scripts train on the latter. They differ where something "
        "looks at several samples: a batch norm, a sum in the loss, a mean over tokens that count "
        "(model: {weight: tokens})"
    )
    return (message,)


def losses(spec: Spec, sizes: list[int]) -> Iterator[tuple[float, float]]:
    """(weight, loss) of the first samples of the data, taken in runs of such sizes."""
    model = build_model(spec)
    binding = bind(spec, model, read_fields(spec))
    training, fields = make_training(spec, model, binding), weight_fields(spec, binding)
    inputs = microbatch(spec, training, sum(sizes))
    with users_errors(spec.at("model.factory"), "the model fails on a batch"):
        pairs = zip(binding.fields, inputs, strict=True)
        split = (
            [t] * len(sizes) if name in binding.whole else torch.split(t, sizes)
            for name, t in pairs
        )
        runs = zip(*split, strict=True)
        for run, size in zip(runs, sizes, strict=True):
            part = dict(zip(binding.fields, run, strict=True))
            yield weigh(spec, fields, part, size), training.run(*run)[0].item()
