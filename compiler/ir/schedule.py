"""Schedule: in what order each rank computes, and nothing about communication.

An action prints as torch.distributed.pipelining writes it: stage, kind, microbatch, so `0F3` is the
forward of microbatch 3 on stage 0. A rank's row has a warm-up that runs once, a period that repeats
and a drain that runs once at the end; a schedule that flushes has an empty warm-up and drain, and
one step as its period.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate


class Kind(StrEnum):
    """What an action does; the first four are PyTorch's letters."""

    F = "F"  # forward
    B = "B"  # backward: input and weight gradients
    I = "I"  # noqa: E741  # backward, input gradients only; the letter that PyTorch uses
    W = "W"  # backward, weight gradients only
    REDUCE = "Reduce"
    UPDATE = "Update"
    ROUTE = "Route"
    LOOKUP = "Lookup"
    SYNC = "Sync"
    EVAL = "Eval"
    SAVE = "Save"


@dataclass(frozen=True, slots=True)
class Action:
    """One slot of one rank."""

    stage: int
    kind: Kind
    microbatch: int
    """Within the period."""
    version: int = 0
    """Weight version, counted back from the newest."""

    def __str__(self) -> str:
        version = f"v{self.version}" if self.version else ""
        return f"{self.stage}{self.kind}{self.microbatch}{version}"


def parse_action(text: str) -> Action:
    """The inverse of str(action). Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+)([A-Z][a-z]*)(\d+)(?:v(\d+))?", text)
    if match is None:
        raise ValueError(f"{text!r} is not an action such as 0F3")
    stage, kind, microbatch, version = match.groups()
    return Action(int(stage), Kind(kind), int(microbatch), int(version or 0))


@dataclass(frozen=True, slots=True)
class Row:
    """The actions of one rank."""

    rank: int
    warmup: tuple[Action, ...]
    period: tuple[Action, ...]
    drain: tuple[Action, ...]

    @property
    def actions(self) -> tuple[Action, ...]:
        """Warm-up, one period and drain."""
        return (*self.warmup, *self.period, *self.drain)

    @property
    def live(self) -> int:
        """Most microbatches between their F and their B (or W) at once."""
        change = {Kind.F: 1, Kind.B: -1, Kind.W: -1}
        return max(accumulate((change.get(action.kind, 0) for action in self.actions), initial=0))


@dataclass(frozen=True, slots=True)
class Schedule:
    """A row for each rank."""

    name: str
    microbatches: int
    """In one period."""
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return "".join(
            f"rank {row.rank} | {' '.join(map(str, row.actions))}\n" for row in self.rows
        )
