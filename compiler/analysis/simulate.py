"""Simulate: run programs on a clock.

What a rank can be held up by decides the result, not who runs first, so each rank is run as far as
it comes and is woken when what it waits for is done; times are the latest of what came before.

A transfer or collective is an operation that each of its ranks puts at the end of a queue. It
starts when it is first in all of them, and holds them while its bytes are on the wire. Which queue
is what tells the transports apart:

by_group   NCCL: one queue for each communicator; an operation starts after the compute that was
           queued before it, and waits hold up the computes behind them
by_edge    gloo: transfers on different edges never hold up each other
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field

from ..ir.program import (
    Collective,
    Compute,
    Edge,
    Flush,
    Instruction,
    Post,
    Program,
    Send,
    Wait,
    lines,
    unroll,
)
from ..ir.report import Slot
from ..ir.schedule import Kind


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds that things take; what is not named takes none."""

    compute_s: Mapping[tuple[int, Kind], float]
    """(stage, kind)."""
    latency_s: Mapping[str, float] = field(default_factory=dict)
    """By name of the edge: from the end of a message's bytes to its arrival."""
    transfer_s: Mapping[str, float] = field(default_factory=dict)
    """By name of the edge: bytes over bandwidth of a message, in which no other can start."""
    collective_s: Mapping[str, float] = field(default_factory=dict)
    """By what is combined."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """A rank that would wait for ever, and where."""

    rank: int
    instruction: str

    def __str__(self) -> str:
        return f"rank {self.rank} waits at {self.instruction}"


@dataclass(frozen=True, slots=True)
class Simulation:
    """What happened; with ranks stuck, up to there."""

    slots: tuple[Slot, ...]
    """Computes, by rank and start."""
    makespan_s: float
    bubble: float
    """Share of the ranks' time in which they do not compute."""
    live: tuple[int, ...]
    """Most microbatches between their F and their B at once, in the order of the programs."""
    stuck: tuple[Stuck, ...] = ()


def by_group(edge: Edge) -> Hashable:
    """The queue of NCCL: the communicator of the edge's group."""
    return (edge.source, edge.target)


def by_edge(edge: Edge) -> Hashable:
    """The queue of gloo: each edge its own."""
    return edge.name


def simulate(
    programs: tuple[Program, ...],
    clock: Clock,
    *,
    steps: int = 1,
    buffered: bool = False,
    window: int | None = None,
    queue_of: Callable[[Edge], Hashable] = by_group,
) -> Simulation:
    """Run the programs for so many steps: all of a job, or those of some replicas; ranks that are
    not among them are taken to come to their collectives in time.

    A send is done when its receive is; `buffered`: at once. `window` takes the place of the edges'
    own: 0 makes each send wait for its receive.
    """
    present = frozenset(program.rank for program in programs)
    network = Network(clock, queue_of, present, buffered=buffered)
    ranks = [Rank(program, network, window) for program in programs]
    runs = {rank.program.rank: rank.run(steps) for rank in ranks}
    ready = deque(runs)
    while ready:
        name = ready.popleft()
        operation = next(runs[name], None)
        if operation is not None:
            operation.waiting.append(name)
        ready += network.woken
        network.woken.clear()
    makespan = max(rank.now for rank in ranks)
    busy = sum(slot.end_s - slot.start_s for rank in ranks for slot in rank.slots)
    return Simulation(
        slots=tuple(slot for rank in ranks for slot in rank.slots),
        makespan_s=makespan,
        bubble=1 - busy / (makespan * len(ranks)) if makespan else 0.0,
        live=tuple(rank.peak for rank in ranks),
        stuck=tuple(Stuck(r.program.rank, next(lines([r.at]))) for r in ranks if r.at),
    )


@dataclass(slots=True)
class Operation:
    """A transfer or collective under way."""

    duration_s: float
    latency_s: float
    missing: int
    """Queues in which it is not first yet."""
    queues: list[tuple[int, Hashable]] = field(default_factory=list)
    start_s: float = 0.0
    done_s: float | None = None
    waiting: list[int] = field(default_factory=list)
    """Ranks to wake when it is done."""


