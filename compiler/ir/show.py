"""Every form, printed: what `ppc show` gives and fixtures hold."""

from dataclasses import replace

from .graph import Graph, Layer
from .plan import Plan
from .program import Program
from .schedule import Schedule
from .unit import Unit

few_ranks = 16
"""So many are read at a glance, and all shown."""


def show_form(form: object, plan: Plan | None = None) -> str:
    """The printed form of a graph, plan or schedule, or of units or programs. With a plan of many
    ranks, those of its first replica."""
    if plan and plan.world_size > few_ranks and plan.replicas > 1:
        first, more = plan.pipelines()[0], f"{plan.replicas - 1} more replicas do the same\n"
        if isinstance(form, Schedule):
            rows = tuple(row for row in form.rows if row.rank in first)
            return f"{replace(form, rows=rows)}{more}"
        if isinstance(form, tuple):
            return show_form(tuple(item for item in form if item.rank in first)) + more
    if isinstance(form, Graph):
        return str(form) + "".join(map(show_layer, form.layers))
    if isinstance(form, Plan):
        return show_plan(form)
    if isinstance(form, Schedule):
        return str(form)
    if isinstance(form, tuple):
        return "\n".join(show_unit(item) if isinstance(item, Unit) else str(item) for item in form)
    if isinstance(form, Program):
        return str(form)
    raise TypeError(f"{type(form).__name__} has no printed form")


def show_layer(layer: Layer) -> str:
    """One line: path, kind, parameters and FLOPs of the forward of one sample."""
    name = layer.path or "(root)"
    size = f"{layer.param_bytes} bytes, {layer.flops.at(1)} flops a sample"
    return f"layer {name}: {layer.kind}, {size}\n"


def show_plan(plan: Plan) -> str:
    """Stages, then where each parameter lies."""
    lines = [
        f"stage {s.index} ({s.mesh}): layers {s.layers[0]}-{s.layers[-1]}, {1e3 * s.time_s:.3f} ms"
        for s in plan.stages
    ]
    sizes = "all alike" if plan.even else "differing"
    lines.append(f"{plan.microbatches} microbatches of {plan.global_batch} samples, {sizes}")
    for fqn, entries in plan.placements.items():
        lines.append(f"{fqn}: stage {', '.join(str(stage) for stage, _ in entries)}")
    return "\n".join(lines) + "\n"


def show_unit(unit: Unit) -> str:
    """What a stage receives, reads, holds, runs and gives."""
    lines = [f"stage {unit.stage} on rank {unit.rank}"]
    lines += [f"  receive {t}" for t in unit.receives]
    lines += [f"  read {i.name} <- {i.field}" for i in unit.inputs]
    lines += [f"  hold {', '.join((held.fqn, *held.aliases))}" for held in unit.state]
    lines += [f"  {op.name}{' (sunk)' if op.name in unit.sunk else ''}" for op in unit.ops]
    lines += [f"  {c.kind} along {c.axis}: {c.value}, in {c.op}" for c in unit.collectives]
    lines += [f"  send {t}" for t in unit.sends]
    lines += [f"  output {name}: {value}" for name, value in unit.outputs]
    return "\n".join(lines) + "\n"
