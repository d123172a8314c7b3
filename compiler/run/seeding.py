"""Seeds the randomness of a forward layer by layer, so that it is the same under every layout.

Before its first random operation each layer seeds torch's generator by seed, step, microbatch and
its path. A layer that is a module call does so when that call starts. Loose operations belong to no
call that a hook could see: a dispatch mode counts the random operations that each running module
makes by itself, and seeds before the one that is the first of its layer in the graph.
"""

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import RunError
from ..frontend.capture.private import TorchDispatchMode
from ..frontend.capture.schema import draws
from ..ir.graph import CallId, Graph


@dataclass(frozen=True, slots=True)
class RandomLayers:
    """Paths of the layers with random operations, by what starts them."""

    calls: Mapping[CallId, str]
    """A module call that is a layer."""
    loose: Mapping[tuple[CallId, int], str]
    """(a call, the number of a random operation among those that are the call's own)."""
    counts: Mapping[CallId, int]
    """Random operations that are a call's own, where one but the first starts a layer."""
    leaves: frozenset[str]
    """Modules that the graph has as one operation each, whatever they draw."""


def find_random(graph: Graph) -> RandomLayers:
    """Before: the graph has layers."""
    layer_of = {name: layer for layer in graph.layers for name in layer.ops}
    calls: dict[CallId, str] = {}
    loose: dict[tuple[CallId, int], str] = {}
    seen, counts = set[str](), Counter[CallId]()
    for op in graph.ops:
        if not op.random:
            continue
        layer = layer_of[op.name]
        if layer.path not in seen and layer.call is not None:
            calls[layer.call] = layer.path
        elif layer.path not in seen:
            loose[op.call, counts[op.call]] = layer.path
        seen.add(layer.path)
        counts[op.call] += 1
    followed = {call for call, number in loose if number}
    leaves = frozenset(op.call[0] for op in graph.ops if op.target == "ppc.leaf.default")
    return RandomLayers(calls, loose, {call: counts[call] for call in followed}, leaves)


@dataclass(slots=True)
class Seeder:
    """Follows one forward at a time; its methods are the hooks."""

    layers: RandomLayers
    key: str = ""
    """`seed step microbatch`"""
    made: Counter[str] = field(default_factory=Counter)
    """Calls so far, by path."""
    running: list[CallId] = field(default_factory=list)
    drawn: Counter[CallId] = field(default_factory=Counter)
    """Random operations so far that are a call's own."""
    seeded: list[str] = field(default_factory=list)

    def enter(self, path: str) -> None:
        call = path, self.made[path]
        self.made[path] += 1
        self.running.append(call)
        self.seed(self.layers.calls.get(call))

    def leave(self) -> None:
        self.running.pop()

    def draw(self) -> None:
        """A random operation is about to run."""
        call = self.running[-1] if self.running else ("", 0)  # the loss counts as the model's own
        leaf = next((around for around in self.running if around[0] in self.layers.leaves), None)
        if leaf is not None and self.drawn[leaf]:
            return
        call = leaf or call
        self.seed(self.layers.loose.get((call, self.drawn[call])))
        self.drawn[call] += 1

    def seed(self, layer: str | None) -> None:
        if layer is not None:
            torch.manual_seed(zlib.crc32(f"{self.key} {layer}".encode()))
            self.seeded.append(layer)

    @contextmanager
    def microbatch(self, seed: int, step: int, number: int) -> Iterator[None]:
        """Around the forward of one microbatch. Raises RunError if it is not as in the graph."""
        self.key = f"{seed} {step} {number}"
        for record in (self.made, self.running, self.drawn, self.seeded):
            record.clear()
        with DrawCounter(self) if self.layers.loose else ExitStack():
            yield
        self.check()

    def check(self) -> None:
        """Every layer was seeded once, and draws were counted as in the graph."""
        expected = [*self.layers.calls.values(), *self.layers.loose.values()]
        if sorted(self.seeded) != sorted(expected):
            raise RunError(
                f"random layers of the graph: {sorted(expected)}; met in the model: {self.seeded}"
            )
        for call, count in self.layers.counts.items():
            if self.drawn[call] != count:
                raise RunError(
                    f"{call[0] or 'the model'} has {count} random operations in the graph; "
                    f"its own forward drew {self.drawn[call]} times"
                )


class DrawCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class is untyped
    """Tells the seeder of every random operation."""

    def __init__(self, seeder: Seeder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seeder = seeder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if draws(func, args, kwargs):
            self.seeder.draw()
        return func(*args, **kwargs)


@contextmanager
def following(model: nn.Module, graph: Graph) -> Iterator[Seeder]:
    """A seeder that is told of every module call of the model."""
    seeder = Seeder(find_random(graph))
    with ExitStack() as stack:
        if seeder.layers.calls or seeder.layers.loose:
            for path, module in model.named_modules():
                before = module.register_forward_pre_hook(
                    lambda *_, path=path: seeder.enter(path), prepend=True
                )
                after = module.register_forward_hook(lambda *_: seeder.leave(), always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
        yield seeder
