"""Runs of ops -> layers with their sizes and kinds."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ...analysis.dataflow import canonical_fqns, metas, moved_bytes, operands
from ...ir.graph import Amount, Arg, Graph, Items, Layer, Op, Ref, State, TensorMeta, show
from .walk import Run


def describe(graph: Graph, runs: Iterable[Run]) -> Iterator[Layer]:
    """The layer that each run becomes; paths are unique (`#1` for the second run of a call)."""
    fqns, known, seen = canonical_fqns(graph), metas(graph), Counter[str]()
    reads, moved = operands(graph), moved_bytes(graph)
    for run in runs:
        path, number = run.owner
        name = f"{path}@{number}" if number else path
        ops = graph.ops[run.start : run.stop]
        read = dict.fromkeys(n for names in reads[run.start : run.stop] for n in names)
        state = tuple(n for n in read if n in graph.parameters)
        yield Layer(
            path=f"{name}#{seen[name]}" if seen[name] else name,
            call=run.owner if run.whole else None,
            kind=kind_of(graph, ops, path, known, fqns),
            ops=tuple(op.name for op in ops),
            parameters=state,
            param_bytes=total(known[n].bytes for n in state).at(1),
            activation_bytes=total(op.saved_bytes for op in ops),
            flops=total(op.flops for op in ops),
            bytes_moved=total(moved[run.start : run.stop]),
        )
        seen[name] += 1


def total(amounts: Iterable[Amount]) -> Amount:
    return sum(amounts, Amount())


def kind_of(
    graph: Graph,
    ops: Sequence[Op],
    path: str,
    known: Mapping[str, TensorMeta],
    fqns: Mapping[str, str],
) -> str:
    """The kind of a layer, `Block-3f09c2aa`: equal for equal classes, ops, literals and metas.

    Values and parameters count by the order in which they appear, not by name.
    """
    names: dict[str, str] = {}

    def rename(argument: Arg) -> Arg:
        if isinstance(argument, Ref | State):
            name = fqns[argument.fqn] if isinstance(argument, State) else argument.name
            meta = known[name]
            return Ref(names.setdefault(name, f"%{len(names)} {meta} {meta.requires_grad}"))
        if isinstance(argument, tuple):
            return tuple(map(rename, argument))
        if isinstance(argument, Items):
            return Items(tuple((key, rename(value)) for key, value in argument.items))
        return argument

    lines = []
    for op in ops:
        module = graph.modules.get(op.call[0])
        arguments = [show(rename(a)) for a in op.args]
        arguments += [f"{key}={show(rename(value))}" for key, value in op.kwargs]
        results = [show(rename(Ref(name))) if name else "_" for name in op.outputs]
        lines.append(
            f"{results} = {op.target}({arguments}) {op.grad} {op.autocast}"
            f" {module and module.cls} {inside(op.call[0], path)}"
        )
    owner = graph.modules.get(path)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
    return f"{owner.cls.rpartition('.')[2] if owner else 'ops'}-{digest}"


def inside(path: str, around: str) -> str:
    """The part of a path below another; "" for a path that is elsewhere."""
    return path.removeprefix(around) if path.startswith(f"{around}.") else ""