class Network:
    """The queues of operations between all ranks."""

    def __init__(
        self,
        clock: Clock,
        queue_of: Callable[[Edge], Hashable],
        present: frozenset[int],
        *,
        buffered: bool,
    ) -> None:
        self.clock, self.queue_of, self.present = clock, queue_of, present
        self.buffered = buffered
        self.operations: dict[tuple[object, int], Operation] = {}
        self.queues: dict[tuple[int, Hashable], deque[Operation]] = {}
        self.free_s: dict[tuple[int, Hashable], float] = {}
        self.woken: list[int] = []

    def send(self, edge: Edge, number: int, now: float) -> Operation:
        """The sender's half of message `number` of an edge."""
        operation = self.message(edge, number)
        if self.buffered:
            self.arrive(operation, now)
            return Operation(0.0, 0.0, missing=0, done_s=now)
        self.enqueue(operation, (edge.source, self.queue_of(edge)), now)
        return operation

    def receive(self, edge: Edge, number: int, now: float) -> Operation:
        """The receiver's half."""
        operation = self.message(edge, number)
        self.enqueue(operation, (edge.target, self.queue_of(edge)), now)
        return operation

    def message(self, edge: Edge, number: int) -> Operation:
        transfer = self.clock.transfer_s.get(edge.name, 0.0)
        latency = self.clock.latency_s.get(edge.name, 0.0)
        key = ((edge.kind, edge.source, edge.target), number)
        return self.operations.setdefault(key, Operation(transfer, latency, missing=2))

    def collective(self, rank: int, collective: Collective, number: int, now: float) -> Operation:
        """One rank's part in the collective that it runs as the `number`-th of its kind."""
        duration = self.clock.collective_s.get(collective.value, 0.0)
        missing = len(self.present.intersection(collective.group))
        operation = self.operations.setdefault(
            (collective, number), Operation(duration, 0.0, missing)
        )
        self.enqueue(operation, (rank, collective.group), now)
        return operation

    def enqueue(self, operation: Operation, key: tuple[int, Hashable], now: float) -> None:
        operation.queues.append(key)
        operation.start_s = max(operation.start_s, now)
        queue = self.queues.setdefault(key, deque())
        queue.append(operation)
        if len(queue) == 1:
            self.arrive(operation, self.free_s.get(key, 0.0))

    def arrive(self, operation: Operation, now: float) -> None:
        """An operation is first in one more of its queues; start all that can start for it."""
        first = [(operation, now)]
        while first:
            operation, now = first.pop()
            operation.start_s = max(operation.start_s, now)
            operation.missing -= 1
            if operation.missing:
                continue
            end = operation.start_s + operation.duration_s
            operation.done_s = end + operation.latency_s
            self.woken += operation.waiting
            for key in operation.queues:
                queue = self.queues[key]
                queue.popleft()
                self.free_s[key] = end
                if queue:
                    first.append((queue[0], end))


class Rank:
    """One rank's program under way."""

    def __init__(self, program: Program, network: Network, window: int | None) -> None:
        self.program, self.network, self.window = program, network, window
        self.edges = {edge.name: edge for edge in program.edges}
        step = [action for action in unroll(program.actions) if isinstance(action, Wait)]
        self.messages = {name: sum(w.edge == name for w in step) for name in self.edges}
        self.posted: dict[str, list[Operation]] = {name: [] for name in self.edges}
        self.sent: dict[str, list[Operation]] = {name: [] for name in self.edges}
        self.waited = dict.fromkeys(self.edges, 0)
        """Receives (of an edge that ends here) or sends (of one that starts here) waited for."""
        self.collectives: dict[Collective, int] = {}
        self.now, self.live, self.peak = 0.0, 0, 0
        self.slots: list[Slot] = []
        self.at: Instruction | None = None
        """The instruction being run; None at the end."""

    def run(self, steps: int) -> Iterator[Operation]:
        """Run the program; yields each operation that it has to wait for."""
        for instruction in unroll(self.program.actions, steps):
            self.at = instruction
            match instruction:
                case Compute():
                    self.compute(instruction)
                case Post(edge):
                    self.post(self.edges[edge])
                case Wait(edge):
                    operation = self.posted[edge][self.waited[edge]]
                    self.waited[edge] += 1
                    yield from self.wait(operation)
                case Send(edge):
                    limit = self.edges[edge].window if self.window is None else self.window
                    yield from self.drain(edge, max(limit - 1, 0))
                    number = len(self.sent[edge])
                    self.sent[edge].append(self.network.send(self.edges[edge], number, self.now))
                    yield from self.drain(edge, limit)
                case Flush(edge):
                    yield from self.drain(edge, 0)
                case Collective():
                    number = self.collectives.get(instruction, 0)
                    self.collectives[instruction] = number + 1
                    yield from self.wait(
                        self.network.collective(self.program.rank, instruction, number, self.now)
                    )
        self.at = None

    def wait(self, operation: Operation) -> Iterator[Operation]:
        if operation.done_s is None:
            yield operation
        if operation.done_s is not None:
            self.now = max(self.now, operation.done_s)

    def drain(self, edge: str, left: int) -> Iterator[Operation]:
        """Wait for the oldest sends until `left` are under way."""
        while len(self.sent[edge]) - self.waited[edge] > left:
            operation = self.sent[edge][self.waited[edge]]
            self.waited[edge] += 1
            yield from self.wait(operation)

    def post(self, edge: Edge) -> None:
        """Post the next receive, if one is left in the step to which the next wait belongs."""
        messages, number = self.messages[edge.name], len(self.posted[edge.name])
        if messages and number < (self.waited[edge.name] // messages + 1) * messages:
            self.posted[edge.name].append(self.network.receive(edge, number, self.now))

    def compute(self, compute: Compute) -> None:
        action = compute.action
        self.live += {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(action.kind, 0)
        self.peak = max(self.peak, self.live)
        start = self.now
        self.now += self.network.clock.compute_s.get((action.stage, action.kind), 0.0)
        self.slots.append(Slot(self.program.rank, str(action), start, self.now))
