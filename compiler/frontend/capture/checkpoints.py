"""The user's own torch.utils.checkpoint: run as plain calls, and noted, to be emitted as recompute.

A checkpoint changes when values are computed, not which: what a script computes again is decided
for whole modules, so a region stands for the modules that it calls.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from ...errors import Location
from .training import Training
from .user import call_site


@dataclass(slots=True)
class Region:
    """A checkpoint under way."""

    depth: int
    """Of module calls around it."""
    paths: list[str] = field(default_factory=list)
    """Modules that it calls itself."""


@dataclass(slots=True)
class Regions:
    """Follows one forward at a time."""

    depth: int = 0
    open: list[Region] = field(default_factory=list)
    paths: dict[str, None] = field(default_factory=dict)
    """Modules to compute again, in order."""
    lone: list[Location | None] = field(default_factory=list)
    """Where a checkpoint calls no module."""

    @contextmanager
    def around(self) -> Iterator[None]:
        """Around what a checkpoint calls."""
        region = Region(self.depth)
        self.open.append(region)
        yield
        self.open.pop()
        self.paths.update(dict.fromkeys(region.paths))
        if not region.paths:
            self.lone.append(call_site())

    def enter(self, path: str) -> None:
        if self.open and self.open[-1].depth == self.depth:
            self.open[-1].paths.append(path)
        self.depth += 1

    def leave(self) -> None:
        self.depth -= 1


@contextmanager
def noting_checkpoints(training: Training) -> Iterator[Regions]:
    """Regions that are told of every module call and checkpoint of the model."""
    regions, handles = Regions(), []
    training.around = regions.around
    for path, module in training.model.named_modules():
        before = module.register_forward_pre_hook(lambda *_, path=path: regions.enter(path))
        after = module.register_forward_hook(lambda *_: regions.leave(), always_call=True)
        handles += [before, after]
    try:
        yield regions
    finally:
        training.around = nullcontext
        for handle in handles:
            handle.remove()
