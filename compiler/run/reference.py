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
from functools import partial

import torch
from torch import Tensor, nn

from ..errors import RunError
from ..frontend.capture.build import build_model, numerics
from ..frontend.capture.fields import Binding, bind, read_fields
from ..frontend.capture.training import Training, make_training
from ..frontend.capture.user import users_errors
from ..frontend.capture.weight import weigh, weight_fields
from ..frontend.samples import (
    Samples,
    epoch_of_step,
    microbatches,
    read_samples,
    samples_of_step,
    total_steps,
)
from ..ir.graph import Graph
from ..ir.spec import Spec, Train
from .observe import Step, Tensors, copy
from .optimize import make_after, make_course, make_optimizer, step_optimizer
from .replicas import Replicas, make_replicas, overwrite
from .seeding import Seeder
from .together import Together
from .weights import check_recipes, full_state, load_weights, replay_weights


@dataclass(frozen=True, slots=True)
class Followed:
    """A step of other programs."""

    gradients: Tensors
    states: tuple[Tensors, ...]
    """Parameters and buffers after it, by replica."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A step's gradients before they are clipped, and its results, from one microbatch and from
    those that the spec asks for."""

    results: Mapping[str, float]
    gradients: Tensors
    summed: Tensors


@dataclass(frozen=True, slots=True)
class Trace:
    """What a training did, by the user's model's names; a tied tensor is under each of its own."""

    initial: Tensors
    """Parameters, buffers and plain tensors before the first step."""
    results: tuple[Mapping[str, float], ...]
    """Of each step, by name: the loss and the metrics, means as the spec weighs them, and, where it
    clips, the norm of the gradients before that."""
    steps: tuple[Step, ...]
    """Gradients as the optimizer reads them, and all tensors after it, the buffers replica 0's."""
    buffers: tuple[tuple[Tensors, ...], ...]
    """Of each step, by replica, after it."""
    whole: tuple[Whole, ...]
    """The first steps with all samples in one microbatch, where that makes no difference."""
    untrue: Mapping[str, str]
    """Recipes that do not give what the user's model has -> how they differ."""


