"""The plan as people read it: plan.txt and `ppc plan`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from ..ir.report import Memory, show_bytes, show_seconds
from .describe import name_layers
from .environment import environment
from .job import Job

few = 16
"""So many rows are shown as they are."""


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
    """Idle share of the ranks' time."""
    waits: float
    """What of it is for messages."""
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
        waits=report.messages,
        diagram=report.diagram,
        runners_up=report.runners_up,
        messages=job.graph.messages,
    )


def plan_view(page: PlanPage) -> dict[str, object]:
    """The values for plan.txt.j2; of many ranks the first replica's stand for all, of many stages
    some. None stands for rows that are left out."""
    total = sum(row.seconds for row in page.stages) or 1.0
    many = page.world_size > few
    replicas = [row.ranks if many else (rank,) for row in page.stages for rank in row.ranks]
    ranks = {group[0]: spell_ranks(group) for group in replicas}
    memory = [row for row in page.memory if row.rank in ranks]
    fullest = max(range(len(memory)), key=lambda row: memory[row].total)
    stages = [
        {
            "index": row.stage,
            "ranks": spell_ranks(row.ranks),
            "layers": name_layers(row.layers),
            "share": f"{100 * row.seconds / total:.0f}%",
            "time": show_seconds(row.seconds),
        }
        for row in page.stages
    ]
    return {
        "page": page,
        "width": max(5, *(len(spell_ranks(row.ranks)) for row in page.stages)),
        "stages": shorten(stages),
        "diagram": shorten([page.diagram[rank] for rank in ranks]),
        "transfers": shorten(page.transfers),
        "memory": [row and memory_row(row, ranks[row.rank]) for row in shorten(memory, fullest)],
        "makespan": show_seconds(page.step_s),
        "idle": percent(page.bubble) if page.bubble > 0 else "",
        "order": percent(page.bubble - page.waits),
        "waits": percent(page.waits),
        "runners_up": [
            f"{name}: {show_seconds(time)} a step, {why}" for name, time, why in page.runners_up
        ],
    }


def percent(share: float) -> str:
    """`14%`; what is little is not none, and what is most not all."""
    if 0 < share < 0.005:
        return "under 1%"
    return "over 99%" if 0.995 < share < 1 else f"{abs(100 * share):.0f}%"


Row = TypeVar("Row")


def shorten(rows: Sequence[Row], also: int = 0) -> list[Row | None]:
    """The rows; of many the first and last few and one more, None for those between."""
    size, shown = len(rows), few // 4
    if size <= few:
        return list(rows)
    places = sorted({*range(shown), also, *range(size - shown, size)})
    found: list[Row | None] = []
    for before, place in pairwise([-1, *places]):
        found += [None] * (place > before + 1)
        found.append(rows[place])
    return found


def spell_ranks(ranks: Sequence[int]) -> str:
    """`0, 1`, of many `0-7`."""
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 4 else ", ".join(map(str, ranks))


def memory_row(memory: Memory, ranks: str) -> dict[str, str]:
    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers")
    row = {kind: show_bytes(getattr(memory, kind)) for kind in kinds}
    return row | {
        "rank": ranks,
        "total": show_bytes(memory.total),
        "capacity": show_bytes(memory.capacity),
    }
