"""A rank's program -> the functions that run a step: forward, backward, and their order.

Transfers stand where the program has them: every forward takes its messages, computes and sends,
and so does every backward. `pattern` checks that; it is not assumed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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
from ..ir.unit import Unit
from .boundary import free
from .layout import wrap
from .messages import in_memory_order, incoming, is_general, outgoing, unpack, variable
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
    autocast: bool = False

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
            forward=tuple(indented(self.forward())),
            backward=tuple(indented(self.backward())) if has_backward else (),
            run_parameters=self.batch,
            run_doc="All microbatches of a step" if any_number else count,
            run=run,
        )

    def forward(self) -> Iterator[str]:
        """Take, compute, send."""
        if not self.plan.even:
            yield "if not sizes[mb]:  # a short last batch may not reach every microbatch"
            yield "    return"
        received = self.received()
        gradients = {t.value for t in self.unit.receives if t.gradient}
        for edge in incoming(self.program, "activations"):
            names = [received[value] for value, _ in edge.values]
            yield self.take(names, edge)
            for value, meta in edge.values:
                if meta.order:  # back from the order of memory, in which it was sent
                    inverse = ", ".join(
                        str(meta.order.index(dim)) for dim in range(len(meta.order))
                    )
                    yield f"{received[value]} = {received[value]}.permute({inverse})"
            yield from (f"{received[v]}.requires_grad_()" for v, _ in edge.values if v in gradients)
        key = ['f"{SEED} {step} {mb}"'] if self.seeds else []
        call = f"stage({', '.join([*received.values(), *self.fields, *key])})"
        yield from self.compute(call)
        if self.unit.has_backward:
            kept = [received[v] for v in received if v in gradients] + self.sources()
            if self.is_last:
                kept[-1] += " / MICROBATCHES" if self.plan.even else " * (sizes[mb] / sum(sizes))"
            yield f"live[mb] = {', '.join(kept)}"

    def received(self) -> dict[str, str]:
        """What the values are called that come to this stage: `x_in` where it makes another x."""
        produced = {self.names[value] for value in self.results if value in self.names}
        names = {t.value: self.names[t.value] for t in self.unit.receives}
        taken = produced.union(names.values(), self.fields)
        return {v: free(f"{n}_in", taken) if n in produced else n for v, n in names.items()}

    def compute(self, call: str) -> Iterator[str]:
        """The stage's call and what follows from its results."""
        if self.is_last:
            share = "" if self.plan.even else " * sizes[mb] / sum(sizes)"
            yield from self.cast(f"loss = {call}")
            yield f"losses.append(loss.detach().double(){share})"
            return
        results = ", ".join(self.names[value] for value in self.results)
        yield from self.cast(f"{results} = {call}")
        for edge in outgoing(self.program, "activations"):
            values = ", ".join(in_memory_order(self.names[v], meta) for v, meta in edge.values)
            yield f"{variable(edge, self.program.rank)}.send(mb, {values})"

    def cast(self, line: str) -> Iterator[str]:
        """A line that calls the stage, in the spec's precision.

        A cast weight is not kept for its next use: gradients of all uses add up in float32.
        """
        if self.autocast:
            yield "with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):"
        yield "    " * self.autocast + line

    def sources(self) -> list[str]:
        """Where a backward starts: the loss, or the outputs whose gradients come back."""
        if self.is_last:
            return ["loss"]
        back = dict.fromkeys(t.value for t in self.unit.sends if t.gradient)
        return [self.names[value] for value in back]

    def backward(self) -> Iterator[str]:
        """Take the gradients, go back, send the gradients of what was received."""
        if not self.plan.even:
            yield "if not sizes[mb]:"
            yield "    return"
        received = self.received()
        names = [received[t.value] for t in self.unit.receives if t.gradient] + self.sources()
        edges = incoming(self.program, "gradients")
        if self.is_last:
            yield f"{', '.join(names)} = live.pop(mb)"
            yield "loss.backward()"
        elif len(names) == len(edges) == len(edges[0].values) == 1 and not self.multi:
            yield f"live.pop(mb).backward({variable(edges[0], self.program.rank)}.take(mb))"
        else:
            yield f"{', '.join(names)} = live.pop(mb)"
            yield from self.several(edges)
        for edge in outgoing(self.program, "gradients"):
            values = ", ".join(f"{received[value]}.grad" for value, _ in edge.values)
            yield f"{variable(edge, self.program.rank)}.send(mb, {values})"

    def several(self, edges: Sequence[Edge]) -> Iterator[str]:
        """Gradients of several outputs, or of one from several stages."""
        if len(edges) == len(edges[0].values) == 1 and not self.multi:
            ((value, _),) = edges[0].values
            gradient = f"{variable(edges[0], self.program.rank)}.take(mb)"
            yield f"{self.names[value]}.backward({gradient})"
            return
        outputs, gradients = [], []
        for edge in edges:
            names = [f"grad_{self.names[value]}" for value, _ in edge.values]
            if len(edges) > 1:
                names = [f"{name}_from_{edge.source}" for name in names]
            yield self.take(names, edge)
            outputs += [self.names[value] for value, _ in edge.values]
            gradients += names
        if len(outputs) == 1:
            yield f"{outputs[0]}.backward({gradients[0]})"
        else:
            pairs = f"({', '.join(outputs)}), ({', '.join(gradients)})"
            yield f"torch.autograd.backward({pairs})"

    @property
    def multi(self) -> bool:
        """Whether messages are lists."""
        return is_general(self.program)

    def take(self, names: Sequence[str], edge: Edge) -> str:
        """The next message of an edge, taken apart."""
        left = unpack(names, multi=self.multi)
        return f"{left} = {variable(edge, self.program.rank)}.take(mb)"

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
            yield f"    loss = torch.stack(losses).{'mean' if self.plan.even else 'sum'}()"
            yield "    losses.clear()"
            yield "    return loss"

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
