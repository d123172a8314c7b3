"""localize: a stage's part of the graph, made self-contained.

What a stage needs from an earlier one is received, unless it depends on nothing but the data,
constants and fixed buffers: then its ops are copied here (sunk), as are views of a value that is
received anyway. Masks, positions and rotary tables are never sent, and the stage that has their ops
drops them where it does not read them itself.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..analysis.dataflow import (
    canonical_fqns,
    count_calls,
    inputs_of,
    layer_seeds,
    recomputable,
    storages,
)
from ..errors import PlanError
from ..ir.graph import CallId, Graph, Op, Ref
from ..ir.norms import norm_sums
from ..ir.plan import Plan, Stage
from ..ir.unit import Held, Transfer, Unit


@dataclass(frozen=True, slots=True)
class Facts:
    """What holds for the whole graph."""

    producer: Mapping[str, Op]
    stage_of: Mapping[str, int]
    """Op name -> stage."""
    fqns: Mapping[str, str]
    """Every name of a parameter -> the name under which the graph has it."""
    memory: Mapping[str, str]
    """Name -> what stands for its storage."""
    writers: Mapping[str, tuple[Op, ...]]
    """Value -> the ops that write its storage in place."""
    free: frozenset[str]
    """Values that any stage can compute from the data alone."""
    read: frozenset[str]
    """All that any op reads."""
    calls: Counter[CallId]
    """How many ops each module call has."""


def localize(graph: Graph, plan: Plan) -> tuple[Unit, ...]:
    """Before: each op in one layer, each layer in one stage. After: a unit a stage and rank."""
    facts = gather(graph, plan)
    stages = [stage_ops(graph, facts, stage.index) for stage in plan.stages]
    transfers = connect(graph, plan, facts, stages)
    made = [
        make_unit(graph, plan, facts, ops, transfers, stage)
        for stage, (ops, _) in zip(plan.stages, stages, strict=True)
    ]
    for unit in made:
        if not unit.outputs and not unit.sends:
            raise PlanError(
                f"stage {unit.stage} makes nothing that a later stage could not make of the data",
                hint="cuts: auto, or cut behind the first layer with parameters, or fewer stages",
            )
    return tuple(
        replace(unit, rank=rank)
        for unit, stage in zip(made, plan.stages, strict=True)
        for rank in stage.mesh.ranks
    )


def gather(graph: Graph, plan: Plan) -> Facts:
    """Collect what holds for the whole graph."""
    layer_stage = {layer: stage.index for stage in plan.stages for layer in stage.layers}
    stage_of = {op: layer_stage[i] for i, layer in enumerate(graph.layers) for op in layer.ops}
    memory = storages(graph)
    writers: dict[str, list[Op]] = {}
    for op in graph.ops:
        for name in op.mutates:
            writers.setdefault(memory[name], []).append(op)
    return Facts(
        producer={name: op for op in graph.ops for name in op.outputs if name},
        stage_of=stage_of,
        fqns=canonical_fqns(graph),
        memory=memory,
        writers={name: tuple(writers.get(base, ())) for name, base in memory.items()},
        free=recomputable(graph),
        read=frozenset(str(ref) for op in graph.ops for ref in op.operands),
        calls=count_calls(graph, graph.ops),
    )


def stage_ops(graph: Graph, facts: Facts, stage: int) -> tuple[tuple[Op, ...], tuple[str, ...]]:
    """The ops that a stage runs, its own and the sunk, and the values that it receives.

    Its own without those that only made what other stages make for themselves. Random ones stay,
    though nothing reads them: what is drawn after them hangs on it.
    """
    own = (op for op in graph.ops if facts.stage_of[op.name] == stage)
    chosen = {op.name for op in own if op.random or not facts.free.issuperset(effects(op))}
    received: set[str] = set()
    queue = [
        str(ref)
        for op in graph.ops
        if op.name in chosen
        for ref in op.operands
        if isinstance(ref, Ref)
    ]
    queue += [value for _, value in stage_outputs(graph, facts, stage)]
    while queue:
        value = queue.pop()
        op = facts.producer.get(value)
        if op is None or op.name in chosen or value in received:
            continue
        if value in facts.free:
            needed = (op, *facts.writers.get(value, ()))
            chosen.update(n.name for n in needed)
            queue += [str(ref) for n in needed for ref in n.operands if isinstance(ref, Ref)]
        else:
            received.add(value)
    for op in graph.ops:  # a view of what is received anyway, or of such a view
        if received.issuperset(op.outputs) and is_view(graph, op):
            source = str(op.args[0])
            if source in received or facts.producer[source].name in chosen:
                chosen.add(op.name)
                received.difference_update(op.outputs)
    return tuple(op for op in graph.ops if op.name in chosen), tuple(
        value for value in graph.values if value in received
    )


def effects(op: Op) -> set[str]:
    """What an op makes or writes."""
    return {name for name in (*op.outputs, *op.mutates) if name}


def stage_outputs(graph: Graph, facts: Facts, stage: int) -> tuple[tuple[str, str], ...]:
    """What a stage gives to the job: the loss's gives all, also what earlier stages make."""
    _, loss = graph.outputs[0]
    return graph.outputs if facts.stage_of[facts.producer[loss].name] == stage else ()


def is_view(graph: Graph, op: Op) -> bool:
    """Whether an op only shows its first operand, all of it, in another shape."""
    if len(op.views) != 1 or len(op.outputs) != 1 or not isinstance(op.args[0], Ref) or op.mutates:
        return False
    source, result = graph.values[op.views[0]], graph.values[op.outputs[0]]
    return source.bytes == result.bytes and source.dtype == result.dtype and len(op.operands) == 1


