"""The plan as people read it: plan.txt and `ppc plan`."""

from dataclasses import dataclass, replace

from ..ir.report import Memory, show_bytes, show_seconds
from .describe import name_layers
from .environment import environment
from .job import Job


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage."""

    stage: int
    ranks: tuple[int, ...]
    layers: tuple[str, ...]
    seconds: float
    """Of a microbatch's forward and backward."""


@dataclass(frozen=True, slots=True)
class PlanPage:
    """What `ppc plan` shows; seconds and bytes are plain numbers."""

    name: str
    model: str
    world_size: int
    schedule: str
    microbatches: int
    microbatch_size: int
    stages: tuple[StageRow, ...]
    transfers: tuple[str, ...]
    memory: tuple[Memory, ...]
    step_s: float
    bubble: float
    diagram: tuple[str, ...]
    runners_up: tuple[tuple[str, float, str], ...]
    messages: tuple[str, ...]

    def __str__(self) -> str:
        return environment().get_template("plan.txt.j2").render(plan_view(self))


def make_plan_page(job: Job) -> PlanPage:
    """The page of a compilation."""
    plan, report = job.plan, job.report
    stages = tuple(
        StageRow(
            stage.index,
            stage.mesh.ranks,
            tuple(job.graph.layers[i].path for i in stage.layers),
            stage.time_s,
        )
        for stage in plan.stages
    )
    pipeline = plan.pipelines()[0]  # replicas send the same
    return PlanPage(
        name=job.spec.name,
        model=job.graph.model,
        world_size=plan.world_size,
        schedule=job.spec.parallel.schedule,
        microbatches=plan.microbatches,
        microbatch_size=plan.microbatch_size,
        stages=stages,
        transfers=tuple(
            str(replace(t, value=job.boundary[t.value]))
            for unit in job.units
            for t in unit.sends
            if unit.rank in pipeline
        ),
        memory=report.memory,
        step_s=report.makespan_s,
        bubble=report.bubble,
        diagram=report.diagram,
        runners_up=report.runners_up,
        messages=job.graph.messages,
    )


def plan_view(page: PlanPage) -> dict[str, object]:
    """The values for plan.txt.j2."""
    total = sum(row.seconds for row in page.stages) or 1.0
    stages = [
        {
            "index": row.stage,
            "ranks": ", ".join(map(str, row.ranks)),
            "layers": name_layers(row.layers),
            "share": f"{100 * row.seconds / total:.0f}%",
            "time": show_seconds(row.seconds),
        }
        for row in page.stages
    ]
    return {
        "page": page,
        "stages": stages,
        "memory": [memory_row(memory) for memory in page.memory],
        "makespan": show_seconds(page.step_s),
        "bubble": f"{100 * page.bubble:.0f}%",
        "runners_up": [
            f"{name}: {show_seconds(time)} a step, {why}" for name, time, why in page.runners_up
        ],
    }


def memory_row(memory: Memory) -> dict[str, str]:
    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers")
    row = {kind: show_bytes(getattr(memory, kind)) for kind in kinds}
    return row | {
        "rank": str(memory.rank),
        "total": show_bytes(memory.total),
        "capacity": show_bytes(memory.capacity),
    }
