"""What programs promise: they do the plan's work, and no rank waits for ever, whoever is slow."""

from ...errors import InternalError
from ...ir.plan import Plan
from ...ir.program import (
    Collective,
    Compute,
    Flush,
    Instruction,
    Log,
    Loop,
    Post,
    Program,
    Save,
    Send,
    Update,
    Wait,
    unroll,
)
from ...ir.unit import Unit
from ..simulate import Clock, by_group, simulate
from .messages import Walk, fault, match_edges, needed_paths

Step = tuple[Instruction, ...]
"""One training step, loops unrolled."""


def verify_programs(programs: tuple[Program, ...], plan: Plan, units: tuple[Unit, ...]) -> None:
    """Raise InternalError, naming rank and instruction, unless the programs keep this:

    - each rank has one program: the training loop, whose every step is alike, then Save;
    - a step runs each microbatch's F and B once, after the messages that it needs;
    - each message is sent once and taken once, its receive posted before, both ends with the same
      names, shapes and dtypes, and in the same order; sends are done at the end of the step;
    - then each tied gradient is summed once over the ranks that hold it, the norm after them if
      gradients are clipped, and one update follows;
    - all ranks make the same groups in the same order, and run collectives in the same order;
    - no rank waits for ever under NCCL's order, nor if every send waits for its receive;
    - no more microbatches are live than declared.
    """
    check_ranks(programs, plan)
    check_groups(programs)
    paths = needed_paths(units)
    order: dict[tuple[str, bool], list[int]] = {}
    for program in programs:
        step = training_step(program)
        walk = Walk(program, match_edges(program, paths), plan.microbatches)
        walk.run(step)
        for name, path in walk.paths.items():
            incoming = path.target == program.rank
            order[name, incoming] = list(walk.waited[name] if incoming else walk.sent[name])
        check_end(program, step, plan, units)
    for name, sent in ((name, sent) for (name, incoming), sent in order.items() if not incoming):
        if sent != order.get((name, True)):
            raise InternalError(f"{name}: sent in order {sent}, taken in {order.get((name, True))}")
    check_progress(programs)


def check_ranks(programs: tuple[Program, ...], plan: Plan) -> None:
    """A program for each rank of the plan, in order, with its stages."""
    ranks = [program.rank for program in programs]
    if ranks != list(range(plan.world_size)):
        raise InternalError(
            f"there are programs for ranks {ranks}, not for 0..{plan.world_size - 1}"
        )
    for program in programs:
        stages = tuple(stage.index for stage in plan.stages if program.rank in stage.mesh.ranks)
        if program.stages != stages:
            raise fault(program.rank, None, f"it has stages {program.stages}, not {stages}")


def training_step(program: Program) -> Step:
    """The step of a program that is a training loop and Save; raises for any other."""
    match program.actions:
        case (Loop("STEPS", body), Save()):
            step = tuple(unroll(body))
        case _:
            raise fault(program.rank, None, "it is not a training loop, then Save")
    loops = [action for action in body if isinstance(action, Loop)]
    for loop in loops:
        if loop.count == "STEPS" or loop.count < 1 or not loop.body:
            raise fault(program.rank, loop, "a loop in a step runs its body a number of times")
    return step


def check_groups(programs: tuple[Program, ...]) -> None:
    """Equal groups everywhere, equal edges at both ends, and edges in the groups' order."""
    first = programs[0]
    declared: dict[str, object] = {}
    for program in programs:
        groups = program.groups
        if groups != first.groups or len(set(groups)) < len(groups):
            raise fault(program.rank, None, f"its groups are {groups}, rank 0's {first.groups}")
        for edge in program.edges:
            if (edge.source, edge.target) not in groups:
                raise fault(program.rank, None, f"{edge.name} has no group")
            if declared.setdefault(edge.name, edge) != edge:
                raise fault(program.rank, None, f"{edge.name} differs from its other end")
        places = [groups.index((edge.source, edge.target)) for edge in program.edges]
        if places != sorted(places):
            raise fault(program.rank, None, "its edges are not in the order of the groups")


def check_end(program: Program, step: Step, plan: Plan, units: tuple[Unit, ...]) -> None:
    """The step ends with the sums of tied gradients, the norm, the update and the log."""
    work = (Post, Wait, Compute, Send, Flush)
    start = 1 + max((i for i, action in enumerate(step) if isinstance(action, work)), default=-1)
    sums = tied_sums(program.rank, units)
    updates = [action for action in step if isinstance(action, Update)]
    if len(updates) != 1:
        raise fault(program.rank, None, f"a step has {len(updates)} updates")
    (update,) = updates
    mine = [unit for unit in units if unit.rank == program.rank]
    rest: list[Instruction] = []
    if update.clip and plan.world_size > 1:
        rest.append(Collective("all_reduce", "norm", tuple(range(plan.world_size))))
    rest.append(update)
    if any(name == "loss" for unit in mine for name, _ in unit.outputs):
        rest.append(Log())
    wanted, found = [*sums, *rest], step[start:]
    for action in step[:start]:
        if not isinstance(action, work):
            raise fault(program.rank, action, "it comes before the last transfer of the step")
    for action in found:
        if action not in wanted:
            raise fault(program.rank, action, "nothing at the end of the step asks for it")
        if found.count(action) > 1:
            raise fault(program.rank, action, "it runs twice")
        if isinstance(action, Collective):
            everyone = len(action.group) == plan.world_size
            if not everyone and action.group not in program.groups:
                raise fault(program.rank, action, "there is no such group")
    for action in wanted:
        if action not in found:
            raise fault(program.rank, action, "it is missing at the end of the step")
    if list(found[len(sums) :]) != rest:
        raise fault(program.rank, found[-1], "sums of gradients, norm, update, log: in this order")


def tied_sums(rank: int, units: tuple[Unit, ...]) -> list[Instruction]:
    """The sum of each trainable parameter that this rank and others hold."""
    rank_of = {unit.stage: unit.rank for unit in units}
    holders: dict[str, set[int]] = {}
    for unit in units:
        for held in unit.state:
            if held.trainable:
                ranks = {rank_of[stage] for stage in (unit.stage, *held.stages)}
                holders.setdefault(held.canonical, set()).update(ranks)
    return [
        Collective("all_reduce", f"gradient of {fqn}", tuple(sorted(ranks)))
        for fqn, ranks in holders.items()
        if len(ranks) > 1 and rank in ranks
    ]


def check_progress(programs: tuple[Program, ...]) -> None:
    """Run one step with every send waiting, under NCCL's order.

    That is the hardest case: a larger window, or a transport that keeps edges apart, only takes
    constraints away. One step is enough, since it leaves no message and no receive behind.
    """
    result = simulate(programs, Clock({}), window=0, queue_of=by_group)
    if result.stuck:
        raise InternalError(f"deadlock: {'; '.join(map(str, result.stuck))}")
    for program, live in zip(programs, result.live, strict=True):
        if program.live != live:
            text = f"{live} microbatches are live at once, {program.live} are declared"
            raise fault(program.rank, None, text)
