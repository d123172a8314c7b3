"""check_capture: the graph computes what the user's model and loss do."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from ..frontend.capture.arguments import dtype_name
from ..frontend.capture.build import build_fake, numerics, state_tensors
from ..frontend.capture.fields import bind, read_fields
from ..frontend.capture.foreign import refuse_foreign
from ..frontend.capture.loss_state import Held, held_by_loss
from ..frontend.capture.private import fake_mode
from ..frontend.capture.replaced import libraries_export
from ..frontend.capture.training import Training, make_training
from ..frontend.capture.user import users_errors
from ..ir.graph import Graph
from ..ir.norms import counting_norms, values_per_channel
from ..ir.plan import Plan
from ..ir.spec import Random, Spec
from .faults import Fault, depends_on_size, kept_question, not_the_model, samples
from .keeping import refuse_keeping
from .listing import Listing, constant_name, first_difference, list_operations
from .outcome import (
    copy_state,
    differences,
    is_comparable,
    kept,
    make,
    run_graph,
    run_ops,
    sizes_of,
    tolerance_of,
)
from .real import blaming, microbatch, read_state, really, run_model

STEP = 1e-2
"""What a weight is moved by: far more than tolerances, and little beside most weights."""
Compare = Callable[[Spec, Graph, Sequence[int]], Iterator[Fault]]


def check_capture(spec: Spec, graph: Graph, plan: Plan) -> None:
    """Compare the graph with the user's model, at the largest and the smallest microbatch: loss,
    gradients and buffers of two microbatches, or lists of operations when the model is large or
    computes in bfloat16.

    Raises CaptureError where they differ.
    """
    sizes = microbatch_sizes(spec, plan, graph)
    with numerics(spec):
        by_numbers = all(is_comparable(graph, size) for size in sizes)
        if by_numbers and (graph.registered or graph.functions):
            training = really(spec)
            inputs = microbatch(spec, training, sizes[0])
            with users_errors(spec.at("model.factory"), f"the model fails on {samples(sizes[0])}"):
                refuse_keeping(graph, training, inputs)
        compare = compare_numbers if by_numbers else compare_listings
        fault = compare_pairs(compare, spec, graph, sizes)
        if by_numbers:  # lists compare them where they run the graph
            fault = fault or next(compare_shapes(graph, sizes), None)
        if fault and fault.size != sizes[0]:
            raise depends_on_size(spec, plan, sizes[0], fault)
        if fault:
            raise not_the_model(spec, graph, fault)


def microbatch_sizes(spec: Spec, plan: Plan, graph: Graph) -> tuple[int, ...]:
    """The largest and the smallest that a training can have, and batch norms can see."""
    counts = [spec.train.global_batch]
    if spec.data.last_batch == "keep":
        left = spec.data.samples % counts[0] if isinstance(spec.data, Random) else 1
        counts += [left] if left else []
    norms = counting_norms(graph)
    least = 2 if any(values_per_channel(graph, op, 1) == 1 for op in norms) else 1
    sizes = {max(size, least) for count in counts for size in plan.sizes(count) if size}
    return tuple(sorted({max(sizes), min(sizes)}, reverse=True))


def compare_pairs(compare: Compare, spec: Spec, graph: Graph, sizes: Sequence[int]) -> Fault | None:
    """What differs in two microbatches, of both sizes if there are two."""
    usual, other = sizes[0], sizes[-1]
    fault = next(compare(spec, graph, (usual, other)), None)
    if fault and fault.size != usual:  # in the second microbatch whatever its size?
        return next(compare(spec, graph, (usual, usual)), fault)
    return fault


def compare_numbers(spec: Spec, graph: Graph, sizes: Sequence[int]) -> Iterator[Fault]:
    """What differs on real data, with the weights that the factory makes, in one microbatch after
    the other and a step of training between them: what forward keeps counts, and what it did at
    its first call alone.

    Both draw from one state of the generator.
    """
    training = really(spec)
    state = copy_state(read_state(graph, training.model))
    where = spec.at("model.factory")
    for number, size in enumerate(sizes, 1):
        inputs = microbatch(spec, training, size)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            with (
                blaming(spec, training, inputs),
                users_errors(where, f"the model fails on a microbatch of {samples(size)}"),
            ):
                expected = run_model(graph, training, [tensor.clone() for tensor in inputs])
            torch.manual_seed(0)
            found = run_graph(graph, state, inputs)
        state |= {
            n: t.clone().requires_grad_(state[n].requires_grad) for n, t in found.kept.items()
        }
        for difference in differences(found, expected, tolerance_of(spec.train.precision, graph)):
            yield Fault(size, f"{difference}, {nth(number, sizes)}")
        train(training, state, expected.gradients)


def train(training: Training, state: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """Take a step of sign descent with the model's weights and with the graph's: what forward made
    of them before, and kept, is of other weights then."""
    weights = dict(state_tensors(training.model))
    with torch.no_grad():
        for name, gradient in gradients.items():
            step = STEP * gradient.to_dense().sgn()  # of complex ones, too
            for weight in (weights[name], state[name]):
                weight.sub_(step)


def nth(number: int, sizes: Sequence[int]) -> str:
    """Which microbatch of some, and what that tells."""
    *before, size = sizes[:number]
    again = kept_question if size in before else ""
    return f"in microbatch {number}, of {samples(size)}{again}"


def compare_listings(spec: Spec, graph: Graph, sizes: Sequence[int]) -> Iterator[Fault]:
    """What differs on tensors without values."""
    built = build_fake(spec)
    training = make_training(spec, built.model, bind(spec, built.model, read_fields(spec)))
    lists: dict[int, list[str]] = {}  # the graph keeps nothing: by size
    for number, size in enumerate(sizes, 1):
        with built.mode:
            given = {i.name: make(i.meta, size) for i in graph.inputs}
        model = dict(state_tensors(built.model))
        with built.mode:
            constants = make_constants(graph, model, held_by_loss(training))
        names = [(f"input {name}", tensor) for name, tensor in given.items()]
        names += [*model.items(), *constants.values()]
        state = {n: t.detach().requires_grad_(t.requires_grad) for n, t in model.items()}
        state |= {fqn: tensor for fqn, (_, tensor) in constants.items()}
        changed = sorted(kept(graph) & model.keys())
        run = partial(users_results, training, given, changed)
        expected = list_operations(run, names, built.mode)
        if size not in lists:
            values: dict[str, object] = {}
            run = partial(graphs_results, graph, state, given, size, changed, values)
            lists[size] = list_operations(run, names, built.mode)
            wrong = [*wrong_shapes(graph, values, size)]
        if difference := first_difference(lists[size], expected):
            yield Fault(size, f"{difference}, {nth(number, sizes)}")
        yield from wrong


def users_results(
    training: Training, given: Mapping[str, Tensor], changed: Sequence[str], _: Listing
) -> dict[str, Tensor]:
    """Run the user's model as it was captured: its loss, and what it leaves changed."""
    with libraries_export():
        results = training.run(*given.values())
    refuse_foreign(training, results[0])
    after = dict(state_tensors(training.model))
    return dict(zip(training.names, results, strict=True)) | {name: after[name] for name in changed}


