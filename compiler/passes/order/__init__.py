"""Order: when each rank computes what. A file for each family of schedules."""

from ...ir.plan import Plan
from ...ir.schedule import Row, Schedule
from .gpipe import gpipe
from .one_f_one_b import one_f_one_b

__all__ = ["order"]

families = {"gpipe": gpipe, "1f1b": one_f_one_b}


def order(plan: Plan, kind: str) -> Schedule:
    """The compute order of the schedule named `kind`, `gpipe` or `1f1b`.

    After: each rank runs one F and one B of each microbatch of its replica on its stage, for any
    number of stages and microbatches; the schedule flushes, so that one step is its period.
    """
    rows = []
    for stage in plan.stages:
        period = families[kind](stage.index, len(plan.stages), plan.microbatches)
        rows += [Row(rank, warmup=(), period=period, drain=()) for rank in stage.mesh.ranks]
    return Schedule(kind, plan.microbatches, tuple(sorted(rows, key=lambda row: row.rank)))
