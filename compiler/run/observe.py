"""Watch an emitted script train, without a change to it.

    python -m ppc.run.observe FOLDER FORWARDS DEVICE SCRIPT [ARGUMENT...]

Runs the script as Python would and leaves FOLDER/rank<RANK>.pt, a Recording: what the rank's stage
held before its first forward, what every optimizer step read and what it left, and what there was
at the end, all by the names in the user's model. It relies on this of a script: the first module
that it calls is the stage, and the optimizer was given the stage's `named_parameters()`. A stage
that is all frozen has no optimizer, hence no steps.

FORWARDS is `all`, or for each rank, with commas between, after how many forwards of its stage,
those of the steps to be seen, to stop.
A rank that feeds itself stops before the next forward, with exit code 0. The others cannot go on
then: an error that comes of it, when all their steps are done, ends them with exit code 0, too.

DEVICE is the kind of device that the script is for: its autocast's lists apply here, too.
"""

import os
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..errors import RunError
from ..frontend.capture.autocast import lists_of

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the optimizer."""

    gradients: Tensors
    """As the optimizer reads them: summed over microbatches, clipped."""
    state: Tensors
    """Parameters and buffers after it, before the next forward."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What one rank did. Tensors are copies on the CPU, of the dtype that they had."""

    rank: int
    initial: Tensors
    """Parameters and buffers before the first forward; a tied one under each of its names."""
    steps: tuple[Step, ...]
    final: Tensors
    """Parameters and buffers at the end of the script."""


class EnoughSeenExit(SystemExit):
    """Ends a script that has run the forwards asked for; exit code 0."""


class Observer:
    """What has been seen so far; its methods are the hooks."""

    def __init__(self, max_forwards: int | None = None) -> None:
        self.max_forwards, self.forwards, self.updated = max_forwards, 0, False
        self.stage: nn.Module | None = None
        self.initial: dict[str, Tensor] = {}
        self.read: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] | None = None
        """Of a step whose state has not been taken."""
        self.steps: list[Step] = []
        self.first = register_module_forward_pre_hook(self.before_first)

    def before_first(self, module: nn.Module, inputs: Any) -> None:
        """The stage is called for the first time; a hook on all modules would be compiled into it,
        where it is compiled, so from here on there is one on the stage."""
        self.first.remove()
        self.stage, self.initial = module, state_of(module)
        module.register_forward_pre_hook(self.before_forward)
        self.before_forward(module, inputs)

    def before_forward(self, _module: nn.Module, _inputs: Any) -> None:
        self.take()
        if self.forwards == self.max_forwards:
            raise EnoughSeenExit(0)
        self.forwards, self.updated = self.forwards + 1, False

    def before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if any("param_names" not in group for group in optimizer.param_groups):
            raise RunError("this optimizer has no names", hint="give it stage.named_parameters()")
        self.take()  # of a step after which no sample came to this rank
        self.read = {
            name: copy(parameter.grad)
            for group in optimizer.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
            if parameter.grad is not None
        }

    def after_step(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self.gradients, self.updated = self.read, True

    def take(self) -> None:
        """Note a step when all that follows it has been done: the script may change weights
        once more."""
        if self.gradients is not None:
            self.steps.append(Step(self.gradients, state_of(self.stage)))
            self.gradients = None

    @property
    def done(self) -> bool:
        """Whether all that was asked for has been seen."""
        if self.stage is None or self.forwards != self.max_forwards:
            return False
        return self.updated or not any(p.requires_grad for p in self.stage.parameters())

    def recording(self, rank: int) -> Recording:
        self.take()
        return Recording(rank, self.initial, tuple(self.steps), state_of(self.stage))


def state_of(stage: nn.Module | None) -> dict[str, Tensor]:
    """Copies of its parameters and buffers, persistent or not, a tied one under each name."""
    if stage is None:
        return {}
    held = [
        *stage.named_parameters(remove_duplicate=False),
        *stage.named_buffers(remove_duplicate=False),
    ]
    return {name: copy(tensor) for name, tensor in held}


def copy(tensor: Tensor) -> Tensor:
    """On the CPU; of a sparse gradient with all its zeros."""
    if tensor.is_sparse:
        return tensor.detach().to("cpu").to_dense()
    return tensor.detach().to("cpu", copy=True)


@contextmanager
def observing(folder: Path, rank: int, max_forwards: int | None = None) -> Iterator[Observer]:
    """Record while the block runs; write the recording when it ends, even by an exception.

    An exception is passed on, unless `max_forwards` have been seen and all that belongs to them.
    """
    observer = Observer(max_forwards)
    handles = (
        observer.first,
        register_optimizer_step_pre_hook(observer.before_step),
        register_optimizer_step_post_hook(observer.after_step),
    )
    try:
        yield observer
    except Exception:
        if not observer.done:
            raise
    finally:
        for handle in handles:
            handle.remove()
        write(observer.recording(rank), folder)


def write(recording: Recording, folder: Path) -> None:
    """Write it to `rank<RANK>.pt` in the folder, as plain dicts, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"rank{recording.rank}.pt"
    steps = [{"gradients": step.gradients, "state": step.state} for step in recording.steps]
    plain = {"rank": recording.rank, "initial": recording.initial, "steps": steps}
    torch.save(plain | {"final": recording.final}, target.with_suffix(".part"))
    target.with_suffix(".part").rename(target)


def read(folder: Path, world_size: int) -> tuple[Recording, ...]:
    """The recordings of all ranks. Raises RunError for a rank that left none."""
    recordings = []
    for rank in range(world_size):
        path = folder / f"rank{rank}.pt"
        if not path.exists():
            raise RunError(f"rank {rank} of {world_size} left no recording in {folder}")
        plain = torch.load(path, weights_only=True)
        steps = tuple(Step(**step) for step in plain.pop("steps"))
        recordings.append(Recording(steps=steps, **plain))
    return tuple(recordings)


def wrapper(
    folder: Path, max_forwards: Sequence[int] | None = None, device: str = "cpu"
) -> tuple[str, ...]:
    """The arguments that put an observer around a script, for either way to launch.

    `max_forwards`: by rank; `device`: the kind that the script is for.
    """
    forwards = "all" if max_forwards is None else ",".join(map(str, max_forwards))
    return "-m", "ppc.run.observe", str(folder.absolute()), forwards, device


def main() -> None:
    """Run the script named on the command line under observation."""
    folder, forwards, device, script, *arguments = sys.argv[1:]
    rank = int(os.environ["RANK"])
    max_forwards = None if forwards == "all" else int(forwards.split(",")[rank])
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).absolute().parent)
    with lists_of(device), observing(Path(folder), rank, max_forwards):
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
