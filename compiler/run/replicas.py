"""The reference's replicas: one model that takes up each one's buffers in turn, or a model each."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..frontend.capture.training import Training
from ..ir.graph import Graph
from ..ir.spec import Spec
from .observe import Tensors, copy
from .seeding import Seeder, following
from .together import Together


def make_replicas(spec: Spec, training: Training) -> "Replicas | Together":
    if spec.parallel.sync_batch_norm and spec.parallel.data > 1:
        return Together(training, spec.parallel.data)
    return Replicas(training, spec.parallel.data)


class Replicas:
    """The buffers of each replica; the model's own are those of the one that was entered last."""

    def __init__(self, training: Training, count: int) -> None:
        self.trainings, self.model, self.here = (training,), training.model, 0
        self.buffers = [self.own() for _ in range(count)]

    @contextmanager
    def following(self, graph: Graph) -> Iterator[list[Seeder]]:
        with following(self.model, graph) as seeder:
            yield [seeder]

    def run(self, calls: Sequence[Callable[[], tuple[Tensor, ...]]]) -> list[tuple[Tensor, ...]]:
        return [call() for call in calls]

    def own(self) -> dict[str, Tensor]:
        """Copies of the model's buffers."""
        named = self.model.named_buffers(remove_duplicate=False)
        return {name: copy(tensor) for name, tensor in named}

    def enter(self, replica: int) -> None:
        if replica != self.here:
            self.buffers[self.here] = self.own()
            self.load(replica)

    def load(self, replica: int) -> None:
        overwrite(dict(self.model.named_buffers(remove_duplicate=False)), self.buffers[replica])
        self.here = replica

    def copies(self) -> tuple[Tensors, ...]:
        self.buffers[self.here] = self.own()
        return tuple(dict(buffers) for buffers in self.buffers)

    def overwrite(self, states: Sequence[Tensors]) -> None:
        """Take over what each replica's state has of them."""
        self.buffers[self.here] = self.own()
        for buffers, state in zip(self.buffers, states, strict=True):
            overwrite(buffers, state)
        self.load(self.here)


def overwrite(held: Tensors, values: Tensors) -> None:
    """Take over the values that fit; what does not is found by comparing."""
    with torch.no_grad():
        for name, tensor in held.items():
            if name in values and values[name].shape == tensor.shape:
                value = values[name]
                tensor.copy_(value.sparse_mask(tensor.coalesce()) if tensor.is_sparse else value)
