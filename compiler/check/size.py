"""check_size: layers that a loop of the user's blew up when it was traced."""

from collections import Counter

from ..ir.graph import Graph, Layer

many = 2000
"""Operations; a layer of a transformer has some dozens."""


def check_size(graph: Graph) -> tuple[str, ...]:
    """A word on each kind of layer with so many operations that compiling takes long."""
    first: dict[str, Layer] = {}
    for layer in graph.layers:
        first.setdefault(layer.kind, layer)
    ops = {op.name: op for op in graph.ops}
    found = []
    for layer in first.values():
        if len(layer.ops) < many:
            continue
        lines = Counter((ops[name].where, ops[name].call[0]) for name in layer.ops)
        (((where, path), count),) = lines.most_common(1)
        whole = f", or that module kept whole: model: {{leaf: [{path}]}}" if path else ""
        found.append(
            f"{layer.path or graph.model} is {len(layer.ops):,} operations, {count:,} of them of "
            f"{where} in {path or graph.model}: a trace unrolls loops, and compiling takes longer "
            f"with every round. Shorter: an implementation without the loop{whole}"
        )
    return tuple(found)
