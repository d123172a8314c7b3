"""What a Plan promises."""

from collections.abc import Iterator

from ...errors import InternalError
from ...ir.graph import Graph
from ...ir.plan import Plan
from ...ir.report import show_bytes
from ...ir.spec import Spec
from ..dataflow import holders
from ..memory import measure_memory


def verify_plan(plan: Plan, graph: Graph, spec: Spec) -> None:
    """Check that layers, samples and parameters are each dealt with, and that memory is enough.

    Raises InternalError naming everything that is wrong, one fault a line.
    """
    if faults := [*stage_faults(plan, graph, spec), *sample_faults(plan, spec)]:
        raise InternalError("\n".join(faults))
    if faults := [*placement_faults(plan, graph), *memory_faults(plan, graph, spec)]:
        raise InternalError("\n".join(faults))


def stage_faults(plan: Plan, graph: Graph, spec: Spec) -> Iterator[str]:
    """Stages are the layers in order, each once, and no rank is left without a stage."""
    if len(plan.stages) != spec.parallel.pipeline:
        yield f"{len(plan.stages)} stages for pipeline {spec.parallel.pipeline}"
    held = [layer for stage in plan.stages for layer in stage.layers]
    if held != list(range(len(graph.layers))):
        yield f"stages hold layers {held}, not 0 to {len(graph.layers) - 1} in order"
    for index, stage in enumerate(plan.stages):
        if stage.index != index:
            yield f"stage {index} is numbered {stage.index}"
        if not stage.layers:
            yield f"stage {index} has no layer"
        if not stage.mesh.ranks or len(set(stage.mesh.ranks)) != len(stage.mesh.ranks):
            yield f"stage {index} has ranks {list(stage.mesh.ranks)}"
    ranks = {rank for stage in plan.stages for rank in stage.mesh.ranks}
    if ranks != set(range(len(ranks))) or len(ranks) > spec.cluster.num_devices:
        yield f"ranks are {sorted(ranks)} on {spec.cluster.num_devices} devices"


def sample_faults(plan: Plan, spec: Spec) -> Iterator[str]:
    """Every sample of a batch is in one microbatch, so that the weights of all sum to one."""
    if plan.global_batch != spec.train.global_batch:
        yield f"global batch {plan.global_batch}; the spec says {spec.train.global_batch}"
    for samples in (plan.global_batch, plan.global_batch - 1, 1):  # a short last batch too
        sizes = plan.sizes(samples)
        if sum(sizes) != samples or len(sizes) != plan.microbatches * plan.replicas:
            yield f"a batch of {samples} is divided into microbatches of {sizes}"
    if plan.even and len(set(plan.sizes(plan.global_batch))) > 1:
        yield f"called even, with microbatches of {plan.sizes(plan.global_batch)}"


def placement_faults(plan: Plan, graph: Graph) -> Iterator[str]:
    """Every parameter is on the stages whose layers need it, and on no other."""
    stage_of = {layer: stage.index for stage in plan.stages for layer in stage.layers}
    for fqn, layers in holders(graph).items():
        needed = sorted({stage_of[layer] for layer in layers})
        placed = plan.placements.get(fqn, ())
        if sorted(stage for stage, _ in placed) != needed:
            yield f"{fqn} is on stages {[stage for stage, _ in placed]}; stages {needed} need it"
        for stage, axes in placed:
            known = [name for name, _ in plan.stages[stage].mesh.axes]
            if [name for name, _ in axes] != known:
                yield f"{fqn} on stage {stage} is placed along {axes}; the mesh has {known}"
    for fqn in plan.placements.keys() - graph.parameters.keys():
        yield f"{fqn} is placed, but is no parameter"


def memory_faults(plan: Plan, graph: Graph, spec: Spec) -> Iterator[str]:
    """Each rank's memory fits its device."""
    for memory in measure_memory(graph, plan, spec):
        if memory.total > memory.capacity:
            yield (
                f"rank {memory.rank} needs {show_bytes(memory.total)}"
                f" of {show_bytes(memory.capacity)}"
            )