def graphs_results(
    graph: Graph, state: Mapping[str, Tensor], given: Mapping[str, Tensor], batch: int,
    changed: Sequence[str], values: dict[str, object], _: Listing,
) -> dict[str, Tensor]:  # fmt: skip
    """Run the graph: the same. `values` gets them all."""
    values |= run_ops(graph.ops, graph.canonical, state, given, batch)
    results: dict[str, Any] = {name: values[value] for name, value in graph.outputs}
    return results | {name: state[name] for name in changed}


def make_constants(
    graph: Graph, model: Mapping[str, Tensor], held: Held
) -> dict[str, tuple[str, Tensor]]:
    """Tensors that the graph reads and the model does not hold, without values: fqn -> what a
    listing calls it, tensor."""
    saved = dict(held) | (load(graph.saved) if graph.saved else {})
    found = {}
    for fqn, parameter in graph.parameters.items():
        if fqn not in model:
            tensor = make(parameter.meta, 0)
            found[fqn] = constant_name(saved.get(fqn, tensor)), tensor
    return found


def compare_shapes(graph: Graph, sizes: Sequence[int]) -> Iterator[Fault]:
    """Values that have another shape than the graph says, as `squeeze` makes them of one sample."""
    for size in sizes:
        with fake_mode():
            given = {i.name: make(i.meta, size) for i in graph.inputs}
            state = {fqn: make(p.meta, 0) for fqn, p in graph.parameters.items()}
            values = run_ops(graph.ops, graph.canonical, state, given, size)
        yield from wrong_shapes(graph, values, size)


def wrong_shapes(graph: Graph, values: Mapping[str, object], size: int) -> Iterator[Fault]:
    """Those of one run."""
    for op in graph.ops:
        for name in filter(None, op.outputs):
            value, meta = values[name], graph.values[name]
            if not isinstance(value, Tensor):
                continue
            if list(value.shape) != sizes_of(meta, size):
                what = f"{op.target} gives {list(value.shape)}, not {sizes_of(meta, size)}"
                yield Fault(size, what, op.where)
            elif dtype_name(value.dtype) != meta.dtype:
                what = f"{op.target} gives {dtype_name(value.dtype)}, not {meta.dtype}"
                yield Fault(size, what, op.where)
