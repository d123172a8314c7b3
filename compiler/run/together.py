"""Replicas that normalise together.

Microbatch k of all replicas goes through as many copies of the user's model, which share its
parameters and have buffers of their own. They take turns: a copy runs until it comes to a batch
norm, then the next one does; when all have come there, each norm is torch's own, on the samples of
all copies, and gives its copy its part. Autograd does the rest.

Each copy runs in a thread, since a forward can be left in its middle in no other way; one runs at a
time, and torch's generator is each one's own, so it is as if each ran alone.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Event, Thread
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..errors import RunError
from ..frontend.capture.training import Training
from ..ir.graph import Graph
from .observe import Tensors
from .observe import copy as copied
from .seeding import Seeder, following

T = TypeVar("T")
differ = "the replicas do not come to the same batch norms"
classes = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Turns:
    """Callers of which one runs at a time, until it gives a tensor and waits for those of all."""

    def __init__(self, count: int) -> None:
        self.batons = [Event() for _ in range(count)]
        self.given: list[Tensor] = [torch.empty(0)] * count
        self.met = [0] * count
        """How often each has given one."""
        self.all: tuple[Tensor, ...] = ()
        self.failed = False

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """The results of the calls, or what the first that fails raises."""
        results: list[T] = []
        errors: list[BaseException] = []

        def one(index: int) -> None:
            self.wait(index)
            try:
                if not self.failed:
                    results.append(calls[index]())
            except BaseException as error:  # noqa: BLE001  # raised again where the threads end
                errors.append(error)
                self.fail()
            self.pass_on(index)

        with torch.random.fork_rng(devices=[]):
            threads = [Thread(target=one, args=(index,)) for index in range(len(calls))]
            for thread in threads:
                thread.start()
            self.batons[0].set()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        return results

    def fail(self) -> None:
        """Wake all, who then fail too."""
        self.failed = True
        for baton in self.batons:
            baton.set()

    def wait(self, index: int) -> None:
        self.batons[index].wait()
        self.batons[index].clear()

    def pass_on(self, index: int) -> None:
        self.batons[(index + 1) % len(self.batons)].set()

    def meet(self, index: int, tensor: Tensor) -> tuple[Tensor, ...]:
        """What all callers give when they come here."""
        self.given[index] = tensor
        self.met[index] += 1
        if index == len(self.batons) - 1:
            if len(set(self.met)) > 1:
                raise RunError(differ)
            self.all = tuple(self.given)
        state = torch.get_rng_state()
        self.pass_on(index)
        self.wait(index)
        torch.set_rng_state(state)
        if self.failed or self.met[index] != self.met[-1]:
            raise RunError(differ)
        return self.all


class Together:
    """Replicas that normalise together: a model for each, the first one the user's own."""

    def __init__(self, training: Training, count: int) -> None:
        known = {id(parameter): parameter for parameter in training.parameters()}
        others = [copy.deepcopy(training, dict(known)) for _ in range(count - 1)]
        self.trainings = (training, *others)
        self.turns = Turns(0)

    @contextmanager
    def following(self, graph: Graph) -> Iterator[list[Seeder]]:
        """A seeder for each; meanwhile their norms in training mode normalise together."""
        with ExitStack() as stack:
            for index, training in enumerate(self.trainings):
                for norm in training.model.modules():
                    if isinstance(norm, classes) and norm.training:
                        norm.forward = partial(self.normalise, index, norm.forward)  # type: ignore[method-assign]
                        stack.callback(norm.__dict__.pop, "forward")
            yield [stack.enter_context(following(t.model, graph)) for t in self.trainings]

    def normalise(self, index: int, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A norm's own forward on the samples of all; the part that is x's."""
        together = self.turns.meet(index, x)
        begin = sum(map(len, together[:index]))
        return forward(torch.cat(together))[begin : begin + len(x)]

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """One call for each of them."""
        self.turns = Turns(len(calls))
        return self.turns.run(calls)

    def enter(self, replica: int) -> None:
        """Each has buffers of its own."""

    @property
    def buffers(self) -> list[dict[str, Tensor]]:
        return [dict(t.model.named_buffers(remove_duplicate=False)) for t in self.trainings]

    def copies(self) -> tuple[Tensors, ...]:
        return tuple({n: copied(t) for n, t in buffers.items()} for buffers in self.buffers)

    def overwrite(self, states: Sequence[Tensors]) -> None:
        """Take over what each replica's state has of the buffers."""
        for buffers, state in zip(self.buffers, states, strict=True):
            for name in buffers.keys() & state.keys():
                buffers[name].copy_(state[name])
