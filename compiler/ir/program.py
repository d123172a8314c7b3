"""Program: everything one rank runs, from the start of the job to its end.

Transfers are explicit. An edge is a one-way stream of messages between two ranks: the receiver gets
them in the order in which they were sent. A message holds one microbatch's values (or gradients).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from .graph import TensorMeta
from .schedule import Action


@dataclass(frozen=True, slots=True)
class Edge:
    """Messages of one kind from one rank to another."""

    name: str
    """`activations 0->1`, `gradients 1->0`: by the stages, so that replicas, whose messages go
    between other ranks, run the very same instructions."""
    kind: Literal["activations", "gradients"]
    source: int
    target: int
    stages: tuple[int, int]
    """Of the sender and of the receiver."""
    values: tuple[tuple[str, TensorMeta], ...]
    """What each message holds, in order."""
    window: int
    """Sends that may be under way before the sender waits for the oldest."""
    ahead: int
    """Receives that are posted ahead of the one being waited for."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A microbatch in terms of the innermost loop around it: `offset + stride x loop index`."""

    offset: int
    stride: int = 0

    def __str__(self) -> str:
        if not self.stride:
            return str(self.offset)
        index = {1: "i", -1: "-i"}.get(self.stride, f"{self.stride}*i")
        return f"{index}+{self.offset}" if self.offset else index


@dataclass(frozen=True, slots=True)
class Post:
    """Post the receive of the edge's next message, if one is left in this step."""

    edge: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the receive of this microbatch's message."""

    edge: str
    microbatch: Microbatch


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an action of the schedule."""

    action: Action
    """In a loop, that of the first iteration."""
    microbatch: Microbatch


@dataclass(frozen=True, slots=True)
class Send:
    """Start to send this microbatch's message; wait for the oldest first if the window is full."""

    edge: str
    microbatch: Microbatch


@dataclass(frozen=True, slots=True)
class Flush:
    """Wait for every send under way on the edge."""

    edge: str


@dataclass(frozen=True, slots=True)
class Collective:
    """All ranks of a group combine a value: tied gradients, the norm, the metrics."""

    kind: str
    """all_reduce | all_gather | reduce_scatter | all_to_all"""
    value: str
    """`gradient of wte.weight`, `gradients of stage 1`, `norm`, `loss`"""
    group: tuple[int, ...]
    bucket_bytes: int = 0
    """Not 0: it runs in buckets of about so many bytes, each as soon as the last backward of the
    step has made it; what stands here is the wait for them all."""


@dataclass(frozen=True, slots=True)
class Update:
    """Clip, step the optimizer, clear the gradients."""

    clip: bool


@dataclass(frozen=True, slots=True)
class Log:
    """Print and append to metrics.jsonl."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All ranks write, after every so many steps, what the next step hangs on."""

    group: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """Write this rank's part of the weights."""


@dataclass(frozen=True, slots=True)
class Eval:
    """Run the evaluation; not emitted yet."""


@dataclass(frozen=True, slots=True)
class Loop:
    """Repeat the body; `count` is a number, or STEPS for the training loop."""

    count: int | Literal["STEPS"]
    body: tuple["Instruction", ...]


Communication = Post | Wait | Send | Flush | Collective
Instruction = Communication | Compute | Update | Log | Checkpoint | Save | Eval | Loop


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's whole job."""

    rank: int
    coords: Mapping[str, int]
    stages: tuple[int, ...]
    edges: tuple[Edge, ...]
    """Those that start or end here, in the order in which all ranks make their groups."""
    groups: tuple[tuple[int, ...], ...]
    """Every group of the job, in that order: each rank takes part in making each."""
    norm_groups: tuple[tuple[int, ...], ...]
    """The same of those that normalise together; their messages wait for no bucket of gradients."""
    live: int
    """Most microbatches between their F and their B at once."""
    rerun: bool
    """Whether a forward keeps only what it is given, and runs again before its backward."""
    actions: tuple[Instruction, ...]

    def __str__(self) -> str:
        return f"rank {self.rank}\n" + "".join(f"  {line}\n" for line in lines(self.actions))


def unroll(actions: Iterable[Instruction], steps: int = 1) -> Iterator[Instruction]:
    """What the instructions come to, without loops; the training loop runs `steps` times."""
    for action in actions:
        if not isinstance(action, Loop):
            yield action
            continue
        body = tuple(unroll(action.body))
        if action.count == "STEPS":
            for _ in range(steps):
                yield from body
        else:
            for index in range(action.count):
                yield from (at_index(inner, index) for inner in body)


def at_index(action: Instruction, index: int) -> Instruction:
    """An instruction in one iteration of its loop."""
    if not isinstance(action, Compute | Wait | Send) or not action.microbatch.stride:
        return action
    microbatch = action.microbatch.offset + action.microbatch.stride * index
    if isinstance(action, Compute):
        return Compute(replace(action.action, microbatch=microbatch), Microbatch(microbatch))
    return replace(action, microbatch=Microbatch(microbatch))


def lines(actions: Iterable[Instruction]) -> Iterator[str]:
    """The printed form, loops indented."""
    for action in actions:
        if isinstance(action, Loop):
            yield f"{action.count} x"
            yield from (f"  {line}" for line in lines(action.body))
        elif isinstance(action, Compute):
            yield f"{action.action.stage}{action.action.kind}({action.microbatch})"
        else:
            fields = [getattr(action, name) for name in type(action).__slots__]
            if isinstance(action, Collective) and not action.bucket_bytes:
                fields.pop()
            yield " ".join([type(action).__name__, *map(str, fields)])
