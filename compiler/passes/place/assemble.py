"""Where stages begin -> the plan."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from ...analysis.cost import Costs
from ...analysis.dataflow import holders
from ...analysis.memory import layer_s
from ...ir.graph import Graph
from ...ir.plan import Mesh, Placement, Plan, Replicate, Stage
from ...ir.spec import Random, Spec

bucket_bytes = {"cpu": 2**22, "cuda": 25 * 2**20}
"""By kind of device. Over gloo, 1 and 4 MiB were fastest of what was tried, from a message for each
parameter to one for all; 25 MiB is the default of torch's DistributedDataParallel."""


def assemble(graph: Graph, costs: Costs, spec: Spec, starts: Sequence[int]) -> Plan:
    """The plan whose stages begin at these layers, replica r of stage s on rank s x data + r.

    Ranks fill a node before the next one: replicas, which exchange most, are on one node wherever
    they can be, then neighbouring stages.
    """
    data = spec.parallel.data
    stages = tuple(
        Stage(
            index=index,
            layers=tuple(range(first, stop)),
            mesh=Mesh(
                axes=(("data", data),) if data > 1 else (),
                ranks=tuple(range(index * data, (index + 1) * data)),
            ),
            time_s=sum(layer_s(costs, spec, index)[first:stop]),
        )
        for index, (first, stop) in enumerate(pairwise([*starts, len(graph.layers)]))
    )
    return Plan(
        stages=stages,
        placements=placements(graph, stages),
        global_batch=spec.train.global_batch,
        microbatches=spec.parallel.microbatches,
        even=is_even(spec),
        bucket_bytes=bucket_bytes[spec.cluster.device.kind],
        recompute=graph.recompute,
        rerun=spec.parallel.recompute == "stage",
        sync_norms=spec.parallel.sync_batch_norm and data > 1,
    )


def placements(
    graph: Graph, stages: Sequence[Stage]
) -> Mapping[str, tuple[tuple[int, tuple[tuple[str, Placement], ...]], ...]]:
    """Each parameter and buffer on every stage whose layers need it, whole on each of its ranks."""
    stage_of = {layer: stage.index for stage in stages for layer in stage.layers}
    return {
        fqn: tuple(
            (stage, tuple((axis, Replicate()) for axis, _ in stages[stage].mesh.axes))
            for stage in dict.fromkeys(stage_of[layer] for layer in layers)
        )
        for fqn, layers in holders(graph).items()
    }


def is_even(spec: Spec) -> bool:
    """Whether every microbatch of every step has the same size, as far as the spec tells."""
    batch, data = spec.train.global_batch, spec.data
    if batch % (spec.parallel.microbatches * spec.parallel.data):
        return False
    if data.last_batch == "drop":
        return True
    return isinstance(data, Random) and data.samples % batch == 0
