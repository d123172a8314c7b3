"""Report: what the plan should cost, as the simulator and the memory model see it."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slot:
    """One action on the clock, in seconds from the start of the step."""

    rank: int
    label: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes at the peak on one rank, by kind."""

    rank: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    """Receives posted and sends under way."""
    capacity: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


@dataclass(frozen=True, slots=True)
class Report:
    """The predicted step."""

    slots: tuple[Slot, ...]
    """Of replica 0."""
    memory: tuple[Memory, ...]
    makespan_s: float
    bubble: float
    """Idle share of the ranks' time."""
    messages: float
    """What of that share there would not be if messages took no time."""
    live: tuple[int, ...]
    """Peak microbatches in flight, by rank of replica 0."""
    cost: Mapping[str, float]
    """Seconds of the busiest rank, by cause."""
    diagram: tuple[str, ...] = ()
    """The schedule as text, a line for each rank."""
    runners_up: tuple[tuple[str, float, str], ...] = ()
    """(plan, seconds a step, why it lost)."""


@dataclass(frozen=True, slots=True)
class File:
    """A file to write, its path relative to the output folder."""

    path: str
    text: str | bytes

    @property
    def content(self) -> bytes:
        return self.text if isinstance(self.text, bytes) else self.text.encode()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


def show_bytes(count: int) -> str:
    """`1.5 GiB`, for people."""
    size, units = float(count), iter(("bytes", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{count} bytes" if unit == "bytes" else f"{size:.1f} {unit}"


def show_seconds(seconds: float) -> str:
    """`1.5 ms`, for people."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
