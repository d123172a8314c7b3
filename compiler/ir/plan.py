"""Plan: who computes what.

A stage has its own mesh, the ranks that hold it: a rectangular plan is the case where all meshes
are equal in shape. Several meshes may lie over the same ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """Split along a tensor dimension."""

    dim: int

    def __str__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """A full copy on each rank."""

    def __str__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Partial:
    """Each rank holds a term; the reduction of the terms is the value."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"Partial({self.op})"


Placement = Shard | Replicate | Partial


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks laid out along named axes, the last varying fastest."""

    axes: tuple[tuple[str, int], ...]
    """(name, size); () for one rank."""
    ranks: tuple[int, ...]

    def coords(self, rank: int) -> dict[str, int]:
        """The rank's index along each axis."""
        index, result = self.ranks.index(rank), {}
        for name, size in reversed(self.axes):
            index, result[name] = divmod(index, size)
        return result

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axis` only."""
        fixed = {name: i for name, i in self.coords(rank).items() if name != axis}
        return tuple(
            other
            for other in self.ranks
            if all(self.coords(other)[n] == i for n, i in fixed.items())
        )

    def __str__(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.axes) or "one rank"
        return f"{axes}: {', '.join(map(str, self.ranks))}"


@dataclass(frozen=True, slots=True)
class Stage:
    """A run of layers and the ranks that hold them."""

    index: int
    layers: tuple[int, ...]
    """Indices into Graph.layers."""
    mesh: Mesh
    time_s: float = 0.0
    """Estimated forward and backward of a full microbatch."""


@dataclass(frozen=True, slots=True)
class Plan:
    """No "auto" from here on."""

    stages: tuple[Stage, ...]
    placements: Mapping[str, tuple[tuple[int, tuple[tuple[str, Placement], ...]], ...]]
    """fqn -> ((stage, ((axis, placement), ...)), ...): one entry for each stage that holds it."""
    global_batch: int
    microbatches: int
    """Of each replica."""
    even: bool
    """Every microbatch of every step has the same size."""
    bucket_bytes: int = 2**22
    """Gradients that the replicas of a stage sum in one message, or a little more."""
    recompute: tuple[str, ...] = ()
    """Paths of the modules whose activations are computed again in the backward."""
    rerun: bool = False
    """Stages keep only what they receive, and run again before each backward; not one that goes
    back at once after each forward."""
    sync_norms: bool = False
    """Replicas normalise together: microbatch k of them all, in the batch norms that count."""
    versions: int = 1
    """Weight versions alive at once."""

    @property
    def replicas(self) -> int:
        """Ranks that hold a copy of each stage; a rectangular plan has as many of every one."""
        return len(self.stages[0].mesh.ranks)

    @property
    def world_size(self) -> int:
        return 1 + max(rank for stage in self.stages for rank in stage.mesh.ranks)

    def sizes(self, samples: int) -> tuple[int, ...]:
        """Sizes of all microbatches of a step with this many samples: in order, differing by at
        most one. Microbatch i is number i // replicas of replica i % replicas, so the short ones at
        the end are spread over the replicas."""
        parts = self.microbatches * self.replicas
        size, larger = divmod(samples, parts)
        return tuple(size + (i < larger) for i in range(parts))

    @property
    def microbatch_size(self) -> int:
        """The largest microbatch of a full step."""
        return self.sizes(self.global_batch)[0]

    def replica_of(self, stage: int, microbatch: int) -> int:
        """The rank of `stage` that computes this microbatch of the global batch."""
        ranks = self.stages[stage].mesh.ranks
        return ranks[microbatch % len(ranks)]

    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """By replica the ranks of its stages, in order: what passes microbatches on."""
        return tuple(zip(*(stage.mesh.ranks for stage in self.stages), strict=True))

    def twins(self) -> Mapping[int, int]:
        """Rank -> the rank of replica 0 that holds the same. What holds for the one holds for the
        other, so it is made, and looked at, once."""
        first, *others = self.pipelines()
        pairs = (pair for ranks in (first, *others) for pair in zip(ranks, first, strict=True))
        return dict(pairs)
