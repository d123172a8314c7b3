"""check_mean: whether cutting a batch into microbatches changes the loss."""

import torch

from ..frontend.capture.build import build_model, numerics
from ..frontend.capture.fields import bind, read_fields
from ..frontend.capture.training import make_training
from ..frontend.capture.user import users_errors
from ..ir.graph import Graph
from ..ir.plan import Plan
from ..ir.spec import Spec
from .capture import microbatch
from .outcome import is_small


def check_mean(spec: Spec, graph: Graph, plan: Plan) -> tuple[str, ...]:
    """A word where the loss of a batch is not the mean of its microbatches' losses, weighted by
    their samples; () where it is, and where the model is too large or too random to tell.

    Microbatches are what the spec asks for, and what `ppc verify` compares with; but a sum over
    samples, a mean over tokens that count, and batch norm look at more than a sample.
    """
    sizes = [size for size in plan.sizes(spec.train.global_batch) if size]
    batch = sum(sizes)
    drawn = any(op.random for op in graph.ops)
    if len(sizes) < 2 or drawn or not is_small(graph, batch):
        return ()
    with numerics(spec), torch.no_grad():
        whole = losses(spec, [batch])[0]
        parts = sum(
            size / batch * loss for size, loss in zip(sizes, losses(spec, sizes), strict=True)
        )
    rounding = 1e-2 if spec.train.precision == "bf16" else 1e-5
    if abs(whole - parts) <= rounding * abs(whole):
        return ()
    message = (
        f"the loss of {batch} samples at once is {whole:.6g}, the mean over {len(sizes)} "
        f"microbatches {parts:.6g}: the scripts train on the latter. They differ where something "
        "looks at several samples: a batch norm, a sum in the loss, a mean over tokens that count"
    )
    return (message,)


def losses(spec: Spec, sizes: list[int]) -> list[float]:
    """The losses of the first samples of the data, taken in runs of such sizes."""
    model = build_model(spec)
    training = make_training(spec, model, bind(spec, model, read_fields(spec)))
    inputs = microbatch(spec, training, sum(sizes))
    with users_errors(spec.at("model.factory"), "the model fails on a batch"):
        runs = zip(*(torch.split(tensor, sizes) for tensor in inputs), strict=True)
        return [float(training.run(*run)) for run in runs]
