"""What a Unit promises: it is its stage's part of the graph, nothing is missing, and every movement
has its adjoint."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ...errors import InternalError
from ...ir.graph import Graph, Op, Ref, State
from ...ir.norms import norm_sums
from ...ir.plan import Plan
from ...ir.show import show_unit
from ...ir.unit import Transfer, Unit
from ..dataflow import recomputable, storages


def verify_units(units: Sequence[Unit], graph: Graph, plan: Plan) -> None:
    """Raise InternalError for the first promise that a unit breaks:

    - there is a unit for each stage and rank of the plan;
    - a unit runs the graph's ops in their order: its stage's own but those that only make what
      others can make for themselves, and copies of just such ops and of views of what it receives;
    - every write to what it computes again is there too;
    - every operand is there before it is read, and what it sends or gives is made;
    - transfers have two ends, the values' own metas, and come from the stage that makes them;
    - a gradient comes back where, and only where, the receiving stage has one to send;
    - replicas sum the statistics of the batch norms that the plan has them share, and no others;
    - each output of the graph is given once.
    """
    for fault in faults(units, graph, plan):
        raise InternalError(fault, "localize", str(graph), "\n".join(map(show_unit, units)))


def faults(units: Sequence[Unit], graph: Graph, plan: Plan) -> Iterator[str]:
    """Everything that is wrong."""
    places = [(stage.index, rank) for stage in plan.stages for rank in stage.mesh.ranks]
    if [(unit.stage, unit.rank) for unit in units] != places:
        yield f"the units are not the plan's stages and ranks {places}"
        return
    replicas = [[unit for unit in units if unit.rank in ranks] for ranks in plan.pipelines()]
    units = replicas[0]
    for others in replicas[1:]:
        for unit, other in zip(units, others, strict=True):
            if replace(other, rank=unit.rank) != unit:
                yield f"rank {other.rank} does not hold what rank {unit.rank} does"
    layer_stage = {layer: stage.index for stage in plan.stages for layer in stage.layers}
    stage_of = {name: layer_stage[i] for i, layer in enumerate(graph.layers) for name in layer.ops}
    free, memory = recomputable(graph), storages(graph)
    for unit in units:
        yield from wrong_ops(unit, graph, stage_of, free)
        yield from missing_writes(unit, graph, free, memory)
        yield from missing(unit)
        if unit.collectives != norm_sums(graph, plan, unit.ops):
            yield f"stage {unit.stage} does not sum the statistics of its batch norms, each once"
    yield from wrong_transfers(units, graph, stage_of)
    for unit in reversed(units):  # what a stage sends back depends on those behind it
        yield from wrong_gradients(unit, memory)
    given = Counter(output for unit in units for output in unit.outputs)
    if given != Counter(graph.outputs):
        yield f"the outputs given are {sorted(given.elements())}, not {sorted(graph.outputs)}"


def wrong_ops(
    unit: Unit, graph: Graph, stage_of: Mapping[str, int], free: frozenset[str]
) -> Iterator[str]:
    """Ops that the unit does not share with the graph, lacks, or must not compute again."""
    ops = {op.name: op for op in graph.ops}
    names, here = [op.name for op in unit.ops], {op.name for op in unit.ops}
    if any(op != ops.get(op.name) for op in unit.ops):
        yield f"stage {unit.stage} runs an op that the graph does not have"
        return
    if names != [name for name in ops if name in here]:
        yield f"stage {unit.stage} does not run its ops in the graph's order, each once"
    foreign = {name for name in names if stage_of[name] != unit.stage}
    if unit.sunk != foreign:
        yield f"stage {unit.stage} calls ops sunk that are its own, or does not name all that are"
    for name, op in ops.items():
        if stage_of[name] == unit.stage and name not in here and not only_makes(op, free):
            yield f"stage {unit.stage} does not run its own op {name}"
        if name in foreign and not only_makes(op, free):
            received = {t.value for t in unit.receives}
            if op.random or op.mutates or not shows(op, received | made_by(unit.ops)):
                yield f"stage {unit.stage} computes {name} again, which is not the same twice"


def only_makes(op: Op, free: frozenset[str]) -> bool:
    """Whether all that an op makes or writes any stage can make for itself."""
    return free.issuperset(name for name in (*op.outputs, *op.mutates) if name)


def shows(op: Op, present: set[str]) -> bool:
    """Whether an op is a view of what is there."""
    return bool(op.views) and present.issuperset(op.views)


def made_by(ops: Sequence[Op]) -> set[str]:
    """The values that ops make."""
    return {name for op in ops for name in op.outputs if name}


def missing_writes(
    unit: Unit, graph: Graph, free: frozenset[str], memory: Mapping[str, str]
) -> Iterator[str]:
    """Ops that write to what the unit makes of the data, and that it does not run."""
    names = {op.name for op in unit.ops}
    made = {memory[name] for name in made_by(unit.ops) & free}
    for op in graph.ops:
        if op.name not in names and any(memory[name] in made for name in op.mutates):
            yield f"stage {unit.stage} makes what {op.name} writes to, and does not run it"


def missing(unit: Unit) -> Iterator[str]:
    """What a unit reads, or sends, and does not have."""
    present = {t.value for t in unit.receives} | {i.name for i in unit.inputs}
    state = {name for held in unit.state for name in (held.fqn, *held.aliases)}
    for op in unit.ops:
        for ref in op.operands:
            if isinstance(ref, Ref) and ref.name not in present:
                yield f"stage {unit.stage}: {op.name} reads {ref.name}, which is not there yet"
            if isinstance(ref, State) and ref.fqn not in state:
                yield f"stage {unit.stage}: {op.name} reads {ref.fqn}, which is not there"
        present.update(op.outputs)
    made = made_by(unit.ops)
    for value in [t.value for t in unit.sends] + [value for _, value in unit.outputs]:
        if value not in made:
            yield f"stage {unit.stage} gives {value}, which it does not make"


def wrong_transfers(
    units: Sequence[Unit], graph: Graph, stage_of: Mapping[str, int]
) -> Iterator[str]:
    """Transfers with one end, from a stage that does not make the value, or with another meta."""
    sent = Counter(t for unit in units for t in unit.sends)
    received = Counter(t for unit in units for t in unit.receives)
    if sent != received or max(sent.values(), default=1) > 1:
        odd = [t for t in sent | received if not sent[t] == received[t] == 1]
        yield f"transfers have other than two ends: {', '.join(map(str, odd))}"
    maker = {name: stage_of[op.name] for op in graph.ops for name in op.outputs if name}
    for unit in units:
        for t in unit.sends:
            if not t.source == unit.stage == maker.get(t.value, -1) < t.target:
                yield f"{t} does not go from the stage that makes it to a later one"
            if t.meta != graph.values.get(t.value):
                yield f"{t} is not of the value's shape and dtype"
        for t in unit.receives:
            if t.target != unit.stage:
                yield f"stage {unit.stage} receives what goes to another: {t}"


def wrong_gradients(unit: Unit, memory: Mapping[str, str]) -> Iterator[str]:
    """Values that a unit receives and whose gradient it would not send back, or does not have."""
    for t in unit.receives:
        has_one = t.meta.requires_grad and leads_to_backward(t, unit, memory)
        if t.gradient != has_one:
            what = "comes back but there is none" if t.gradient else "does not come back"
            yield f"the gradient of {t} {what}"


def leads_to_backward(transfer: Transfer, unit: Unit, memory: Mapping[str, str]) -> bool:
    """Whether a received value leads to an output, or to a value whose gradient comes back.

    Followed through the ops from front to back, so apart from the pass, which goes back to front.
    """
    reached, written = {transfer.value}, set[str]()

    def carries(name: str) -> bool:
        """Whether the value has a gradient that the transfer's value gets a part of."""
        has = unit.values[name].requires_grad
        return has and (name in reached or memory[name] in written)

    for op in unit.ops:
        if op.grad and any(carries(ref.name) for ref in op.operands if isinstance(ref, Ref)):
            reached.update(name for name in op.outputs if name)
            written.update(memory[name] for name in op.mutates)
    ends = [value for _, value in unit.outputs[:1]] + [t.value for t in unit.sends if t.gradient]
    return any(map(carries, ends))
