"""segment: ops -> layers, the units that a cut respects.

Module calls are walked from the root down. A call becomes one layer if it is
  - a leaf (torch's own class), or has no calls inside, or
  - an element of a container (ModuleList, ModuleDict, Sequential) with at most 1/4 of the model's
    FLOPs, or
  - any call with at most 1/16 of them;
otherwise the calls inside it become layers in turn, and its own ops between them are loose. Loose
ops that only reshape and add (no FLOPs, no parameter, no randomness) join a neighbour: they are
nothing to cut around, and the loss so joins the last layer: a cut before it would carry the logits.
The rule knows nothing of stages, so what is keyed by a layer (a seed, a kind) is the same under
every plan.
"""

from dataclasses import replace

from ...analysis.dataflow import moved_bytes, written_spans
from ...ir.graph import Graph
from .describe import describe
from .join import join_glue, join_written
from .walk import walk


def segment(graph: Graph) -> Graph:
    """The graph with its layers.

    Before: ops in the order in which the model ran them. After: each op is in one layer, layers
    follow each other in op order, memory that is written in place is written within one layer.
    """
    weights = weigh(graph)
    runs = join_glue(graph, walk(graph, weights), weights)
    return replace(graph, layers=tuple(describe(graph, join_written(runs, written_spans(graph)))))


def weigh(graph: Graph) -> tuple[int, ...]:
    """FLOPs of each op; bytes moved where the whole model has none."""
    flops = tuple(op.flops.at(1) for op in graph.ops)
    return flops if any(flops) else tuple(amount.at(1) for amount in moved_bytes(graph))
