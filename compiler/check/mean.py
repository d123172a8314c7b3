"""check_mean: whether cutting a batch into microbatches changes the loss, or its gradient."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..frontend.capture.build import build_model, numerics
from ..frontend.capture.fields import bind, read_fields
from ..frontend.capture.training import make_training
from ..frontend.capture.user import users_errors
from ..frontend.capture.weight import weigh, weight_fields
from ..ir.graph import Graph
from ..ir.spec import Spec
from .outcome import is_small
from .real import microbatch

sdpa_dropout = 4
"""Which argument of scaled_dot_product_attention it is."""


@dataclass(frozen=True, slots=True)
class Run:
    """One microbatch of the user's model."""

    weight: float
    loss: float
    gradients: Mapping[str, Tensor]
    drew: bool
    """Something else than dropout drew random numbers."""


class Undropped(TorchFunctionMode):
    """Leaves dropout out: what it draws hangs on the number of samples."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if "dropout" in name and args:
            inplace = name.endswith("_") or kwargs.get("inplace")
            return args[0] if inplace else args[0].clone()  # which others may write to
        if name == "scaled_dot_product_attention":
            args, kwargs = args[:sdpa_dropout], {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


def check_mean(spec: Spec, graph: Graph, sizes: Sequence[int]) -> tuple[str, ...]:
    """A word where the loss of a batch is not the mean of its microbatches' losses, weighted as the
    spec says, or its gradient not that of theirs, or where it is too random to tell; () where they
    are, and where the model is too large. Dropout is left out.

    Microbatches are what the spec asks for, and what `ppc verify` compares with; but a sum over
    samples, a mean over tokens that count, and batch norm look at more than a sample.
    """
    sizes = [size for size in sizes if size]
    batch = sum(sizes)
    if len(sizes) < 2 or not is_small(graph, batch):
        return ()
    with numerics(spec), torch.random.fork_rng(devices=[]):
        (whole,) = runs(spec, [batch])
        found = list(runs(spec, sizes))
    if any(run.drew for run in (whole, *found)):
        message = (
            "whether cutting a batch changes the loss is not known: forward draws random numbers. "
            f"The scripts train on the mean over {len(sizes)} microbatches, which divides a loss "
            "that is a sum over samples by their number"
        )
        return (message,)
    total = sum(run.weight for run in found)
    parts = sum(run.weight / total * run.loss for run in found if run.weight)
    autocast = any(op.autocast for op in graph.ops)
    if abs(whole.loss - parts) > (1e-2 if autocast else 1e-5) * abs(whole.loss):
        message = (
            f"the loss of {batch} samples at once is {whole.loss:.6g}, the mean over {len(sizes)} "
            f"microbatches {parts:.6g}: the scripts train on the latter. They differ where "
            "something looks at several samples: a batch norm, a sum in the loss, a mean over "
            "tokens that count (model: {weight: tokens})"
        )
        return (message,)
    return compare_gradients(whole, found, 5e-2 if autocast else 1e-3)


def compare_gradients(whole: Run, parts: Sequence[Run], tolerance: float) -> tuple[str, ...]:
    """A word where a backward alone looks at several samples."""
    total, far = sum(run.weight for run in parts), dict[str, float]()
    largest = max((float(g.norm()) for g in whole.gradients.values()), default=0.0)
    for name, expected in whole.gradients.items():
        cut = sum(run.weight / total * run.gradients[name] for run in parts if run.weight)
        difference = float(torch.as_tensor(cut - expected).norm())
        if difference > tolerance * max(float(expected.norm()), 1e-3 * largest):
            far[name] = difference / max(float(expected.norm()), 1e-30)
    if not far:
        return ()
    name = max(far, key=lambda each: far[each])
    message = (
        f"the gradient of {name} in all samples at once and that over {len(parts)} microbatches "
        f"differ by {far[name]:.0%}, the losses do not: the scripts train on the latter. A "
        "backward looks at several samples: an autograd.Function, or a hook, that normalises"
    )
    return (message,)


def runs(spec: Spec, sizes: list[int]) -> Iterator[Run]:
    """The first samples of the data, taken in runs of such sizes."""
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
        for run, size in zip(zip(*split, strict=True), sizes, strict=True):
            weight = weigh(spec, fields, dict(zip(binding.fields, run, strict=True)), size)
            before = torch.get_rng_state()
            with Undropped():
                loss = training.run(*run)[0]
            drew = not torch.equal(before, torch.get_rng_state())
            trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
            grads = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
            known = zip(trained.items(), grads, strict=True)
            made = {n: torch.zeros_like(p) if g is None else g.to_dense() for (n, p), g in known}
            yield Run(weight, loss.item(), made, drew)
