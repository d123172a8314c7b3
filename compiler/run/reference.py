"""The training that a spec asks for, on the user's own model, in one process and one thread.

What every layout of the emitted scripts has to equal. It is written from the language's
definition and shares no code with what is emitted: the user's factory builds the model, the
recorded weights are loaded into it, data is read by `data`, randomness is seeded by hooks, torch's
autograd sums over the microbatches.

It may follow the scripts' own run: each step then starts from their weights, buffers and optimizer
state. Differences do not grow so: an adaptive optimizer makes steps as long as any other of a
gradient that is nothing but rounding, a ReLU makes jumps of it, and no two programs round alike.
Still nothing escapes, since every step is compared, from the same weights on.

It runs in the calling process, whatever has run there before: nothing is forked (a fork server is a
fresh interpreter, so the threads that torch may start here do it no harm), the number of threads is
one for the time of the run, and torch's generator is given back as it was.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..frontend.capture.build import build_model, numerics
from ..frontend.capture.fields import bind, read_fields
from ..frontend.capture.training import Training, make_training
from ..frontend.capture.user import users_errors
from ..frontend.samples import (
    Samples,
    epoch_of_step,
    microbatches,
    read_samples,
    samples_of_step,
    total_steps,
)
from ..ir.graph import Graph
from ..ir.spec import Spec
from .observe import Step, Tensors, copy
from .optimize import make_optimizer, step_optimizer
from .seeding import Seeder, following
from .weights import check_recipes, full_state, load_weights, replay_weights


@dataclass(frozen=True, slots=True)
class Trace:
    """What a training did, by the user's model's names; a tied tensor is under each of its own."""

    initial: Tensors
    """Parameters, buffers and plain tensors before the first step."""
    losses: tuple[float, ...]
    """Of each step, the mean over its samples."""
    steps: tuple[Step, ...]
    """Gradients as the optimizer reads them, and all tensors after it."""
    untrue: Mapping[str, str]
    """Recipes that do not give what the user's model has -> how they differ."""


def run_reference(
    spec: Spec,
    graph: Graph,
    steps: int | None = None,
    *,
    saved: Mapping[str, Tensor] | None = None,
    follow: Sequence[Step] = (),
) -> Trace:
    """Train for `steps` steps, all by default.

    Before: `graph` is the spec's, with layers; `saved` has the first values that it has no recipe
    for, those of a new model by default; `follow` is what other programs did. Raises CaptureError
    where the user's code fails, RunError where its randomness cannot be followed.
    """
    with one_thread(), torch.random.fork_rng(devices=[]), numerics(spec):
        model = build_model(spec)
        real = full_state(model)
        values = replay_weights(graph, spec.train.seed, saved={**real, **(saved or {})})
        load_weights(model, graph, values)
        binding = bind(spec, model, read_fields(spec))
        training, samples = make_training(spec, model, binding), read_samples(spec)
        initial = full_state(model)
        length = total_steps(spec, samples.count)
        run = train(spec, training, samples, graph, min(steps or length, length), follow)
        losses, taken = zip(*run, strict=True)
    return Trace(initial, losses, taken, check_recipes(graph, real, values))


@contextmanager
def one_thread() -> Iterator[None]:
    """As each rank has, and so that sums are made in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(
    spec: Spec,
    training: Training,
    samples: Samples,
    graph: Graph,
    steps: int,
    follow: Sequence[Step],
) -> Iterator[tuple[float, Step]]:
    """Loss, gradients and new state of each step."""
    model, length = training.model, total_steps(spec, samples.count)
    optimizer = make_optimizer(spec.train, list(model.named_parameters()))
    with following(model, graph) as seeder:
        for step in range(steps):
            optimizer.zero_grad()
            loss = accumulate(spec, training, samples, seeder, step)
            if spec.train.clip_norm is not None:
                clip(model, spec.train.clip_norm)
            gradients = {name: copy(tensor) for name, tensor in live_gradients(model).items()}
            if step < len(follow):
                overwrite(live_gradients(model), follow[step].gradients)
            step_optimizer(optimizer, spec.train, step, length)
            yield loss, Step(gradients, full_state(model))
            if step < len(follow):
                overwrite(live_state(model), follow[step].state)


def accumulate(
    spec: Spec, training: Training, samples: Samples, seeder: Seeder, step: int
) -> float:
    """Forward and backward of every microbatch of a step; the step's loss."""
    numbers = samples_of_step(spec, samples.count, step)
    epoch, _ = epoch_of_step(spec, samples.count, step)
    total = 0.0
    parts = microbatches(numbers, spec.parallel.microbatches * spec.parallel.data)
    for index, part in enumerate(parts):
        batch = samples.batch(part, training.binding.fields, epoch)
        with (
            users_errors(spec.at("model"), f"step {step}, microbatch {index}: the model failed"),
            seeder.microbatch(spec.train.seed, step, index),
        ):
            loss = training.run(*batch)
        share = len(part) / len(numbers)
        if loss.requires_grad:
            (share * loss).backward()  # type: ignore[no-untyped-call]
        total += share * loss.item()
    return total


def clip(model: nn.Module, norm: float) -> None:
    """Clip by the norm of all gradients together, that of a tied parameter once."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    nn.utils.clip_grads_with_norm_(model.parameters(), norm, nn.utils.get_total_norm(gradients))


def live_gradients(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: p.grad for name, p in named if p.grad is not None}


def live_state(model: nn.Module) -> dict[str, Tensor]:
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


def overwrite(held: Tensors, values: Tensors) -> None:
    """Take over the values that fit; what does not is found by comparing."""
    with torch.no_grad():
        for name, tensor in held.items():
            if name in values and values[name].shape == tensor.shape:
                tensor.copy_(values[name])
