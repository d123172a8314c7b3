"""A rank's forward and backward of one microbatch: take, compute, send.

    forward     takes what earlier stages send, runs the stage, sends on what later ones need
    backward    takes the gradients of that, goes back, sends on the gradients of what was taken

Where the stage runs again, forward keeps only what comes in, and backward begins with it; that runs
before the gradient is waited for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..ir.plan import Plan
from ..ir.program import Collective, Edge, Loop, Program
from ..ir.unit import Unit
from .boundary import free
from .mean import Mean
from .messages import in_memory_order, incoming, is_general, outgoing, unpack, variable
from .scope import clean_outside


@dataclass(frozen=True, slots=True)
class MicrobatchWriter:
    """Writes for one rank that holds one stage."""

    plan: Plan
    program: Program
    unit: Unit
    names: Mapping[str, str]
    """Value that crosses a boundary -> its name."""
    results: tuple[str, ...]
    """What Stage.forward returns."""
    seeds: bool
    norms: bool
    """Whether the stage has batch norms that count."""
    mean: Mean
    autocast: bool = False

    @property
    def is_last(self) -> bool:
        return bool(self.unit.outputs)

    @property
    def fields(self) -> list[str]:
        return [clean_outside(i.name) for i in self.unit.inputs]

    @property
    def reduces(self) -> bool:
        """Whether replicas sum gradients of this stage in buckets."""
        loop = next(item for item in self.program.actions if isinstance(item, Loop))
        return any(isinstance(i, Collective) and i.bucket_bytes for i in loop.body)

    @property
    def with_gradient(self) -> list[str]:
        """What comes in and has a gradient to send back."""
        received = self.received()
        return [received[t.value] for t in self.unit.receives if t.gradient]

    def forward(self) -> Iterator[str]:
        """Take, compute, send."""
        if not self.plan.even:
            yield "if not sizes[mb]:  # a short last batch may not reach every microbatch"
            yield "    return"
        for edge in incoming(self.program, "activations"):
            yield from self.take_activations(edge)
        if self.program.rerun:
            yield f"live[mb] = {', '.join([*self.received().values(), *self.fields])}"
            why = "  # nothing else is kept: backward runs the stage again"
            yield from self.call("torch.no_grad()", why=why * (not self.autocast))
        else:
            yield from self.call()
        yield from self.pass_on()
        if self.unit.has_backward and not self.program.rerun:
            kept = self.with_gradient + self.sources()
            if self.is_last:
                kept[-1] += self.mean.share
            yield f"live[mb] = {', '.join(kept)}"

    def take_activations(self, edge: Edge) -> Iterator[str]:
        """A message from an earlier stage, ready for the stage."""
        received = self.received()
        yield self.take([received[value] for value, _ in edge.values], edge)
        for value, meta in edge.values:
            if meta.order:  # back from the order of memory, in which it was sent
                inverse = ", ".join(str(meta.order.index(dim)) for dim in range(len(meta.order)))
                yield f"{received[value]} = {received[value]}.permute({inverse})"
        names = [received[value] for value, _ in edge.values]
        yield from (f"{name}.requires_grad_()" for name in names if name in self.with_gradient)

    def received(self) -> dict[str, str]:
        """What the values are called that come to this stage: `x_in` where it makes another x."""
        produced = {self.names[value] for value in self.results if value in self.names}
        names = {t.value: self.names[t.value] for t in self.unit.receives}
        taken = produced.union(names.values(), self.fields)
        return {v: free(f"{n}_in", taken) if n in produced else n for v, n in names.items()}

    def call(self, *contexts: str, why: str = "") -> Iterator[str]:
        """The stage's call, in the spec's precision.

        A cast weight is not kept for its next use: gradients of all uses add up in float32.
        """
        cast = "torch.autocast(device.type, torch.bfloat16, cache_enabled=False)"
        contexts += (cast,) * self.autocast
        if contexts:
            yield f"with {', '.join(contexts)}:{why}"
        yield "    " * bool(contexts) + self.compute()

    def compute(self) -> str:
        """The call itself."""
        number = "{mb}" if self.plan.replicas == 1 else "{mb * REPLICAS + REPLICA}"
        key = [f'f"{{SEED}} {{step}} {number}"'] if self.seeds else []
        call = f"stage({', '.join([*self.received().values(), *self.fields, *key])})"
        if self.is_last:
            return f"{', '.join(['loss', *self.mean.metrics])} = {call}"
        return f"{', '.join(self.names[value] for value in self.results)} = {call}"

    def pass_on(self) -> Iterator[str]:
        """What follows from the stage's results."""
        if self.is_last:
            if self.mean.weighted:
                yield "if shares[mb]:"
            yield from (f"{'    ' * self.mean.weighted}{line}" for line in self.mean.kept)
            return
        for edge in outgoing(self.program, "activations"):
            values = ", ".join(in_memory_order(self.names[v], meta) for v, meta in edge.values)
            yield f"{variable(edge, self.program.rank)}.send(mb, {values})"

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
        if self.reduces:
            last = "MICROBATCHES" if self.plan.even else "sum(map(bool, sizes))"
            yield f"reducer.begin(last=mb == {last} - 1)"
        if self.program.rerun:
            yield from self.run_again()
        names, edges = self.with_gradient + self.sources(), incoming(self.program, "gradients")
        alone = len(edges) == 1 and len(names) == len(edges[0].values) == 1
        if alone and not self.multi and not self.program.rerun:
            yield f"live.pop(mb).backward({variable(edges[0], self.program.rank)}.take(mb))"
        else:
            if not self.program.rerun:
                yield f"{', '.join(names)} = live.pop(mb)"
            yield from self.several(edges) if edges else self.go_back()
        received = self.received()
        for edge in outgoing(self.program, "gradients"):
            names = [received[value] for value, _ in edge.values]
            if self.is_last and self.mean.weighted:
                pairs = [f"{n}.grad if shares[mb] else torch.zeros_like({n})" for n in names]
                values = ", ".join(pairs)
            else:
                values = ", ".join(f"{name}.grad" for name in names)
            yield f"{variable(edge, self.program.rank)}.send(mb, {values})"

    def go_back(self) -> Iterator[str]:
        """From the loss; a microbatch in which nothing counts may be 0 / 0."""
        if self.mean.weighted:
            yield "if shares[mb]:"
        back = f"(loss{self.mean.share}).backward()" if self.program.rerun else "loss.backward()"
        yield f"{'    ' * self.mean.weighted}{back}"

    def run_again(self) -> Iterator[str]:
        """The forward, from what came in."""
        kept = [*self.received().values(), *self.fields]
        if kept:
            yield f"{', '.join(kept)} = live.pop(mb)"
        yield from self.call(*["statistics_kept(stage)"] * self.norms)

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
                names = [f"{name}_from_{edge.stages[0]}" for name in names]
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
