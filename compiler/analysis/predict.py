"""predict: programs on a clock with the plan's costs -> Report."""

from collections.abc import Mapping, Sequence

from ..ir.graph import Graph, TensorMeta
from ..ir.plan import Plan
from ..ir.program import Collective, Loop, Program
from ..ir.report import Report
from ..ir.schedule import Kind, Schedule
from ..ir.spec import Spec
from .cost import Costs
from .diagram import timing_diagram
from .memory import measure_memory, reruns
from .simulate import Clock, simulate

diagram_width = 79


def predict(
    graph: Graph, plan: Plan, schedule: Schedule, programs: tuple[Program, ...], costs: Costs,
    spec: Spec, runners_up: Sequence[tuple[str, float, str]],
) -> Report:  # fmt: skip
    """One step of a replica, simulated. Before: verified programs."""
    clock = read_clock(graph, plan, programs, costs, spec)
    replica, compute = first_replica(plan, programs), clock.compute_s
    result, at_once = simulate(replica, clock), simulate(replica, Clock(compute))
    busiest = max(range(len(plan.stages)), key=lambda s: plan.stages[s].time_s)
    return Report(
        slots=result.slots,
        memory=measure_memory(graph, plan, spec),
        makespan_s=result.makespan_s,
        bubble=result.bubble,
        messages=1 - at_once.makespan_s / result.makespan_s if result.makespan_s else 0.0,
        live=result.live,
        cost={
            "forward": plan.microbatches * compute[busiest, Kind.F],
            "backward": plan.microbatches * compute[busiest, Kind.B],
            "idle": result.makespan_s
            - plan.microbatches * (compute[busiest, Kind.F] + compute[busiest, Kind.B]),
        },
        diagram=timing_diagram(schedule, diagram_width),
        runners_up=tuple(runners_up),
    )


def step_s(
    graph: Graph, plan: Plan, programs: tuple[Program, ...], costs: Costs, spec: Spec
) -> float:
    """Seconds of one step, simulated."""
    clock = read_clock(graph, plan, programs, costs, spec)
    return simulate(first_replica(plan, programs), clock).makespan_s


def first_replica(plan: Plan, programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """The others run the same programs at the same time."""
    return tuple(programs[rank] for rank in dict.fromkeys(plan.pipelines()[0]))


def read_clock(
    graph: Graph, plan: Plan, programs: tuple[Program, ...], costs: Costs, spec: Spec
) -> Clock:
    """How long everything takes that programs of the plan do; in the replica where it takes
    longest, if links differ."""
    samples = plan.microbatch_size
    compute = {
        (stage.index, kind): sum(times[layer] for layer in stage.layers)
        for stage in plan.stages
        for kind, times in ((Kind.F, costs.forward_s), (Kind.B, costs.backward_s))
    }
    for stage in plan.stages:
        if reruns(spec, stage.index) and compute[stage.index, Kind.B]:
            compute[stage.index, Kind.B] += compute[stage.index, Kind.F]
    transfer: dict[str, float] = {}
    for edge in (edge for program in programs for edge in program.edges):
        size = sum(meta.bytes.at(samples) for _, meta in edge.values)
        seconds = costs.message_s(edge.source, edge.target, size)
        transfer[edge.name] = max(seconds, transfer.get(edge.name, 0.0))
    collective = collective_s(graph, plan, programs, costs, spec)
    return Clock(compute, transfer_s=transfer, collective_s=collective)


def collective_s(
    graph: Graph, plan: Plan, programs: tuple[Program, ...], costs: Costs, spec: Spec
) -> Mapping[str, float]:
    """Seconds for which each collective holds up its ranks, by what is combined: gradients, the
    norm's or the loss's one number.

    Buckets run beside the last backward: what it does not cover is left, at least one bucket.
    """
    number = TensorMeta((), "float64" if spec.train.precision == "fp64" else "float32")
    found = {
        action
        for program in programs
        for loop in program.actions
        if isinstance(loop, Loop)
        for action in loop.body
        if isinstance(action, Collective)
    }
    sizes = {f"gradient of {fqn}": p.meta.bytes.at(1) for fqn, p in graph.parameters.items()}
    sizes |= dict.fromkeys(("norm", "loss"), number.bytes.at(1))
    seconds: dict[str, float] = {}
    for collective in found:
        name, group = collective.value, collective.group
        if not collective.bucket_bytes:
            longest = costs.all_reduce_s(group, sizes[name])
            seconds[name] = max(longest, seconds.get(name, 0.0))
            continue
        stage = next(stage for stage in plan.stages if stage.mesh.ranks == group)
        size = own_gradient_bytes(graph, plan, stage.index)
        covered = sum(costs.backward_s[layer] for layer in stage.layers)
        seconds[name] = max(
            costs.all_reduce_s(group, size) - covered,
            costs.all_reduce_s(group, min(size, collective.bucket_bytes)),
        )
    return seconds


def own_gradient_bytes(graph: Graph, plan: Plan, stage: int) -> int:
    """Of the trainable parameters that no other stage holds."""
    return sum(
        graph.parameters[fqn].meta.bytes.at(1)
        for fqn, placed in plan.placements.items()
        if [index for index, _ in placed] == [stage] and graph.parameters[fqn].meta.requires_grad
    )
