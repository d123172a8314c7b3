"""What a Unit promises: it is its stage's part of the graph, and nothing is missing."""

from collections.abc import Iterator, Sequence

from ...errors import InternalError
from ...ir.graph import Graph, Ref, State
from ...ir.plan import Plan
from ...ir.show import show_unit
from ...ir.unit import Unit


def verify_units(units: Sequence[Unit], graph: Graph, plan: Plan) -> None:
    """Raises InternalError for the first promise that a unit breaks."""
    for fault in faults(units, graph, plan):
        raise InternalError(fault, "localize", str(graph), "\n".join(map(show_unit, units)))


def faults(units: Sequence[Unit], graph: Graph, plan: Plan) -> Iterator[str]:
    """Every op is on its stage; every operand is there before it is read; both ends of a transfer
    agree, and what is sent is made."""
    ops = {op.name: op for op in graph.ops}
    layer_stage = {layer: stage.index for stage in plan.stages for layer in stage.layers}
    stage_of = {name: layer_stage[i] for i, layer in enumerate(graph.layers) for name in layer.ops}
    for unit in units:
        names = [op.name for op in unit.ops]
        own = [name for name in ops if stage_of[name] == unit.stage]
        if [name for name in names if name not in unit.sunk] != own:
            yield f"stage {unit.stage} does not run just its own ops"
        if any(op != ops[op.name] for op in unit.ops):
            yield f"stage {unit.stage} runs an op that the graph does not have"
        yield from missing(unit)
    sent = {t for unit in units for t in unit.sends}
    received = {t for unit in units for t in unit.receives}
    if sent != received:
        yield f"transfers have one end only: {', '.join(map(str, sent ^ received))}"


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
    for value in [t.value for t in unit.sends] + [value for _, value in unit.outputs]:
        if value not in present:
            yield f"stage {unit.stage} gives {value}, which it does not make"