def connect(
    graph: Graph,
    plan: Plan,
    facts: Facts,
    stages: Sequence[tuple[tuple[Op, ...], tuple[str, ...]]],
) -> tuple[Transfer, ...]:
    """How each value comes to each stage that receives it, by target.

    From the last stage to the first: whether a gradient comes back to a value depends on what the
    stages behind send back.
    """
    found: list[Transfer] = []
    for target, (ops, received) in reversed(list(enumerate(stages))):
        begins = {value for _, value in stage_outputs(graph, facts, target)[:1]}
        begins |= {t.value for t in found if t.source == target and t.gradient}
        back = gradient_operands(graph, facts, ops, begins)
        refuse_lone_gradients(graph, plan, target, back)
        found[:0] = [
            Transfer(
                value,
                facts.stage_of[facts.producer[value].name],
                target,
                graph.values[value],
                gradient=value in back,
            )
            for value in received
        ]
    return tuple(found)


def gradient_operands(
    graph: Graph, facts: Facts, ops: Sequence[Op], begins: set[str]
) -> frozenset[str]:
    """The values that a backward comes to in a stage's ops, from those where it begins on.

    An op that writes in place passes on what comes to any name of the memory: after
    `out[:, :8] = h` the gradient of `h` comes through `out`.
    """
    found = {name for name in begins if graph.values[name].requires_grad}
    for op in reversed(ops):
        written = {facts.memory[name] for name in op.mutates}
        passes = found.intersection(op.outputs) or (
            written and any(facts.memory[name] in written for name in found)
        )
        if op.grad and passes:
            for operand in op.operands:
                if isinstance(operand, Ref):
                    found.update([operand.name] * graph.values[operand.name].requires_grad)
                else:
                    found.add(facts.fqns[operand.fqn])
    return frozenset(found)


def refuse_lone_gradients(graph: Graph, plan: Plan, stage: int, back: frozenset[str]) -> None:
    """Raises PlanError for a parameter that several stages hold and that gets no gradient on this
    one: there would be nothing to sum."""
    for fqn, parameter in graph.parameters.items():
        stages = holders(plan, fqn)
        if parameter.meta.requires_grad and stage in stages and len(stages) > 1 and fqn not in back:
            others = " and ".join(str(other) for other in stages if other != stage)
            raise PlanError(
                f"stage {stage} reads {fqn} without gradient, and stage {others} trains it",
                hint="cuts: auto, or cuts that keep its readers on one stage",
            )


def make_unit(
    graph: Graph,
    plan: Plan,
    facts: Facts,
    ops: tuple[Op, ...],
    transfers: tuple[Transfer, ...],
    place: Stage,
) -> Unit:
    """Put a stage's unit together, that of its first rank."""
    stage = place.index
    names = {op.name for op in ops}
    read = frozenset(str(ref) for op in ops for ref in op.operands)
    receives = tuple(t for t in transfers if t.target == stage)
    sends = tuple(t for t in transfers if t.source == stage)
    outputs = stage_outputs(graph, facts, stage)
    taken = [t.meta for t in receives]
    inputs = inputs_of(graph, ops, taken, graph.weight if outputs else ())
    present = {name for op in ops for name in op.outputs if name}
    present |= {t.value for t in receives} | {i.name for i in inputs}
    begins = {value for _, value in outputs[:1]} | {t.value for t in sends if t.gradient}
    back = gradient_operands(graph, facts, ops, begins)
    return Unit(
        stage=stage,
        rank=place.mesh.ranks[0],
        ops=ops,
        values={name: meta for name, meta in graph.values.items() if name in present},
        inputs=inputs,
        receives=receives,
        sends=sends,
        state=tuple(
            held(graph, plan, facts, read, back, fqn, stage)
            for fqn in plan.placements
            if stage in holders(plan, fqn)
        ),
        sunk=frozenset(name for name in names if facts.stage_of[name] != stage),
        seeds=tuple(seed for seed in layer_seeds(graph) if seed[0] in names),
        outputs=outputs,
        calls=whole_calls(graph, facts, ops),
        collectives=norm_sums(graph, plan, ops),
    )


def holders(plan: Plan, fqn: str) -> tuple[int, ...]:
    """The stages that hold a parameter."""
    return tuple(stage for stage, _ in plan.placements[fqn])


def held(
    graph: Graph,
    plan: Plan,
    facts: Facts,
    here: frozenset[str],
    back: frozenset[str],
    fqn: str,
    stage: int,
) -> Held:
    """A parameter under the name by which this stage reads it, and its further names here.

    An alias belongs to the stages that read it; one that no op reads, to the first stage.
    """
    names = (fqn, *graph.parameters[fqn].aliases)
    read = facts.read
    stages = holders(plan, fqn)
    mine = [n for n in names if n in here] or [n for n in names if n not in read] or [fqn]
    if stage == stages[0]:
        mine += [n for n in names if n not in read and n not in mine]
    meta = graph.parameters[fqn].meta
    return Held(
        fqn=mine[0],
        canonical=fqn,
        aliases=tuple(mine[1:]),
        stages=stages,
        trainable=meta.requires_grad,
        reached=fqn in back,
    )


def whole_calls(graph: Graph, facts: Facts, ops: Iterable[Op]) -> tuple[CallId, ...]:
    """Module calls all of whose ops are here, outermost first; never the model's own."""
    here = count_calls(graph, ops)
    return tuple(call for call in graph.calls if call[0] and 0 < facts.calls[call] == here[call])
