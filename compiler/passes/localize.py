"""localize: a stage's part of the graph, made self-contained.

What a stage needs from an earlier one is received, unless it depends on nothing but the data,
constants and fixed buffers: then its ops are copied here (sunk), as are views of a value that is
received anyway. Masks, positions and rotary tables are never sent.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..analysis.dataflow import recomputable, storages
from ..errors import PlanError
from ..ir.graph import CallId, Graph, Op, Ref
from ..ir.plan import Plan
from ..ir.unit import Held, Transfer, Unit


@dataclass(frozen=True, slots=True)
class Facts:
    """What holds for the whole graph."""

    producer: Mapping[str, Op]
    stage_of: Mapping[str, int]
    """Op name -> stage."""
    writers: Mapping[str, tuple[Op, ...]]
    """Value -> the ops that write its storage in place."""
    free: frozenset[str]
    """Values that any stage can compute from the data alone."""
    reaching: frozenset[str]
    """Values from which a gradient-carrying path leads to the loss."""
    read: frozenset[str]
    """All that any op reads."""


def localize(graph: Graph, plan: Plan) -> tuple[Unit, ...]:
    """Before: each op in one layer, each layer in one stage. After: a unit a stage and rank."""
    facts = gather(graph, plan)
    stages = [stage_ops(graph, facts, stage.index) for stage in plan.stages]
    transfers = tuple(
        transfer(graph, facts, ops, value, index)
        for index, (ops, received) in enumerate(stages)
        for value in received
    )
    units = tuple(
        make_unit(graph, plan, facts, ops, transfers, stage.index, rank)
        for stage, (ops, _) in zip(plan.stages, stages, strict=True)
        for rank in stage.mesh.ranks
    )
    for unit in units:
        if not unit.outputs and not unit.sends:
            raise PlanError(
                f"stage {unit.stage} makes nothing that a later stage could not make of the data",
                hint="cut behind the first layer with parameters, or take fewer stages",
            )
    return units


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
        writers={name: tuple(writers.get(base, ())) for name, base in memory.items()},
        free=recomputable(graph),
        reaching=reaching_values(graph),
        read=frozenset(str(ref) for op in graph.ops for ref in op.operands),
    )


def reaching_values(graph: Graph) -> frozenset[str]:
    """Values from which a path of differentiable ops leads to an output."""
    reaching = {value for _, value in graph.outputs}
    for op in reversed(graph.ops):
        passes = op.grad and any(
            name in reaching and graph.values[name].requires_grad for name in op.outputs if name
        )
        if passes or any(name in reaching for name in op.mutates):
            reaching.update(str(ref) for ref in op.operands)
    return frozenset(reaching)


def stage_ops(graph: Graph, facts: Facts, stage: int) -> tuple[tuple[Op, ...], tuple[str, ...]]:
    """The ops that a stage runs, its own and the sunk, and the values that it receives."""
    own = {op.name for op in graph.ops if facts.stage_of[op.name] == stage}
    chosen, received = set(own), set[str]()
    wanted = [op for op in graph.ops if op.name in own]
    wanted_values = [
        value
        for name, value in graph.outputs
        if facts.stage_of[facts.producer[value].name] == stage
    ]
    queue = [
        str(ref) for op in reversed(wanted) for ref in op.operands if isinstance(ref, Ref)
    ] + wanted_values
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
    for value in sorted(received):  # a view of what is received anyway
        op = facts.producer[value]
        if is_view(graph, op) and str(op.args[0]) in received:
            chosen.add(op.name)
            received.discard(value)
    order = {name: i for i, name in enumerate(graph.values)}
    return tuple(op for op in graph.ops if op.name in chosen), tuple(
        sorted(received, key=order.__getitem__)
    )


def is_view(graph: Graph, op: Op) -> bool:
    """Whether an op only shows its first operand, all of it, in another shape."""
    if len(op.views) != 1 or len(op.outputs) != 1 or not isinstance(op.args[0], Ref) or op.mutates:
        return False
    source, result = graph.values[op.views[0]], graph.values[op.outputs[0]]
    return source.bytes == result.bytes and source.dtype == result.dtype and len(op.operands) == 1


def transfer(graph: Graph, facts: Facts, ops: Iterable[Op], value: str, stage: int) -> Transfer:
    """How a value comes to a stage."""
    meta = graph.values[value]
    gradient = meta.requires_grad and value in reached_here(graph, facts, ops)
    return Transfer(value, facts.stage_of[facts.producer[value].name], stage, meta, gradient)


def reached_here(graph: Graph, facts: Facts, ops: Iterable[Op]) -> set[str]:
    """Operands of a stage's ops through which a gradient comes back."""
    return {
        str(ref)
        for op in ops
        if op.grad
        and any(
            name in facts.reaching and graph.values[name].requires_grad
            for name in (*op.outputs, *op.mutates)
            if name
        )
        for ref in op.operands
    }


def make_unit(
    graph: Graph,
    plan: Plan,
    facts: Facts,
    ops: tuple[Op, ...],
    transfers: tuple[Transfer, ...],
    stage: int,
    rank: int,
) -> Unit:
    """Put a stage's unit together."""
    names = {op.name for op in ops}
    read = frozenset(str(ref) for op in ops for ref in op.operands)
    receives = tuple(t for t in transfers if t.target == stage)
    sends = tuple(t for t in transfers if t.source == stage)
    outputs = tuple(
        (n, v) for n, v in graph.outputs if facts.stage_of[facts.producer[v].name] == stage
    )
    inputs = tuple(i for i in graph.inputs if i.name in read)
    present = {name for op in ops for name in op.outputs if name}
    present |= {t.value for t in receives} | {i.name for i in inputs}
    return Unit(
        stage=stage,
        rank=rank,
        ops=ops,
        values={name: meta for name, meta in graph.values.items() if name in present},
        inputs=inputs,
        receives=receives,
        sends=sends,
        state=tuple(
            held(graph, plan, facts, read, fqn, stage)
            for fqn in plan.placements
            if stage in holders(plan, fqn)
        ),
        sunk=frozenset(name for name in names if facts.stage_of[name] != stage),
        seeds=tuple(seed for seed in layer_seeds(graph) if seed[0] in names),
        outputs=outputs,
        calls=whole_calls(graph, names),
    )


def holders(plan: Plan, fqn: str) -> tuple[int, ...]:
    """The stages that hold a parameter."""
    return tuple(stage for stage, _ in plan.placements[fqn])


def held(
    graph: Graph, plan: Plan, facts: Facts, here: frozenset[str], fqn: str, stage: int
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
    return Held(mine[0], fqn, tuple(mine[1:]), stages, trainable=meta.requires_grad)


def layer_seeds(graph: Graph) -> tuple[tuple[str, str], ...]:
    """The first random op of each layer that has one, and the layer's path."""
    ops = {op.name: op for op in graph.ops}
    firsts = (
        (next((n for n in layer.ops if ops[n].random), None), layer.path) for layer in graph.layers
    )
    return tuple((name, path) for name, path in firsts if name is not None)


def whole_calls(graph: Graph, names: set[str]) -> tuple[CallId, ...]:
    """Module calls all of whose ops are here, outermost first; never the model's own."""
    total: dict[CallId, int] = {}
    here: dict[CallId, int] = {}
    for op in graph.ops:
        call: CallId | None = op.call
        while call is not None:
            total[call] = total.get(call, 0) + 1
            here[call] = here.get(call, 0) + (op.name in names)
            call = graph.calls[call].parent if call in graph.calls else None
    return tuple(
        call for call in graph.calls if call[0] and total.get(call, 0) == here.get(call, -1)
    )
