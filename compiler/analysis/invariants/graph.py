"""What a Graph promises."""

from collections import Counter
from collections.abc import Iterator

from ...errors import InternalError
from ...ir.graph import Graph, State
from ..dataflow import canonical_fqns, operands, written_spans


def verify_graph(graph: Graph) -> None:
    """Check names, metas and, where there are layers, that they divide the ops.

    Raises InternalError naming everything that is wrong, one fault a line.
    """
    if faults := list(name_faults(graph)):
        raise InternalError("\n".join(faults))
    if graph.layers and (faults := list(layer_faults(graph))):
        raise InternalError("\n".join(faults))
    if graph.evaluation is not None:
        verify_graph(graph.evaluation)


def name_faults(graph: Graph) -> Iterator[str]:
    """Each name is defined once and before use, and has a meta."""
    fqns = canonical_fqns(graph)
    defined = Counter(i.name for i in graph.inputs)
    tied = Counter(n for fqn, p in graph.parameters.items() for n in (fqn, *p.aliases))
    yield from (f"the name {name} is given to {n} parameters" for name, n in tied.items() if n > 1)
    for op in graph.ops:
        for operand in op.operands:
            known = operand.fqn in fqns if isinstance(operand, State) else operand.name in defined
            if not known:
                yield f"op {op.name} reads {operand} before it is defined"
        for name in op.outputs:
            if name and name not in graph.values:
                yield f"op {op.name}: {name} has no meta"
            defined.update([name] if name else [])
        for name in (*op.mutates, *op.views):
            if name not in defined and name not in fqns:
                yield f"op {op.name} writes or views {name}, which is not defined"
    yield from (f"{name} is defined {count} times" for name, count in defined.items() if count > 1)
    ops = Counter(op.name for op in graph.ops)
    yield from (f"{count} ops are called {name}" for name, count in ops.items() if count > 1)
    for output, name in graph.outputs:
        if name not in defined:
            yield f"output {output}: {name} is not defined"


def layer_faults(graph: Graph) -> Iterator[str]:
    """Each op is in one layer, in op order, and memory is written within one layer.

    The last is what keeps a write before every later reader of the memory under every cut.
    """
    order = [op.name for op in graph.ops]
    held = [name for layer in graph.layers for name in layer.ops]
    if held != order:
        extra, missing = Counter(held) - Counter(order), Counter(order) - Counter(held)
        yield (
            f"layers are not the ops in order: twice or unknown {list(extra)},"
            f" in none {list(missing)}"
        )
        return
    paths = Counter(layer.path for layer in graph.layers)
    yield from (f"{count} layers are called {path!r}" for path, count in paths.items() if count > 1)
    where = [at for at, layer in enumerate(graph.layers) for _ in layer.ops]
    read: list[set[str]] = [set() for _ in graph.layers]
    for at, operand_names in zip(where, operands(graph), strict=True):
        read[at].update(name for name in operand_names if name in graph.parameters)
    for layer, names in zip(graph.layers, read, strict=True):
        if not layer.ops:
            yield f"layer {layer.path!r} is empty"
        if set(layer.parameters) != names:
            yield f"layer {layer.path!r} lists other parameters than its ops read"
    for first, last in written_spans(graph):
        if where[first] != where[last]:
            yield (
                f"memory written in place from op {order[first]} to {order[last]}"
                f" is cut apart by layers {where[first]} and {where[last]}"
            )
