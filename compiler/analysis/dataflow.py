"""Where values come from, who reads them, and which of them share memory.

A name is a value's, or a parameter's or buffer's as `Graph.parameters` has it: tied names are one.
What is said here holds for every cut: which values any stage can compute by itself, and which
operations write to memory that others read.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

from ..ir.graph import Amount, CallId, Graph, Input, Op, State, TensorMeta
from ..ir.values import has_batch


def canonical_fqns(graph: Graph) -> dict[str, str]:
    """Every name of a parameter or buffer -> the name under which `graph.parameters` has it."""
    return {
        name: fqn
        for fqn, parameter in graph.parameters.items()
        for name in (fqn, *parameter.aliases)
    }


def operands(graph: Graph) -> tuple[tuple[str, ...], ...]:
    """For each op the names that it reads, each once, in order."""
    fqns = canonical_fqns(graph)
    return tuple(
        tuple(dict.fromkeys(fqns[o.fqn] if isinstance(o, State) else o.name for o in op.operands))
        for op in graph.ops
    )


def metas(graph: Graph) -> dict[str, TensorMeta]:
    """Every name -> its meta."""
    found = {fqn: parameter.meta for fqn, parameter in graph.parameters.items()}
    return found | {i.name: i.meta for i in graph.inputs} | dict(graph.values)


def readers(graph: Graph) -> dict[str, list[int]]:
    """Name -> positions of the ops that read it, in order; [] for one that nothing reads."""
    positions: dict[str, list[int]] = {i.name: [] for i in graph.inputs}
    positions |= {fqn: [] for fqn in graph.parameters}
    positions |= {name: [] for op in graph.ops for name in op.outputs if name}
    for at, names in enumerate(operands(graph)):
        for name in names:
            positions[name].append(at)
    return positions


def storages(graph: Graph) -> dict[str, str]:
    """Name -> a name that stands for its memory: equal for all that share it.

    A view shares the memory of what it views; so does what an in-place op returns.
    """
    fqns = canonical_fqns(graph)
    parent: dict[str, str] = {}

    def find(name: str) -> str:
        name = fqns.get(name, name)
        while (above := parent.setdefault(name, name)) != name:
            parent[name] = parent[above]
            name = parent[name]
        return name

    for op in graph.ops:
        for output in filter(None, op.outputs):
            for shared in op.views:
                parent[find(output)] = find(shared)
    names = [i.name for i in graph.inputs] + list(fqns)
    names += [output for op in graph.ops for output in op.outputs if output]
    return {name: find(name) for name in names}


def recomputable(graph: Graph) -> frozenset[str]:
    """Values that any stage can compute by itself: masks, positions, rotary tables, shifted labels.

    All that they come from are inputs of the graph and constants or buffers that nothing writes; no
    parameter and no randomness is behind them. Such a value is computed again where it is needed
    instead of being sent.
    """
    fqns, memory, reads = canonical_fqns(graph), storages(graph), operands(graph)
    written = {fqns[name] for op in graph.ops for name in op.mutates if name in fqns}
    fixed = {fqn for fqn, parameter in graph.parameters.items() if parameter.buffer} - written
    given = fixed | {i.name for i in graph.inputs}
    spoilt: set[str] = set()  # memory that an op with a parameter or randomness behind it writes
    while True:
        found, before = {name for name in given if memory[name] not in spoilt}, len(spoilt)
        for op, names in zip(graph.ops, reads, strict=True):
            if not op.random and found.issuperset(names):
                found.update(o for o in op.outputs if o and memory[o] not in spoilt)
            else:
                spoilt.update(memory[name] for name in op.mutates)
        if len(spoilt) == before:
            return frozenset(found - given)


def written_spans(graph: Graph) -> list[tuple[int, int]]:
    """(first op, last op) that must run in one stage, because memory is written between them.

    A value that is written in place: from the op that makes its memory to the last write, for a
    stage that receives it has a copy. A buffer: every op that touches it, for each stage that holds
    it has a copy that lasts. An input, which every stage reads from the data: from the first write
    on.
    """
    memory = storages(graph)
    writes: dict[str, list[int]] = {}
    touched: dict[str, list[int]] = {}
    for at, (op, names) in enumerate(zip(graph.ops, operands(graph), strict=True)):
        for storage in {memory[name] for name in (*names, *op.mutates, *op.outputs) if name}:
            touched.setdefault(storage, []).append(at)
        for storage in {memory[name] for name in op.mutates}:
            writes.setdefault(storage, []).append(at)
    inputs = {memory[i.name] for i in graph.inputs}
    states = {memory[fqn] for fqn in graph.parameters}
    return [
        (
            positions[0] if storage in inputs else touched[storage][0],
            touched[storage][-1] if storage in inputs | states else positions[-1],
        )
        for storage, positions in writes.items()
    ]


def moved_bytes(graph: Graph) -> tuple[Amount, ...]:
    """For each op the bytes that it reads and writes; a view moves none.

    A table counts in full though a lookup reads a few rows: its backward writes a gradient of the
    table's size.
    """
    known = metas(graph)
    return tuple(
        sum(
            (known[name].bytes for name in (*names, *op.outputs) if name),
            Amount(),
        )
        if op.mutates or not op.views
        else Amount()
        for op, names in zip(graph.ops, operands(graph), strict=True)
    )


def crossing_bytes(graph: Graph) -> list[int]:
    """Bytes of one sample that a cut before op i carries, for i = 0 .. number of ops."""
    change = [0] * (len(graph.ops) + 1)
    free, reads = recomputable(graph), readers(graph)
    for at, op in enumerate(graph.ops):
        for name in op.outputs:
            if name and name not in free and reads[name]:
                change[at + 1] += graph.values[name].bytes.at(1)
                change[reads[name][-1] + 1] -= graph.values[name].bytes.at(1)
    return list(accumulate(change))


@dataclass(frozen=True, slots=True)
class Flow:
    """A value and the layers between which it goes."""

    value: str
    meta: TensorMeta
    layer: int
    """That makes it."""
    readers: tuple[int, ...]
    """Later layers that read it, in order."""


def flows(graph: Graph) -> tuple[Flow, ...]:
    """Every value that one layer makes and another reads, but the recomputable ones."""
    where, free, reads = layer_of_op(graph), recomputable(graph), readers(graph)
    found = []
    for at, op in enumerate(graph.ops):
        for name in op.outputs:
            if name and name not in free:
                later = sorted({where[reader] for reader in reads[name]} - {where[at]})
                if later:
                    found.append(Flow(name, graph.values[name], where[at], tuple(later)))
    return tuple(found)


def cut_bytes(graph: Graph, samples: int, *, gradients: bool = False) -> tuple[int, ...]:
    """For each layer the bytes that a cut before it carries: activations, or gradients back."""
    change = [0] * (len(graph.layers) + 1)
    for flow in flows(graph):
        if flow.meta.requires_grad or not gradients:
            change[flow.layer + 1] += flow.meta.bytes.at(samples)
            change[flow.readers[-1] + 1] -= flow.meta.bytes.at(samples)
    return tuple(accumulate(change[:-1]))


def layer_of_op(graph: Graph) -> tuple[int, ...]:
    """For each op the index of its layer."""
    return tuple(index for index, layer in enumerate(graph.layers) for _ in layer.ops)


def holders(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Parameter or buffer -> the layers that need it, in order; never none.

    A layer that reads a recomputable value needs the buffers behind it. What nothing reads goes to
    the layer of the parameter with the nearest name, that is the longest common beginning.
    """
    where, memory, behind = layer_of_op(graph), storages(graph), buffers_behind(graph)
    held: dict[str, set[int]] = {fqn: set() for fqn in graph.parameters}
    for at, names in zip(where, operands(graph), strict=True):
        for fqn in set(names).union(*(behind.get(memory[name], ()) for name in names)):
            if fqn in held:
                held[fqn].add(at)
    used = [fqn for fqn, layers in held.items() if layers]
    for fqn, layers in held.items():
        if not layers:
            near = max(used, key=lambda other: shared_path(fqn, other), default=None)
            layers.add(min(held[near]) if near and shared_path(fqn, near) else 0)
    return {fqn: tuple(sorted(layers)) for fqn, layers in held.items()}


