"""Other plans that one would try, and why they lost."""

from collections.abc import Iterator

import numpy as np

from ...analysis.cost import Costs
from ...analysis.kept import sums
from ...analysis.memory import measure_memory
from ...ir.graph import Graph
from ...ir.plan import Plan
from ...ir.report import show_seconds
from ...ir.spec import Spec
from .assemble import assemble
from .fit import fastest, shortage
from .partition import partition


def rivals(graph: Graph, costs: Costs, plan: Plan, spec: Spec) -> Iterator[tuple[str, Plan, str]]:
    """(name, plan, why it lost); none that equals the plan."""
    starts = {plan_starts(plan)}
    for name, others in candidates(graph, costs, spec):
        if others not in starts:
            starts.add(others)
            rival = assemble(graph, costs, spec, others)
            yield name, rival, why_lost(graph, plan, rival, spec)


def plan_starts(plan: Plan) -> tuple[int, ...]:
    return tuple(stage.layers[0] for stage in plan.stages)


def candidates(graph: Graph, costs: Costs, spec: Spec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Plans by name: the fastest of all, equal numbers of layers, equal parameters."""
    layers, stages = len(graph.layers), spec.parallel.pipeline
    if (best := fastest(graph, costs, spec)) is not None:
        yield "smallest largest stage, whatever memory it needs", best
    yield "equal numbers of layers", tuple(layers * stage // stages for stage in range(stages))
    sizes = sums([layer.param_bytes for layer in graph.layers]).astype(np.float64)
    if (balanced := partition(lambda _: sizes, stages, [0] * layers)) is not None:
        yield "equal parameters", balanced


def why_lost(graph: Graph, plan: Plan, rival: Plan, spec: Spec) -> str:
    """The first thing in which the plan is better."""
    worst = max(measure_memory(graph, rival, spec), key=lambda memory: memory.total)
    if worst.total > worst.capacity:
        return f"rank {worst.rank} needs {shortage(worst)}"
    ours = max(stage.time_s for stage in plan.stages)
    slowest = max(rival.stages, key=lambda stage: stage.time_s)
    times = f"{show_seconds(slowest.time_s)} a microbatch, the plan's {show_seconds(ours)}"
    if spec.parallel.cuts != "auto":
        return "the spec names the cuts"
    if slowest.time_s > ours * (1 + 1e-6):
        cuts = ", ".join(graph.layers[start].path for start in plan_starts(rival)[1:])
        return f"its largest stage, {slowest.index}, takes {times}; to have it: cuts: [{cuts}]"
    return f"no faster, and less even: its largest stage takes {times}"