def run_reference(
    spec: Spec,
    graph: Graph,
    steps: int | None = None,
    *,
    saved: Mapping[str, Tensor] | None = None,
    follow: Sequence[Followed] = (),
    whole: int = 0,
) -> Trace:
    """Train for `steps` steps, all by default; the first `whole` also with the batch in one go.

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
        run = train(spec, training, samples, graph, min(steps or length, length), follow, whole)
        results, taken, buffers, at_once = zip(*run, strict=True)
    known = tuple(each for each in at_once if each)
    return Trace(initial, results, taken, buffers, known, check_recipes(graph, real, values))


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
    follow: Sequence[Followed],
    whole: int,
) -> Iterator[tuple[Mapping[str, float], Step, tuple[Tensors, ...], Whole | None]]:
    """Results, gradients and new state of each step, its buffers by replica, and it in one go."""
    model, length = training.model, total_steps(spec, samples.count)
    optimizer = make_optimizer(spec.train, list(model.named_parameters()))
    course, after = make_course(spec, length), make_after(spec)
    replicas = make_replicas(spec, training)
    with replicas.following(graph) as seeders:
        for step in range(steps):
            at_once = None
            if step < whole:
                model.zero_grad()
                at_once = accumulate(spec, samples, seeders, replicas, step, 1)
                found = copies(live_gradients(model))
            model.zero_grad()
            count = spec.parallel.microbatches * spec.parallel.data
            results = accumulate(spec, samples, seeders, replicas, step, count)
            compared = None
            if at_once is not None:
                compared = Whole(at_once, found, copies(live_gradients(model)))
            norms = clip(model, spec.train)
            gradients = copies(live_gradients(model))
            if step < len(follow):
                overwrite(live_gradients(model), follow[step].gradients)
            step_optimizer(optimizer, course, step)
            after(model)
            taken = Step(gradients, full_state(model))
            yield {**results, **norms}, taken, replicas.copies(), compared
            if step < len(follow):
                overwrite(
                    dict(model.named_parameters(remove_duplicate=False)), follow[step].states[0]
                )
                replicas.overwrite(follow[step].states)


def accumulate(
    spec: Spec,
    samples: Samples,
    seeders: Sequence[Seeder],
    replicas: "Replicas | Together",
    step: int,
    count: int,
) -> Mapping[str, float]:
    """Forward and backward of a step's `count` microbatches; the means of the loss and the metrics.

    Microbatch i is replica i mod replicas': its batch norms' running statistics are that one's.
    """
    epoch, _ = epoch_of_step(spec, samples.count, step)
    parts = microbatches(samples_of_step(spec, samples.count, step), count)
    binding = replicas.trainings[0].binding
    shares = shares_of(spec, binding, samples, parts, epoch)
    if not shares:
        raise RunError(f"step {step + 1}: the weights of the batch sum to 0")

    def forward(index: int) -> tuple[Tensor, ...]:
        training = replicas.trainings[index % len(replicas.trainings)]
        batch = samples.batch(parts[index], binding.fields, epoch)
        replicas.enter(index % spec.parallel.data)
        with (
            users_errors(spec.at("model"), f"step {step}, microbatch {index}: the model failed"),
            seeders[index % len(seeders)].microbatch(spec.train.seed, step, index),
        ):
            return training.run(*batch)

    totals: dict[str, float] = {}
    for start in range(0, len(parts), len(replicas.trainings)):
        group = range(len(parts))[start : start + len(replicas.trainings)]
        results = replicas.run([partial(forward, index) for index in group])
        go_back([shares[index] for index in group], [result[0] for result in results])
        for index, values in zip(group, results, strict=True):
            named = zip(replicas.trainings[0].names, values, strict=True)
            for name, value in named if shares[index] else ():
                totals[name] = totals.get(name, 0.0) + shares[index] * float(value.detach())
    replicas.enter(0)
    return totals


def go_back(shares: Sequence[float], losses: Sequence[Tensor]) -> None:
    """From the losses of microbatches that ran together; one in which nothing counts may be NaN."""
    pairs = zip(shares, losses, strict=True)
    counted = [share * loss for share, loss in pairs if share and loss.requires_grad]
    if counted:
        torch.stack(counted).sum().backward()  # type: ignore[no-untyped-call]


def shares_of(
    spec: Spec, binding: Binding, samples: Samples, parts: Sequence[list[int]], epoch: int
) -> list[float]:
    """What each microbatch weighs in the means, of 1; () where nothing counts."""
    fields = weight_fields(spec, binding)
    batches = (samples.batch(part, fields, epoch) for part in parts)
    named = (dict(zip(fields, batch, strict=True)) for batch in batches)
    weights = [
        weigh(spec, fields, values, len(part)) for values, part in zip(named, parts, strict=True)
    ]
    return [weight / sum(weights) for weight in weights] if sum(weights) else []


def clip(model: nn.Module, train: Train) -> dict[str, float]:
    """Clip by the norm of all gradients together, that of a tied parameter once, or each element
    by itself. Returns that norm, of what was not clipped yet, by its name in the log."""
    norms = {}
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if train.clip_norm is not None:
        norm = nn.utils.get_total_norm(gradients)
        nn.utils.clip_grads_with_norm_(model.parameters(), train.clip_norm, norm)
        norms = {"gradient_norm": float(norm)}
    if train.clip_value is not None:
        nn.utils.clip_grad_value_(model.parameters(), train.clip_value)
    return norms


def copies(tensors: Tensors) -> dict[str, Tensor]:
    return {name: copy(tensor) for name, tensor in tensors.items()}


def live_gradients(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: p.grad for name, p in named if p.grad is not None}