def buffers_behind(graph: Graph) -> dict[str, set[str]]:
    """Memory of a recomputable value -> buffers behind it, and behind what is written there."""
    free, memory = recomputable(graph), storages(graph)
    behind: dict[str, set[str]] = {}
    for op, names in zip(graph.ops, operands(graph), strict=True):
        needed = {name for name in names if name in graph.parameters}
        needed.update(*(behind.get(memory[name], ()) for name in names))
        for name in (*op.outputs, *op.mutates):
            if name in free:
                behind.setdefault(memory[name], set()).update(needed)
    return behind


def shared_path(one: str, other: str) -> int:
    """How many parts two names have in common from the left."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def count_calls(graph: Graph, ops: Iterable[Op]) -> Counter[CallId]:
    """How many of the ops each module call has."""
    found = Counter[CallId]()
    for op in ops:
        call: CallId | None = op.call
        while call is not None:
            found[call] += 1
            call = graph.calls[call].parent if call in graph.calls else None
    return found


def inputs_of(
    graph: Graph, ops: Sequence[Op], taken: Sequence[TensorMeta], weighed: Sequence[str]
) -> tuple[Input, ...]:
    """The fields that a stage with these ops reads, and those that the weight follows from; where
    all that it takes of the batch is its size (noise is drawn from that), one to see it by."""
    read = {str(ref) for op in ops for ref in op.operands}.union(weighed)
    found = [i for i in graph.inputs if i.name in read]
    shown = any(has_batch(meta.shape) for meta in (*taken, *(i.meta for i in found)))
    if not shown and any(has_batch((op.args, op.kwargs)) for op in ops):
        found += [i for i in graph.inputs if has_batch(i.meta.shape)][:1]
    return tuple(found)


def layer_seeds(graph: Graph) -> tuple[tuple[str, str], ...]:
    """The first random op of each layer that has one, and the layer's path."""
    ops = {op.name: op for op in graph.ops}
    firsts = (
        (next((n for n in layer.ops if ops[n].random), None), layer.path) for layer in graph.layers
    )
    return tuple((name, path) for name, path in firsts if name is not None)
