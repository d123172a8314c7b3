"""Where stages begin -> the plan."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from ...analysis.cost import Costs
from ...analysis.dataflow import holders
from ...ir.graph import Graph
from ...ir.plan import Mesh, Placement, Plan, Stage
from ...ir.spec import Random, Spec


def assemble(graph: Graph, costs: Costs, spec: Spec, starts: Sequence[int]) -> Plan:
    """The plan whose stages begin at these layers, stage s on rank s.

    Ranks fill a node before the next one, so neighbours are on one node wherever they can be.
    """
    stages = tuple(
        Stage(
            index=index,
            layers=tuple(range(first, stop)),
            mesh=Mesh(axes=(), ranks=(index,)),
            time_s=sum(costs.layer_s[first:stop]),
        )
        for index, (first, stop) in enumerate(pairwise([*starts, len(graph.layers)]))
    )
    return Plan(
        stages=stages,
        placements=placements(graph, stages),
        global_batch=spec.train.global_batch,
        microbatches=spec.parallel.microbatches,
        even=is_even(spec),
    )


def placements(
    graph: Graph, stages: Sequence[Stage]
) -> Mapping[str, tuple[tuple[int, tuple[tuple[str, Placement], ...]], ...]]:
    """Each parameter and buffer on every stage whose layers need it; whole: a stage is one rank."""
    stage_of = {layer: stage.index for stage in stages for layer in stage.layers}
    return {
        fqn: tuple((stage, ()) for stage in dict.fromkeys(stage_of[layer] for layer in layers))
        for fqn, layers in holders(graph).items()
    }


def is_even(spec: Spec) -> bool:
    """Whether every microbatch of every step has the same size, as far as the spec tells."""
    batch, data = spec.train.global_batch, spec.data
    if batch % spec.parallel.microbatches:
        return False
    if data.last_batch == "drop":
        return True
    return isinstance(data, Random) and data.samples % batch == 0
