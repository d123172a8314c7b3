"""place: which layers each stage has, and on which rank it is.

The stages are runs of layers with the smallest largest time, all layers counted: embedding and head
too. If the device's memory is too small for them, the fastest stages that fit; early stages of 1F1B
hold more microbatches, so they get fewer layers then. Or they begin where the spec says.
"""

from ...analysis.cost import Costs
from ...analysis.memory import measure_memory, measure_runs
from ...errors import PlanError
from ...ir.graph import Graph
from ...ir.plan import Plan
from ...ir.spec import Spec
from .assemble import assemble
from .compare import rivals
from .cuts import resolve_cuts
from .fit import fastest, leanest, refuse, refuse_parted

__all__ = ["place", "rivals"]


def place(graph: Graph, costs: Costs, spec: Spec) -> Plan:
    """The plan.

    Before: the graph has layers, priced at the spec's microbatch size. After: each layer is in one
    stage, each stage has a layer, each parameter is on every stage that needs it, each rank's
    memory fits. Raises PlanError where that cannot be, and for cuts that name no layer.
    """
    layers, stages = len(graph.layers), spec.parallel.pipeline
    if stages > layers:
        raise PlanError(
            f"pipeline {stages} needs as many layers; the model has {layers}",
            spec.at("parallel.pipeline"),
            f"pipeline: {layers}",
        )
    if spec.parallel.cuts != "auto":
        starts = resolve_cuts(graph, spec)
        plan = assemble(graph, costs, spec, starts)
        if not fits(graph, plan, spec):
            raise refuse(graph, spec, starts)
        return plan
    for footprint in (None, measure_runs(graph, costs.microbatch_size)):
        best = fastest(graph, costs, spec, footprint)
        if best is None and footprint is None:
            raise refuse_parted(graph, spec)
        if best is not None and fits(graph, plan := assemble(graph, costs, spec, best), spec):
            return plan
    raise refuse(graph, spec, leanest(graph, spec))


def fits(graph: Graph, plan: Plan, spec: Spec) -> bool:
    """Whether each rank's memory fits its device."""
    return all(memory.total <= memory.capacity for memory in measure_memory(graph, plan, spec))
