"""A rank's program -> the functions that run a step: forward, backward, and their order.

Transfers stand where the program has them: every forward takes its messages, computes and sends,
and so does every backward. `pattern` checks that; it is not assumed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import InternalError
from ..ir.plan import Plan
from ..ir.program import (
    Compute,
    Edge,
    Instruction,
    Loop,
    Program,
    unroll,
)
from ..ir.schedule import Kind
from ..ir.spec import Weight
from ..ir.unit import Unit
from .layout import wrap
from .mean import Mean, make_mean
from .messages import variable
from .microbatch import MicrobatchWriter
from .pattern import check_pattern
from .scope import clean_outside
from .sequence import spell_sequence


@dataclass(frozen=True, slots=True)
class Steps:
    """The section of a step."""

    state: str
    parameters: str
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    run_parameters: str
    run_doc: str
    run: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepWriter:
    """Writes the step of one rank that holds one stage."""

    plan: Plan
    program: Program
    longer: Program
    """The program for more microbatches, one more for each stage."""
    unit: Unit
    names: Mapping[str, str]
    """Value that crosses a boundary -> its name."""
    results: tuple[str, ...]
    """What Stage.forward returns."""
    seeds: bool
    norms: bool = False
    """Whether the stage has batch norms that count."""
    weight: Weight = field(default_factory=Weight)
    autocast: bool = False

    @property
    def mean(self) -> Mean:
        received = {self.names[t.value] for t in self.unit.receives}
        return make_mean(self.plan, self.unit, self.weight, [*received, *self.fields])

    @property
    def microbatch(self) -> MicrobatchWriter:
        return MicrobatchWriter(
            self.plan, self.program, self.unit, self.names, self.results,
            seeds=self.seeds, norms=self.norms, mean=self.mean, autocast=self.autocast,
        )  # fmt: skip

    @property
    def is_last(self) -> bool:
        return bool(self.unit.outputs)

    @property
    def fields(self) -> list[str]:
        return [clean_outside(i.name) for i in self.unit.inputs]

    @property
    def batch(self) -> str:
        """What the microbatches' data is called; "" on a rank that reads none."""
        return self.fields[0] if len(self.fields) == 1 else "batch" if self.fields else ""

    @property
    def edges(self) -> tuple[Edge, ...]:
        return self.program.edges

    def write(self) -> Steps:
        body = step_body(self.program)
        check_pattern(self.program, body)
        has_backward = self.unit.has_backward
        state = "live = {}  # microbatch -> what its backward needs" if has_backward else ""
        state = (
            "live, losses = {}, []  # live: microbatch -> what its backward needs"
            if self.is_last
            else state
        )
        run = tuple(self.run(body))
        any_number = any("MICROBATCHES" in line for line in run)
        count = f"{self.plan.microbatches} microbatches, in an order for just so many"
        return Steps(
            state=state,
            parameters=", ".join(["mb", *self.fields]),
            forward=tuple(indented(self.microbatch.forward())),
            backward=tuple(indented(self.microbatch.backward())) if has_backward else (),
            run_parameters=self.batch,
            run_doc="All microbatches of a step" if any_number else count,
            run=run,
        )

    def run(self, body: Sequence[Instruction]) -> Iterator[str]:
        """The order of a step."""
        for edge in [e for e in self.edges if e.target == self.program.rank]:
            for ahead in range(edge.ahead):
                yield f"    {variable(edge, self.program.rank)}.post({ahead})"
        lines = self.order(body) if self.unit.has_backward else self.forwards(body)
        yield from (f"    {line}" for line in lines)
        for edge in [e for e in self.edges if e.source == self.program.rank]:
            yield f"    {variable(edge, self.program.rank)}.wait()"
        if self.is_last:
            result = "means" if self.mean.metrics else "loss"
            yield f"    {result} = {self.mean.total}"
            yield "    losses.clear()"
            yield f"    return {result}"

    def forwards(self, body: Sequence[Instruction]) -> Iterator[str]:
        """A stage with nothing to go back for: its backwards compute nothing and are left out."""
        done = [c.action.microbatch for c in computes(body) if c.action.kind is Kind.F]
        if done != list(range(self.plan.microbatches)):
            raise InternalError(f"rank {self.program.rank}: forwards in the order {done}")
        yield "for mb in range(MICROBATCHES):"
        yield f"    {self.run_forward('mb')}"

    def order(self, body: Sequence[Instruction]) -> Iterator[str]:
        """Forwards and backwards, in the schedule's order."""
        ahead, ahead_longer = ([e.ahead for e in p.edges] for p in (self.program, self.longer))
        longer = step_body(self.longer) if ahead == ahead_longer else body
        more = len(self.plan.stages)
        return spell_sequence(body, longer, self.plan.microbatches, more, self.call)

    def call(self, compute: Compute, microbatch: str) -> str:
        if compute.action.kind is Kind.F:
            return self.run_forward(microbatch)
        return f"backward({microbatch})"

    def run_forward(self, microbatch: str) -> str:
        """A forward on its part of the data."""
        data = [f"{'*' * (len(self.fields) > 1)}{self.batch}[{microbatch}]"] if self.batch else []
        return f"forward({', '.join([microbatch, *data])})"


def indented(lines: Iterable[str]) -> Iterator[str]:
    """A function's lines, wrapped where they are too long."""
    for line in lines:
        text = line.lstrip()
        yield from wrap(text, 4 + len(line) - len(text))


def computes(body: Sequence[Instruction]) -> list[Compute]:
    """The computes of one step, in order."""
    return [item for item in unroll(tuple(body)) if isinstance(item, Compute)]


def step_body(program: Program) -> tuple[Instruction, ...]:
    """The body of the training loop."""
    return next(loop.body for loop in program.actions if isinstance(loop, Loop))
