"""What programs promise: they do the plan's work, and no rank waits for ever, whoever is slow."""

from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import InternalError
from ...ir.plan import Plan
from ...ir.program import (
    Checkpoint,
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
from .messages import Path, Walk, fault, match_edges, needed_paths

Step = tuple[Instruction, ...]
"""One training step."""
work = (Post, Wait, Compute, Send, Flush)


def verify_programs(programs: tuple[Program, ...], plan: Plan, units: tuple[Unit, ...]) -> None:
    """Raise InternalError, naming rank and instruction, unless the programs keep this:

    - each rank has one program: the training loop, whose every step is alike, then Save on the
      first replica of each stage;
    - a step runs each microbatch's F and B once, after the messages that it needs;
    - each message is sent once and taken once, its receive posted before, both ends with the same
      names, shapes and dtypes, and in the same order; sends are done at the end of the step;
    - then each gradient is summed once over all ranks that hold it, replicas and stages, the norm
      over its pipeline after them if gradients are clipped, one update follows, and where the loss
      is, its sum over the replicas;
    - all ranks make the same groups in the same order, and run collectives in the same order;
    - replicas run the same instructions: they differ in the ranks that they exchange with, and in
      what comes after the sums of a step;
    - no rank waits for ever under NCCL's order, nor if every send waits for its receive;
    - no more microbatches are live than declared.
    """
    check_ranks(programs, plan)
    check_groups(programs)
    check_checkpoints(programs)
    needs, twins = gather(plan, units), plan.twins()
    order: dict[tuple[str, bool], list[int]] = {}
    for program in programs:
        twin, step = programs[twins[program.rank]], training_step(program)
        edges = match_edges(program, needs.paths[program.rank])
        if program is twin or moves(step) != moves(training_step(twin)):
            step = tuple(unroll(step))
            walk = Walk(program, edges, plan.microbatches)
            walk.run(step)
            for name, path in walk.paths.items():
                incoming = path.target == program.rank
                order[name, incoming] = list(walk.waited[name] if incoming else walk.sent[name])
        check_end(program, step, plan, needs)
        check_rerun(program, plan, needs)
    for name, sent in ((name, sent) for (name, incoming), sent in order.items() if not incoming):
        if sent != order.get((name, True)):
            raise InternalError(f"{name}: sent in order {sent}, taken in {order.get((name, True))}")
    check_replicas(programs, twins)
    check_norms(programs, plan, units)
    check_progress(tuple(programs[rank] for rank in dict.fromkeys(twins.values())))


@dataclass(frozen=True, slots=True)
class Needs:
    """What the units ask of each rank's program."""

    held: Mapping[int, tuple[Unit, ...]]
    paths: Mapping[int, tuple[Path, ...]]
    sums: Mapping[int, list[Instruction]]
    pipelines: Mapping[int, tuple[int, ...]]


def gather(plan: Plan, units: tuple[Unit, ...]) -> Needs:
    """By rank: its units, the edges that start or end there, its sums, its pipeline."""
    held: dict[int, tuple[Unit, ...]] = {}
    for unit in units:
        held[unit.rank] = (*held.get(unit.rank, ()), unit)
    paths: dict[int, tuple[Path, ...]] = dict.fromkeys(held, ())
    for ranks in plan.pipelines():
        for path in needed_paths([unit for rank in dict.fromkeys(ranks) for unit in held[rank]]):
            for rank in (path.source, path.target):
                paths[rank] = (*paths[rank], path)
    pipelines = {rank: ranks for ranks in plan.pipelines() for rank in ranks}
    return Needs(held, paths, needed_sums(plan, units), pipelines)


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
    """The step of a program that is a training loop, then Save on replica 0; raises for others."""
    match program.actions, program.coords.get("data", 0):
        case ((Loop("STEPS", body), Save()), 0):
            step = body
        case ((Loop("STEPS", body),), replica) if replica:
            step = body
        case _:
            raise fault(program.rank, None, "it is not a training loop, then Save on replica 0")
    loops = [action for action in body if isinstance(action, Loop)]
    for loop in loops:
        if loop.count == "STEPS" or loop.count < 1 or not loop.body:
            raise fault(program.rank, loop, "a loop in a step runs its body a number of times")
    return step


def check_groups(programs: tuple[Program, ...]) -> None:
    """Equal groups everywhere, equal edges at both ends, and edges in the groups' order."""
    first = programs[0]
    places = {group: place for place, group in enumerate(first.groups)}
    declared: dict[object, object] = {}
    for program in programs:
        groups = program.groups
        if groups != first.groups or len(places) < len(groups):
            raise fault(program.rank, None, f"its groups are {groups}, rank 0's {first.groups}")
        for edge in program.edges:
            if (edge.source, edge.target) not in places:
                raise fault(program.rank, None, f"{edge.name} has no group")
            ends = (edge.name, edge.source, edge.target)
            if declared.setdefault(ends, edge) != edge:
                raise fault(program.rank, None, f"{edge.name} differs from its other end")
        order = [places[edge.source, edge.target] for edge in program.edges]
        if order != sorted(order):
            raise fault(program.rank, None, "its edges are not in the order of the groups")


def check_norms(programs: tuple[Program, ...], plan: Plan, units: tuple[Unit, ...]) -> None:
    """Replicas of a stage whose norms sum have a group for that, and run the same step.

    Then no rank waits for ever in a norm: all instructions of a pipeline have an order in which it
    can run them, `check_progress` finds it, and it is one order for all replicas, norms included.
    A group of its own keeps a norm behind no message of another kind.
    """
    summing = {unit.stage for unit in units if unit.collectives}
    groups = tuple(stage.mesh.ranks for stage in plan.stages if stage.index in summing)
    for program in programs:
        if program.norm_groups != groups:
            raise fault(program.rank, None, f"groups of norms are {program.norm_groups}")


def check_checkpoints(programs: tuple[Program, ...]) -> None:
    """All ranks write checkpoints, or none does."""
    writing = {any(isinstance(a, Checkpoint) for a in training_step(p)) for p in programs}
    if len(writing) > 1:
        raise fault(programs[0].rank, None, "some ranks write checkpoints, and some do not")


def moves(step: Step) -> Step:
    """The part of a step that computes and exchanges microbatches, which replicas share."""
    return tuple(action for action in step if isinstance(action, (*work, Loop)))


def check_replicas(programs: tuple[Program, ...], twins: Mapping[int, int]) -> None:
    """Replicas do the same with their microbatches, under equal names."""
    for program in programs:
        twin = programs[twins[program.rank]]
        if moves(training_step(program)) != moves(training_step(twin)):
            raise fault(program.rank, None, f"it runs other instructions than rank {twin.rank}")


def check_end(program: Program, step: Step, plan: Plan, needs: Needs) -> None:
    """The step ends with the sums of tied gradients, the norm, the update and the log. Loops, in
    one that is not unrolled, are those of a rank whose step was looked at whole."""
    moving = (*work, Loop)
    start = 1 + max((i for i, action in enumerate(step) if isinstance(action, moving)), default=-1)
    sums, mine = needs.sums[program.rank], needs.held[program.rank]
    updates = [action for action in step if isinstance(action, Update)]
    if len(updates) != 1:
        raise fault(program.rank, None, f"a step has {len(updates)} updates")
    (update,) = updates
    rest: list[Instruction] = []
    pipeline = needs.pipelines[program.rank]
    if update.clip and len(pipeline) > 1:
        rest.append(Collective("all_reduce", "norm", pipeline))
    rest.append(update)
    if any(name == "loss" for unit in mine for name, _ in unit.outputs):
        replicas = plan.stages[mine[-1].stage].mesh.ranks
        rest += [Collective("all_reduce", "loss", replicas)] if len(replicas) > 1 else []
        rest += [Log()] if program.rank == replicas[0] else []
    rest += [action for action in step if action == Checkpoint(tuple(range(plan.world_size)))][:1]
    wanted, found = [*sums, *rest], step[start:]
    for action in step[:start]:
        if not isinstance(action, moving):
            raise fault(program.rank, action, "it comes before the last transfer of the step")
    for action in found:
        if action not in wanted:
            raise fault(program.rank, action, "nothing at the end of the step asks for it")
        if found.count(action) > 1:
            raise fault(program.rank, action, "it runs twice")
        if isinstance(action, Collective) and action.group not in program.groups:
            raise fault(program.rank, action, "there is no such group")
    for action in wanted:
        if action not in found:
            raise fault(program.rank, action, "it is missing at the end of the step")
    if list(found[len(sums) :]) != rest:
        raise fault(program.rank, found[-1], "sums of gradients, norm, update, log: in this order")


def check_rerun(program: Program, plan: Plan, needs: Needs) -> None:
    """A stage that the plan lets run again does, where it goes back and does not do so at once."""
    mine = needs.held[program.rank]
    wanted = plan.rerun and program.live > 1 and any(unit.has_backward for unit in mine)
    if program.rerun != wanted:
        raise fault(program.rank, None, f"rerun is {program.rerun}, not {wanted}")


def needed_sums(plan: Plan, units: tuple[Unit, ...]) -> dict[int, list[Instruction]]:
    """By rank the sums of gradients that it and others hold: of one stage's replicas all together,
    of a parameter on several stages by itself."""
    ranks_of = {stage.index: stage.mesh.ranks for stage in plan.stages}
    shared: dict[str, set[int]] = {}
    alone: set[int] = set()
    for unit in units:
        for held in unit.state:
            if held.trainable and len(stages := {unit.stage, *held.stages}) > 1:
                ranks = (rank for stage in stages for rank in ranks_of[stage])
                shared.setdefault(held.canonical, set()).update(ranks)
            elif held.trainable and held.reached:
                alone.add(unit.stage)
    sums = [
        Collective("all_reduce", f"gradients of stage {stage}", ranks_of[stage], plan.bucket_bytes)
        for stage in sorted(alone)
        if len(ranks_of[stage]) > 1
    ]
    sums += [
        Collective("all_reduce", f"gradient of {fqn}", tuple(sorted(ranks)))
        for fqn, ranks in shared.items()
    ]
    found: dict[int, list[Instruction]] = {unit.rank: [] for unit in units}
    for collective in sums:
        for rank in collective.group:
            found[rank].append(collective)
    return found


def check_progress(programs: tuple[Program, ...]) -> None:
    """Run one step of one replica with every send waiting, under NCCL's order.

    That is the hardest case: a larger window, or a transport that keeps edges apart, only takes
    constraints away. One step is enough, since it leaves no message and no receive behind. One
    replica is enough, since the others can do whatever it does at the same time.
    """
    result = simulate(programs, Clock({}), window=0, queue_of=by_group)
    if result.stuck:
        raise InternalError(f"deadlock: {'; '.join(map(str, result.stuck))}")
    for program, live in zip(programs, result.live, strict=True):
        if program.live != live:
            text = f"{live} microbatches are live at once, {program.live} are declared"
            raise fault(program.rank, None, text)
