"""Runs of layers that are no stage of any plan, by [first, stop]."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ..ir.graph import Graph, State
from .dataflow import canonical_fqns, holders, layer_of_op, recomputable, storages
from .kept import sums

Runs = NDArray[np.bool_]


def forbidden_runs(graph: Graph) -> Runs:
    """True where a stage would make nothing, as every other makes for itself what it has of masks
    and positions, or would read without gradient what another one trains."""
    size = len(graph.layers)
    makes, free = [0] * size, recomputable(graph)
    for op, layer in zip(graph.ops, layer_of_op(graph), strict=True):
        makes[layer] += not free.issuperset(name for name in op.outputs if name)
    runs: Runs = sums(makes) == 0
    for readers, trained in lone_readers(graph).values():
        read = count_in(size, readers)
        runs |= (read > 0) & (read < len(readers)) & (count_in(size, trained) == 0)
    runs[0, size] = False  # one stage is always right
    return runs


def count_in(size: int, layers: frozenset[int]) -> NDArray[np.int64]:
    """By [first, stop]: how many of the layers a run has."""
    return sums([int(layer in layers) for layer in range(size)])


def lone_readers(graph: Graph) -> Mapping[str, tuple[frozenset[int], frozenset[int]]]:
    """Parameter that some layer reads without gradient, as in a no_grad or by detach() -> the
    layers that hold it, and those of them through which its gradient comes."""
    trained = trained_in(graph)
    return {
        fqn: (frozenset(layers), trained[fqn])
        for fqn, layers in holders(graph).items()
        if fqn in trained and trained[fqn] != frozenset(layers)
    }


def trained_in(graph: Graph) -> Mapping[str, frozenset[int]]:
    """Trainable parameter -> the layers through which its gradient comes.

    An op that writes in place passes on what comes to any name of the memory.
    """
    memory, fqns = storages(graph), canonical_fqns(graph)
    found: dict[str, set[int]] = {
        fqn: set() for fqn, parameter in graph.parameters.items() if parameter.meta.requires_grad
    }
    reached = {graph.outputs[0][1]}
    written = {memory[graph.outputs[0][1]]}
    for op, layer in reversed(list(zip(graph.ops, layer_of_op(graph), strict=True))):
        passes = reached.intersection(op.outputs) or written.intersection(
            memory[name] for name in op.mutates
        )
        if not op.grad or not passes:
            continue
        for operand in op.operands:
            if isinstance(operand, State):
                if fqns[operand.fqn] in found:
                    found[fqns[operand.fqn]].add(layer)
            elif operand.name in graph.values and graph.values[operand.name].requires_grad:
                reached.add(operand.name)
                written.add(memory[operand.name])
    return {fqn: frozenset(layers) for fqn, layers in found.items()}
