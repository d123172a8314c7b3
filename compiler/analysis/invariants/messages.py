"""What a program promises about the computes and messages of one step on its rank.

The edges are derived from the units here, apart from the pass that made the programs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import InternalError
from ...ir.graph import TensorMeta
from ...ir.program import Compute, Flush, Instruction, Post, Program, Send, Wait, lines
from ...ir.schedule import Kind
from ...ir.unit import Transfer, Unit

Content = tuple[tuple[str, object, str], ...]
"""Name, shape and dtype of each value of a message."""


@dataclass(frozen=True, slots=True)
class Path:
    """An edge that the units need, and the computes at its ends."""

    kind: str
    source: int
    target: int
    made_by: tuple[int, Kind]
    used_by: tuple[int, Kind]
    content: Content

    @property
    def ends(self) -> tuple[str, int, int]:
        return (self.kind, self.source, self.target)


def fault(rank: int, instruction: Instruction | None, problem: str) -> InternalError:
    """The error that names a rank and the instruction, if there is one."""
    at = f", {next(lines([instruction]))}" if instruction else ""
    return InternalError(f"rank {rank}{at}: {problem}")


def needed_paths(units: Sequence[Unit]) -> tuple[Path, ...]:
    """The edges that a replica's units need for their transfers; raises unless both ends agree."""
    rank_of = {unit.stage: unit.rank for unit in units}
    sends = [transfer for unit in units for transfer in unit.sends]
    receives = [transfer for unit in units for transfer in unit.receives]
    if sorted(map(str, sends)) != sorted(map(str, receives)):
        differing = sorted(set(map(str, sends)) ^ set(map(str, receives)))
        raise InternalError(f"units do not agree on {', '.join(differing)}")
    paths = []
    for start, end in sorted({(t.source, t.target) for t in sends}):
        source, target = rank_of[start], rank_of[end]
        if source == target:
            continue
        transfers = [t for t in sends if (t.source, t.target) == (start, end)]
        there, back = (start, Kind.F), (end, Kind.F)
        paths.append(Path("activations", source, target, there, back, content_of(transfers)))
        if back_values := content_of([t for t in transfers if t.gradient]):
            there, back = (end, Kind.B), (start, Kind.B)
            paths.append(Path("gradients", target, source, there, back, back_values))
    return tuple(paths)


def content_of(transfers: list[Transfer]) -> Content:
    return content(tuple((t.value, t.meta) for t in transfers))


def content(values: tuple[tuple[str, TensorMeta], ...]) -> Content:
    return tuple((name, meta.shape, meta.dtype) for name, meta in values)


def match_edges(program: Program, paths: tuple[Path, ...]) -> dict[str, Path]:
    """The path of each edge, by name; raises InternalError unless the edges are the needed ones."""
    needed = {path.ends: path for path in paths if program.rank in (path.source, path.target)}
    found: dict[str, Path] = {}
    for edge in program.edges:
        path = needed.pop((edge.kind, edge.source, edge.target), None)
        if path is None or edge.name in found:
            raise fault(program.rank, None, f"the units need no further edge {edge.name}")
        if content(edge.values) != path.content:
            held, wanted = content(edge.values), path.content
            raise fault(program.rank, None, f"{edge.name} holds {held}, the units send {wanted}")
        if edge.window < 1 or edge.ahead < 1:
            text = f"{edge.name} has window {edge.window}, ahead {edge.ahead}; each is at least 1"
            raise fault(program.rank, None, text)
        found[edge.name] = path
    for kind, source, target in needed:
        raise fault(program.rank, None, f"there is no edge for {kind} {source}->{target}")
    return found


