"""What a spec says of the training: how long, in what precision, by which optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

Option = None | bool | int | float | str | tuple["Option", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parameters that the optimizer treats apart."""

    params: tuple[str, ...]
    """Patterns, as of files, for the names in the user's model; a tied parameter has its first."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """Arguments, `lr` among them, where they differ from the optimizer's."""

    def matches(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """A class of torch.optim and its arguments."""

    name: str = "AdamW"
    """As torch writes it."""
    lr: float = 1e-3
    options: Mapping[str, Option] = field(default_factory=dict)
    """Arguments by torch's names, where they differ from torch's defaults."""
    groups: tuple[Group, ...] = ()
    """A parameter is in the first that matches it; the rest have the options above."""

    def group_of(self, name: str) -> int:
        """The number of a parameter's group; that of the rest is the number of groups."""
        found = (i for i, group in enumerate(self.groups) if group.matches(name))
        return next(found, len(self.groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class LrSchedule:
    """The learning rate by step: linear warm-up to lr, then the named course.

    With i the step, counted from 0, and n the steps of the training:
      constant      lr
      linear        down to final x lr at step n
      cosine        the same along half a cosine
      one_cycle     from lr / div_factor up to lr at step pct_start x n - 1, then down to the first
                    rate / final_div_factor at the last step, both along half a cosine, as
                    torch.optim.lr_scheduler.OneCycleLR
      step          x gamma after each `every` steps, counted from the end of the warm-up
      inverse_sqrt  lr x sqrt(warmup / (i + 1)), or lr / sqrt(i + 1) without a warm-up
      a callable    lr x the factor that it makes of i, during the warm-up as well
    """

    name: str = "constant"
    """Or `file.py:callable`, `package.module:callable`."""
    warmup: int = 0
    """Steps; step i of them runs at lr x (i + 1) / warmup."""
    final: float = 0.0
    """A fraction of lr."""
    pct_start: float = 0.3
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    every: int | None = None
    gamma: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    global_batch: int = 32
    """Samples in a step."""
    steps: int | None = 100
    """None where epochs is set."""
    epochs: int | None = None
    optimizer: Optimizer = Optimizer()
    lr_schedule: LrSchedule = LrSchedule()
    clip_norm: float | None = None
    """Greatest norm of the whole model's gradient; None: not clipped."""
    clip_value: float | None = None
    """Greatest element of it, up and down; None: not clipped."""
    after_step: str | None = None
    """`file.py:callable` or `package.module:callable`, called with each stage's module under
    torch.no_grad() after every step of the optimizer. It changes parameters, in place."""
    precision: Literal["fp32", "fp64", "bf16"] = "fp32"
    """bf16: weights, gradients and the optimizer in fp32, forward under torch.autocast."""
    compile: bool = False
    """Whether each stage's forward goes through torch.compile."""
    seed: int = 0
    timeout: float = 600.0
    """Seconds of any wait on another rank."""
