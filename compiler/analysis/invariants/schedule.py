"""What a schedule promises: every microbatch once forward and once backward on each stage."""

from typing import NoReturn

from ...errors import InternalError
from ...ir.plan import Plan
from ...ir.schedule import Action, Kind, Row, Schedule
from ..diagram import grid, needs, unit_slots

Runs = dict[tuple[int, int, int], set[Kind]]
"""By rank, stage and microbatch: the kinds that ran."""

complete = ({Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W})
after = {Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I}
"""What must have run before on the same rank."""


def verify_schedule(schedule: Schedule, plan: Plan) -> None:
    """Raise InternalError, with the rows and an arrow at the slot, unless the schedule keeps this:

    - there is a row for each rank, and a rank runs only actions of its own stages;
    - each replica of a stage runs the F of each of its microbatches once, then its B once (or I,
      then W), on a weight version that the plan keeps, in the order of replica 0;
    - no rank waits for ever.
    """
    if schedule.microbatches != plan.microbatches:
        raise InternalError(
            f"schedule {schedule.name} has {schedule.microbatches} microbatches, "
            f"the plan {plan.microbatches}"
        )
    ranks = [row.rank for row in schedule.rows]
    if sorted(ranks) != sorted({rank for stage in plan.stages for rank in stage.mesh.ranks}):
        raise InternalError(f"schedule {schedule.name} has rows for ranks {ranks}, not the plan's")
    runs: Runs = {}
    first, rows = plan.pipelines()[0], {row.rank: row for row in schedule.rows}
    twins = {rank: rows[twin] for rank, twin in plan.twins().items()}
    others = [row for row in schedule.rows if row.actions != twins[row.rank].actions]
    checked = [row for row in schedule.rows if row.rank in first or row in others]
    for row in checked:
        for slot, action in enumerate(row.actions):
            kinds = runs.setdefault((row.rank, action.stage, action.microbatch), set())
            problem = check_address(action, row.rank, plan) or check_order(action, kinds)
            if problem:
                fail(schedule, row.rank, slot, problem)
            kinds.add(action.kind)
    for row in checked:
        check_complete(schedule, plan, row, runs)
    for row in others:
        fail(schedule, row.rank, 0, f"this is not the order of rank {twins[row.rank].rank}")
    check_progress(schedule)


def check_address(action: Action, rank: int, plan: Plan) -> str:
    """What is wrong with an action by itself, on this rank."""
    if action.kind not in {Kind.F, Kind.B, Kind.I, Kind.W}:
        return f"{action} is no compute"
    if not 0 <= action.stage < len(plan.stages):
        return f"{action} is of no stage; there are {len(plan.stages)}"
    if rank not in plan.stages[action.stage].mesh.ranks:
        return f"{action} is of a stage that rank {rank} does not hold"
    if not 0 <= action.microbatch < plan.microbatches:
        return f"{action} is of no microbatch; there are {plan.microbatches}"
    if not 0 <= action.version < plan.versions:
        return f"{action} uses a weight version that is gone; {plan.versions} are kept"
    return ""


def check_order(action: Action, kinds: set[Kind]) -> str:
    """What is wrong with an action after the `kinds` that its stage ran of its microbatch."""
    if action.kind in kinds:
        return f"{action} runs twice"
    needed = after.get(action.kind)
    if needed and needed not in kinds:
        return f"{action} comes before its {needed}"
    if action.kind in (Kind.B, Kind.I) and kinds & {Kind.B, Kind.I}:
        return f"{action} is a second backward"
    return ""


def check_complete(schedule: Schedule, plan: Plan, row: Row, runs: Runs) -> None:
    """Nothing is missing: a rank runs all of its microbatches on each of its stages."""
    for stage in (stage.index for stage in plan.stages if row.rank in stage.mesh.ranks):
        for microbatch in range(plan.microbatches):
            kinds = runs.get((row.rank, stage, microbatch), set())
            missing = "F" if Kind.F not in kinds else "W" if Kind.I in kinds else "B"
            if kinds not in complete:
                problem = f"{stage}{missing}{microbatch} is missing"
                fail(schedule, row.rank, len(row.actions), problem)


def check_progress(schedule: Schedule) -> None:
    """Every action gets to run when each rank runs its row in order."""
    last = max((action.stage for row in schedule.rows for action in row.actions), default=0)
    for row, slots in zip(schedule.rows, unit_slots(schedule), strict=True):
        if len(slots) < len(row.actions):
            action = row.actions[len(slots)]
            wanted = [f"{stage}{kind}{m}" for stage, kind, m in needs(action, last)]
            fail(schedule, row.rank, len(slots), f"{action} waits for ever for {wanted[-1]}")


def fail(schedule: Schedule, rank: int, slot: int, problem: str) -> NoReturn:
    """Raise the error that points at a slot."""
    place = f"schedule {schedule.name}, rank {rank}, slot {slot}"
    raise InternalError(f"{place}: {problem}\n{grid(schedule, rank, slot)}")