class Walk:
    """One rank's step, instruction by instruction; the methods raise InternalError."""

    def __init__(self, program: Program, paths: dict[str, Path], microbatches: int) -> None:
        self.rank, self.stages, self.paths = program.rank, program.stages, paths
        self.microbatches = range(microbatches)
        self.ahead = {edge.name: edge.ahead for edge in program.edges}
        self.posted = dict.fromkeys(paths, 0)
        # Dicts as ordered sets of microbatches.
        self.waited: dict[str, dict[int, None]] = {name: {} for name in paths}
        self.sent: dict[str, dict[int, None]] = {name: {} for name in paths}
        self.flushed: set[str] = set()
        self.computed: set[tuple[int, Kind, int]] = set()

    def run(self, step: tuple[Instruction, ...]) -> None:
        """Check a whole step."""
        for instruction in step:
            if isinstance(instruction, Post | Wait | Send | Flush):
                path = self.paths.get(instruction.edge)
                incoming = isinstance(instruction, Post | Wait)
                if path is None or (path.target if incoming else path.source) != self.rank:
                    raise fault(self.rank, instruction, "this end of the edge is not here")
            match instruction:
                case Post(edge):
                    self.posted[edge] += 1
                case Wait():
                    self.wait(instruction)
                case Compute():
                    self.compute(instruction)
                case Send():
                    self.send(instruction)
                case Flush(edge):
                    if edge in self.flushed:
                        raise fault(self.rank, instruction, "the edge is flushed twice")
                    self.flushed.add(edge)
        self.finish()

    def wait(self, wait: Wait) -> None:
        waited, microbatch = self.waited[wait.edge], wait.microbatch.offset
        posted, due = self.posted[wait.edge], len(waited) + 1 + self.ahead[wait.edge]
        if posted != due:
            raise fault(self.rank, wait, f"{posted} receives are posted by then, not {due}")
        if microbatch in waited:
            raise fault(self.rank, wait, "the message is taken twice")
        waited[microbatch] = None

    def compute(self, compute: Compute) -> None:
        action, microbatch = compute.action, compute.microbatch.offset
        if action.stage not in self.stages or microbatch not in self.microbatches:
            raise fault(self.rank, compute, "this rank has no such stage or microbatch")
        if action.microbatch != microbatch:
            raise fault(self.rank, compute, f"the action is {action}")
        if (action.stage, action.kind, microbatch) in self.computed:
            raise fault(self.rank, compute, "it runs twice")
        if action.kind is Kind.B and (action.stage, Kind.F, microbatch) not in self.computed:
            raise fault(self.rank, compute, "it comes before its F")
        for name, path in self.paths.items():
            if path.used_by == (action.stage, action.kind) and microbatch not in self.waited[name]:
                raise fault(self.rank, compute, f"its message on {name} is not waited for")
        self.computed.add((action.stage, action.kind, microbatch))

    def send(self, send: Send) -> None:
        microbatch = send.microbatch.offset
        if (*self.paths[send.edge].made_by, microbatch) not in self.computed:
            raise fault(self.rank, send, "what it sends is not computed yet")
        if microbatch in self.sent[send.edge]:
            raise fault(self.rank, send, "the message is sent twice")
        if send.edge in self.flushed:
            raise fault(self.rank, send, "the edge is flushed already")
        self.sent[send.edge][microbatch] = None

    def finish(self) -> None:
        """Nothing is missing, or too much, at the end of the step."""
        for stage in self.stages:
            for kind in (Kind.F, Kind.B):
                for microbatch in self.microbatches:
                    if (stage, kind, microbatch) not in self.computed:
                        text = f"{stage}{kind}({microbatch}) is missing"
                        raise fault(self.rank, None, text)
        extra = [key for key in self.computed if key[1] not in (Kind.F, Kind.B)]
        if extra:
            raise fault(self.rank, None, f"{extra[0]} is neither forward nor backward")
        count = len(self.microbatches)
        for name, path in self.paths.items():
            incoming = path.target == self.rank
            moved = self.waited[name] if incoming else self.sent[name]
            if len(moved) != count or not set(moved) <= set(self.microbatches):
                raise fault(self.rank, None, f"{name} moves microbatches {list(moved)}")
            posted, due = self.posted[name], count + self.ahead[name]
            if incoming and posted != due:
                text = f"{name}: {posted} receives are posted, not {due}"
                raise fault(self.rank, None, text)
            if not incoming and name not in self.flushed:
                raise fault(self.rank, None, f"{name} is not flushed")
