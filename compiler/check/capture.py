"""check_capture: the graph computes what the user's model and loss do."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ..errors import CaptureError
from ..frontend.capture.build import build_fake, build_model, default_dtype, state_tensors
from ..frontend.capture.fields import bind, read_fields
from ..frontend.capture.replay import run_op
from ..frontend.capture.training import Training, make_training
from ..frontend.capture.user import users_errors
from ..frontend.samples import read_samples
from ..ir.graph import Graph, Ref, State
from ..ir.plan import Plan
from ..ir.spec import Random, Spec
from .listing import first_difference, list_operations
from .outcome import Outcome, differences, finish, is_small, run_graph, tolerance_of

report = "this is a limit of ppc's capture; please report it with the model"


def check_capture(spec: Spec, graph: Graph, plan: Plan) -> None:
    """Compare the graph with the user's model: loss, gradients and buffers of one microbatch when it
    is small, lists of operations when it is large; at the largest and the smallest microbatch.
    Raises CaptureError where they differ."""
    for batch in microbatch_sizes(spec, plan):
        with default_dtype(spec.train.precision):
            if is_small(graph, batch):
                found = next(compare_numbers(spec, graph, batch), None)
            else:
                found = compare_listings(spec, graph, batch)
        refuse(spec, found, batch)


def microbatch_sizes(spec: Spec, plan: Plan) -> tuple[int, ...]:
    """The largest and the smallest that a training can have."""
    counts = [spec.train.global_batch]
    if spec.data.last_batch == "keep":
        left = spec.data.samples % counts[0] if isinstance(spec.data, Random) else 1
        counts += [left] if left else []
    sizes = {size for count in counts for size in plan.sizes(count) if size}
    return tuple(sorted({max(sizes), min(sizes)}, reverse=True))


def refuse(spec: Spec, found: str | None, batch: int) -> None:
    if found:
        found = f"{found}, in a microbatch of {batch} sample{'s' * (batch > 1)}"
        raise CaptureError(
            f"the captured graph is not the model: {found}", spec.at("model.factory"), report
        )


def compare_numbers(spec: Spec, graph: Graph, batch: int) -> Iterator[str]:
    """What differs on real data, with the weights that the factory makes, both from one state of the generator."""
    model = build_model(spec)
    training = make_training(spec, model, bind(spec, model, read_fields(spec)))
    inputs = microbatch(spec, training, batch)
    state = read_state(graph, model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = run_graph(graph, state, inputs)
        torch.manual_seed(0)
        expected = run_model(graph, training, inputs)
    yield from differences(found, expected, tolerance_of(spec.train.precision))


def microbatch(spec: Spec, training: Training, batch: int) -> tuple[Tensor, ...]:
    """The first samples of the data."""
    samples = read_samples(spec)
    numbers = [i % samples.count for i in range(batch)]
    return samples.batch(numbers, training.binding.fields)


def read_state(graph: Graph, model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors under the graph's names; literals of forward that the graph holds, too."""
    named = dict(state_tensors(model))
    return {fqn: named[fqn] for fqn in graph.parameters if fqn in named}


def run_model(graph: Graph, training: Training, inputs: tuple[Tensor, ...]) -> Outcome:
    """The user's own model."""
    training.model.zero_grad()
    with users_errors(None, f"the model failed on a microbatch of {len(inputs[0])} samples"):
        loss = training(*inputs)
    state = dict(state_tensors(training.model))
    return finish(
        loss, state, {fqn for fqn, p in graph.parameters.items() if p.buffer and fqn in state}
    )


def compare_listings(spec: Spec, graph: Graph, batch: int) -> str | None:
    """On tensors without values."""
    built = build_fake(spec)
    training = make_training(spec, built.model, bind(spec, built.model, read_fields(spec)))
    fields = read_fields(spec)

    def inputs() -> tuple[Tensor, ...]:
        return tuple(
            torch.zeros((batch, *fields[name].shape), dtype=getattr(torch, fields[name].dtype))  # type: ignore[arg-type]
            for name in training.binding.fields
        )

    with built.mode:
        given = inputs()
    state: Mapping[str, Tensor] = dict(state_tensors(built.model))
    values: dict[str, object] = {i.name: t for i, t in zip(graph.inputs, given, strict=True)}

    def lookup(ref: Ref | State) -> object:
        return values[ref.name] if isinstance(ref, Ref) else state[graph.canonical[ref.fqn]]

    def run() -> None:
        for op in graph.ops:
            result = run_op(op, lookup, batch)
            outputs = result if isinstance(result, list | tuple) else (result,)
            values.update(zip(op.outputs, outputs, strict=False))

    found = list_operations(run, built.mode)
    return first_difference(found, list_operations(lambda: training(*given), built.mode))
