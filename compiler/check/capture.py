"""check_capture: the graph computes what the user's model and loss do."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from safetensors.torch import load
from torch import Tensor, nn

from ..errors import CaptureError
from ..frontend.capture.build import build_fake, build_model, default_dtype, state_tensors
from ..frontend.capture.fields import bind, read_fields
from ..frontend.capture.replay import replay
from ..frontend.capture.training import Training, make_training
from ..frontend.capture.user import users_errors
from ..frontend.samples import read_samples
from ..ir.graph import Graph, Parameter
from ..ir.plan import Plan
from ..ir.spec import Random, Spec
from .listing import first_difference, list_operations
from .outcome import (
    Outcome,
    copy_state,
    differences,
    finish,
    is_small,
    kept,
    make,
    run_graph,
    run_ops,
    tolerance_of,
)

report = "this is a limit of ppc's capture; please report it with the model"


def check_capture(spec: Spec, graph: Graph, plan: Plan) -> None:
    """Compare the graph with the user's model: loss, gradients and buffers of two microbatches when
    it is small, lists of operations when it is large; at the largest and the smallest microbatch.
    Raises CaptureError where they differ."""
    sizes = microbatch_sizes(spec, plan)
    with default_dtype(spec.train.precision):
        if all(is_small(graph, size) for size in sizes):
            faults = compare_numbers(spec, graph, sizes if len(sizes) > 1 else sizes * 2)
        else:
            faults = compare_listings(spec, graph, sizes)
        found = next(faults, None)
    if found:
        raise CaptureError(
            f"the captured graph is not the model: {found}", spec.at("model.factory"), report
        )


def microbatch_sizes(spec: Spec, plan: Plan) -> tuple[int, ...]:
    """The largest and the smallest that a training can have."""
    counts = [spec.train.global_batch]
    if spec.data.last_batch == "keep":
        left = spec.data.samples % counts[0] if isinstance(spec.data, Random) else 1
        counts += [left] if left else []
    sizes = {size for count in counts for size in plan.sizes(count) if size}
    return tuple(sorted({max(sizes), min(sizes)}, reverse=True))


def compare_numbers(spec: Spec, graph: Graph, sizes: Sequence[int]) -> Iterator[str]:
    """What differs on real data, with the weights that the factory makes, in one microbatch after
    the other: what forward keeps counts.

    Both draw from one state of the generator.
    """
    model = build_model(spec)
    training = make_training(spec, model, bind(spec, model, read_fields(spec)))
    state = copy_state(read_state(graph, model))
    where = spec.at("model.factory")
    for number, size in enumerate(sizes, 1):
        inputs = microbatch(spec, training, size)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            with users_errors(where, f"the model fails on a microbatch of {size} samples"):
                expected = run_model(graph, training, [tensor.clone() for tensor in inputs])
            torch.manual_seed(0)
            found = run_graph(graph, state, inputs)
        state |= {n: t.requires_grad_(state[n].requires_grad) for n, t in found.kept.items()}
        again = "" if number == 1 else "; does forward keep something in an attribute?"
        for fault in differences(found, expected, tolerance_of(spec.train.precision)):
            yield f"{fault}, in microbatch {number}, of {size} sample{'s' * (size > 1)}{again}"


def microbatch(spec: Spec, training: Training, batch: int) -> tuple[Tensor, ...]:
    """The first samples of the data."""
    samples = read_samples(spec)
    numbers = [i % samples.count for i in range(batch)]
    return samples.batch(numbers, training.binding.fields, epoch=0)


def read_state(graph: Graph, model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors under the graph's names, literals of forward among them."""
    named = (load(graph.saved) if graph.saved else {}) | dict(state_tensors(model))
    return {fqn: named[fqn] if fqn in named else first(p) for fqn, p in graph.parameters.items()}


def first(parameter: Parameter) -> Tensor:
    """The value of a tensor that the factory made and the model does not hold."""
    meta = parameter.meta
    shape = tuple(size for size in meta.shape if isinstance(size, int))
    return replay(parameter.recipe, shape, getattr(torch, meta.dtype), seed=0)


def run_model(graph: Graph, training: Training, inputs: Sequence[Tensor]) -> Outcome:
    """The user's own model."""
    training.model.zero_grad()
    loss = training(*inputs)
    state = dict(state_tensors(training.model))
    return finish(loss, state, kept(graph) & state.keys())


def compare_listings(spec: Spec, graph: Graph, sizes: Sequence[int]) -> Iterator[str]:
    """What differs on tensors without values."""
    built, fields = build_fake(spec), read_fields(spec)
    training = make_training(spec, built.model, bind(spec, built.model, fields))
    with built.mode:
        state = {name: make(p.meta, 0) for name, p in graph.parameters.items()}
    state |= dict(state_tensors(built.model))
    for size in sizes:
        with built.mode:
            given = {i.name: make(i.meta, size) for i in graph.inputs}
        run = partial(run_ops, graph.ops, graph.canonical, state, given, size)
        expected = list_operations(partial(training, *given.values()), built.mode)
        fault = first_difference(list_operations(run, built.mode), expected)
        if fault:
            yield f"{fault}, in a microbatch of {size}"
