"""Unit: what one stage computes on one rank. Emission lifts units, never the graph.

Units are the graph's ops cut by stages, with what a stage needs from others made explicit: values
received and sent, parameters held, ops computed again here instead of being received (sunk).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .graph import CallId, Input, Op, TensorMeta


@dataclass(frozen=True, slots=True)
class Transfer:
    """One value that goes from a stage to a later one; its gradient, if any, comes back."""

    value: str
    source: int
    target: int
    meta: TensorMeta
    gradient: bool

    def __str__(self) -> str:
        back = ", gradient back" if self.gradient else ""
        return f"{self.value}: {self.meta} stage {self.source} -> {self.target}{back}"


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective inside a stage's forward, with its adjoint in the backward."""

    kind: str
    """all_reduce | all_gather | reduce_scatter | all_to_all"""
    value: str
    """What it is of: `statistics of norm`."""
    axis: str
    adjoint: str
    op: str
    """Name of the op that it is part of."""


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter or buffer on this stage, under the name by which the stage's ops read it."""

    fqn: str
    """Its name here; for a tied parameter, the alias owned by the module that uses it."""
    canonical: str
    aliases: tuple[str, ...]
    """Further names under which this stage saves it."""
    stages: tuple[int, ...]
    """All stages that hold it; the first counts it in the norm."""
    trainable: bool
    """False for a buffer or a frozen parameter: there is no gradient to sum over the stages."""
    reached: bool = True
    """Whether a backward of this stage comes to it; without, its gradient stays None."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A stage on one rank. Shapes are local."""

    stage: int
    rank: int
    ops: tuple[Op, ...]
    values: Mapping[str, TensorMeta]
    inputs: tuple[Input, ...]
    """Fields of the data that it reads."""
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]
    state: tuple[Held, ...]
    sunk: frozenset[str] = frozenset()
    """Names of ops that are computed here and in other stages too."""
    collectives: tuple[Collective, ...] = ()
    seeds: tuple[tuple[str, str], ...] = ()
    """(op, layer path): before this op the generator is seeded by step, microbatch and path."""
    outputs: tuple[tuple[str, str], ...] = ()
    """The graph's outputs that it computes: (name, value)."""
    calls: tuple[CallId, ...] = ()
    """Module calls that are whole here, outermost first."""

    @property
    def summed(self) -> tuple[str, ...]:
        """Names of the parameters whose gradients the replicas of this stage sum: no other stage
        holds them."""
        mine = (h for h in self.state if h.trainable and h.reached and len(h.stages) == 1)
        return tuple(held.fqn for held in mine)

    @property
    def has_backward(self) -> bool:
        """Whether a gradient comes back to this stage: it ends in the loss or sends what has one,
        and has something to train or to send one on to."""
        begins = bool(self.outputs) or any(t.gradient for t in self.sends)
        ends = any(held.trainable for held in self.state) or any(t.gradient for t in self.receives)
        return begins and ends
