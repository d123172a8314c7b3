"""The user's model with values, on the first samples of the data."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from safetensors.torch import load
from torch import Tensor, nn

from ..frontend.capture.blame import blaming_fields
from ..frontend.capture.build import build_model, state_tensors
from ..frontend.capture.fields import bind, read_fields
from ..frontend.capture.foreign import refuse_foreign
from ..frontend.capture.replay import replay
from ..frontend.capture.training import Training, make_training
from ..frontend.samples import read_samples
from ..ir.graph import Graph, Parameter
from ..ir.spec import Spec
from .outcome import Outcome, finish, kept


def really(spec: Spec) -> Training:
    """The user's model with values."""
    model = build_model(spec)
    return make_training(spec, model, bind(spec, model, read_fields(spec)))


def blaming(
    spec: Spec, training: Training, inputs: Sequence[Tensor]
) -> AbstractContextManager[None]:
    """Say of an error which field it comes from."""

    def again(watch: AbstractContextManager[object]) -> None:
        with watch:
            training.run(*inputs)

    named = dict(zip(training.binding.fields, inputs, strict=True))
    return blaming_fields(spec, named, again)


def microbatch(spec: Spec, training: Training, batch: int) -> tuple[Tensor, ...]:
    """The first samples of the data."""
    found = read_samples(spec)
    numbers = [i % found.count for i in range(batch)]
    return found.batch(numbers, training.binding.fields, epoch=0)


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
    loss, *metrics = training.run(*inputs)
    refuse_foreign(training, loss)
    state = dict(state_tensors(training.model))
    return finish(loss, metrics, state, kept(graph) & state.keys())
