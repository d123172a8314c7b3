"""Other plans that one would try, and why they lost."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from ...analysis.cost import Costs
from ...analysis.dataflow import cut_bytes
from ...analysis.memory import measure_memory, sums
from ...ir.graph import Graph
from ...ir.plan import Plan
from ...ir.report import show_seconds
from ...ir.spec import Spec
from .assemble import assemble
from .fit import fastest, shortage
from .partition import partition


def runners_up(
    graph: Graph, costs: Costs, plan: Plan, spec: Spec
) -> tuple[tuple[str, float, str], ...]:
    """(plan, seconds of a step, why it lost), the fastest first; none that equals the plan."""
    starts = {plan_starts(plan)}
    found = []
    for name, others in rivals(graph, costs, spec):
        if others not in starts:
            starts.add(others)
            rival = assemble(graph, costs, spec, others)
            why = why_lost(graph, plan, rival, spec)
            found.append((name, step_s(graph, costs, rival), why))
    return tuple(sorted(found, key=lambda rival: rival[1]))


def plan_starts(plan: Plan) -> tuple[int, ...]:
    return tuple(stage.layers[0] for stage in plan.stages)


def rivals(graph: Graph, costs: Costs, spec: Spec) -> Iterator[tuple[str, tuple[int, ...]]]:
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
    if slowest.time_s > ours * (1 + 1e-6):
        return f"its largest stage, {slowest.index}, takes {times}"
    if spec.parallel.cuts != "auto":
        return "the spec names the cuts"
    return f"no faster, and less even: its largest stage takes {times}"


def step_s(graph: Graph, costs: Costs, plan: Plan) -> float:
    """Seconds of a step: one microbatch goes through all stages and back, the others queue behind
    it at the slowest stage."""
    times = [stage.time_s for stage in plan.stages]
    return sum(times) + (plan.microbatches - 1) * max(times) + transfers_s(graph, costs, plan)


def transfers_s(graph: Graph, costs: Costs, plan: Plan) -> float:
    """Seconds of the messages of one microbatch between neighbours, there and back."""
    there, back = (
        cut_bytes(graph, costs.microbatch_size, gradients=gradients) for gradients in (False, True)
    )
    total = 0.0
    for source, target in pairwise(plan.stages):
        ranks = source.mesh.ranks[0], target.mesh.ranks[0]
        for sizes in (there, back):
            total += costs.message_s(*ranks, sizes[target.layers[0]])
    return total
