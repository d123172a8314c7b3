"""Communicate: put transfers and collectives between a rank's computes.

The pattern holds for every schedule. At the start of the step the first receives of each edge are
posted; each Wait is preceded by the Post of a later message, so that one is always under way while
the rank computes; a Send follows the compute that made the message, and nobody waits for it before
the end of the step unless the edge's window is full:

    Post gradients 1->0
    0F(0)
    Send activations 0->1 0
    Post gradients 1->0
    Wait gradients 1->0 0
    0B(0)
    Flush activations 0->1
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..analysis.transfer import receives_ahead
from ..ir.plan import Plan, Stage
from ..ir.program import (
    Checkpoint,
    Collective,
    Compute,
    Edge,
    Flush,
    Instruction,
    Log,
    Loop,
    Microbatch,
    Post,
    Program,
    Save,
    Send,
    Update,
    Wait,
)
from ..ir.schedule import Action, Kind, Row, Schedule
from ..ir.unit import Unit


@dataclass(frozen=True, slots=True)
class Route:
    """What goes between two stages: activations there, gradients back if any value has one."""

    source: int
    """The earlier stage."""
    target: int
    activations: Edge
    gradients: Edge | None

    @property
    def edges(self) -> tuple[Edge, ...]:
        return (self.activations, self.gradients) if self.gradients else (self.activations,)


@dataclass(frozen=True, slots=True)
class Job:
    """What the programs of all ranks are made from."""

    plan: Plan
    held: Mapping[int, tuple[Unit, ...]]
    """By rank."""
    routes: Mapping[int, tuple[Route, ...]]
    """By rank, those that start or end there."""
    reductions: tuple[Collective, ...]
    groups: tuple[tuple[int, ...], ...]
    norm_groups: tuple[tuple[int, ...], ...]
    clip: bool
    checkpoint: tuple[int, ...]
    """The ranks that write checkpoints together: all, or none."""


def communicate(
    plan: Plan,
    units: tuple[Unit, ...],
    schedule: Schedule,
    *,
    clip: bool,
    checkpoint: bool = False,
) -> tuple[Program, ...]:
    """The whole job of each rank, in the order of ranks; `clip` if gradients are clipped,
    `checkpoint` if checkpoints are written.

    Before: a verified schedule that flushes, and a unit for each stage. After: each message has one
    Send, one Wait and one Post; edges and groups come in one order on all ranks; each gradient of a
    parameter that several stages hold is summed once, before the update. Replicas share their
    instructions.
    """
    everyone = tuple(range(plan.world_size)) if checkpoint else ()
    live = {row.rank: row.live for row in schedule.rows}
    job = gather(plan, units, live, clip=clip, checkpoint=everyone)
    twins = plan.twins()
    moves = {
        row.rank: tuple(run_microbatches(row, job.routes[row.rank]))
        for row in schedule.rows
        if twins[row.rank] == row.rank
    }
    return tuple(make_program(row, job, moves[twins[row.rank]]) for row in schedule.rows)


def gather(
    plan: Plan,
    units: tuple[Unit, ...],
    live: Mapping[int, int],
    *,
    clip: bool,
    checkpoint: tuple[int, ...],
) -> Job:
    """Put together what all ranks have in common."""
    held: dict[int, tuple[Unit, ...]] = {}
    for unit in units:
        held[unit.rank] = (*held.get(unit.rank, ()), unit)
    routes: dict[int, tuple[Route, ...]] = dict.fromkeys(held, ())
    groups: list[tuple[int, ...]] = []
    for ranks in plan.pipelines():
        mine = [unit for rank in dict.fromkeys(ranks) for unit in held[rank]]
        for route in connect(mine, live, plan.microbatches):
            groups += [(edge.source, edge.target) for edge in route.edges]
            for rank in (route.activations.source, route.activations.target):
                routes[rank] = (*routes[rank], route)
    reductions = sums(plan, units, clip=clip)
    groups += [collective.group for collective in reductions]
    groups += [checkpoint] if len(checkpoint) > 1 else []
    counting = {unit.stage for unit in units if unit.collectives}
    return Job(
        plan=plan,
        held=held,
        routes=routes,
        reductions=reductions,
        groups=tuple(dict.fromkeys(groups)),
        norm_groups=tuple(s.mesh.ranks for s in plan.stages if s.index in counting),
        clip=clip,
        checkpoint=checkpoint,
    )


def make_program(row: Row, job: Job, moves: tuple[Instruction, ...]) -> Program:
    """The job of one rank, given what it does with its microbatches."""
    plan, mine = job.plan, job.held[row.rank]
    stage = plan.stages[mine[0].stage]
    edges = (edge for route in job.routes[row.rank] for edge in route.edges)
    steps = Loop("STEPS", (*moves, *finish(row, stage, job)))
    return Program(
        rank=row.rank,
        coords={"pipeline": stage.index, **stage.mesh.coords(row.rank)},
        stages=tuple(unit.stage for unit in mine),
        edges=tuple(edges),
        groups=job.groups,
        norm_groups=job.norm_groups,
        live=row.live,
        rerun=plan.rerun and row.live > 1 and mine[0].has_backward,
        actions=(steps, Save()) if row.rank == stage.mesh.ranks[0] else (steps,),
    )


def finish(row: Row, stage: Stage, job: Job) -> tuple[Instruction, ...]:
    """The end of a step: sums, the update, the log where replica 0 has the loss."""
    logs = any(name == "loss" for unit in job.held[row.rank] for name, _ in unit.outputs)
    replica = stage.mesh.ranks.index(row.rank)
    taken = [c for c in job.reductions if row.rank in c.group]
    return (
        *(c for c in taken if c.value != "loss"),
        Update(job.clip),
        *(c for c in taken if c.value == "loss"),
        *([Log()] if logs and not replica else []),
        *([Checkpoint(job.checkpoint)] if job.checkpoint else []),
    )


def connect(units: Sequence[Unit], live: Mapping[int, int], microbatches: int) -> tuple[Route, ...]:
    """A route for each pair of a replica's units with transfers between ranks, by both stages.

    `live` is the peak of microbatches in flight by rank. It bounds what a pair of stages can have
    under way: the microbatch of a message that is not taken yet is live on the earlier stage. So
    no send waits for a window of that size where gradients come back.
    """
    rank_of = {unit.stage: unit.rank for unit in units}
    pairs = sorted({(t.source, t.target) for unit in units for t in unit.sends})
    farthest = max((target - source for source, target in pairs), default=1)
    ahead = min(receives_ahead(farthest), microbatches)  # one number for all: more does no harm
    routes = []
    for source, target in pairs:
        start, end = rank_of[source], rank_of[target]
        if start == end:
            continue
        transfers = [t for u in units for t in u.sends if (t.source, t.target) == (source, target)]
        values = tuple((t.value, t.meta) for t in transfers)
        back = tuple((t.value, t.meta) for t in transfers if t.gradient)
        there = Edge(
            name=f"activations {source}->{target}",
            kind="activations",
            source=start,
            target=end,
            stages=(source, target),
            values=values,
            window=live[start],
            ahead=ahead,
        )
        again = replace(
            there,
            name=f"gradients {target}->{source}",
            kind="gradients",
            source=end,
            target=start,
            stages=(target, source),
            values=back,
        )
        routes.append(Route(source, target, there, again if back else None))
    return tuple(routes)


def sums(plan: Plan, units: Sequence[Unit], *, clip: bool) -> tuple[Collective, ...]:
    """All collectives of a step, in the order in which ranks run them."""
    gradients = (*summed_gradients(plan, units), *tied_gradients(units))
    # Every rank takes part, also one without gradients: the update needs the norm of them all.
    pipelines = plan.pipelines() if clip and len(plan.stages) > 1 else ()
    norms = (Collective("all_reduce", "norm", ranks) for ranks in pipelines)
    return (*gradients, *norms, *summed_losses(plan, units))


def summed_gradients(plan: Plan, units: Sequence[Unit]) -> tuple[Collective, ...]:
    """One sum over the replicas of each stage that has gradients of its own; it runs in buckets,
    beside the last backward."""
    return tuple(
        Collective(
            "all_reduce",
            f"gradients of stage {stage.index}",
            stage.mesh.ranks,
            plan.bucket_bytes,
        )
        for stage in plan.stages
        if plan.replicas > 1
        and any(unit.summed for unit in units if unit.rank == stage.mesh.ranks[0])
    )


def summed_losses(plan: Plan, units: Sequence[Unit]) -> tuple[Collective, ...]:
    """The loss of the replicas together, where it is."""
    stages = {unit.stage for unit in units if unit.outputs and plan.replicas > 1}
    return tuple(
        Collective("all_reduce", "loss", plan.stages[stage].mesh.ranks) for stage in sorted(stages)
    )


def tied_gradients(units: Sequence[Unit]) -> tuple[Collective, ...]:
    """One sum over ranks, replicas included, for each trainable parameter that several stages
    hold."""
    holders: dict[str, set[int]] = {}
    for unit in units:
        for held in unit.state:
            if held.trainable and len(held.stages) > 1:
                holders.setdefault(held.canonical, set()).add(unit.rank)
    return tuple(
        Collective("all_reduce", f"gradient of {fqn}", tuple(sorted(ranks)))
        for fqn, ranks in sorted(holders.items())
    )


def run_microbatches(row: Row, routes: tuple[Route, ...]) -> Iterator[Instruction]:
    """The computes of a step with their transfers, all sends done at its end."""
    edges = [edge for route in routes for edge in route.edges]
    for edge in edges:
        if edge.target == row.rank:
            yield from [Post(edge.name)] * edge.ahead
    for action in row.actions:
        yield from exchange(action, routes)
    yield from (Flush(edge.name) for edge in edges if edge.source == row.rank)


def exchange(action: Action, routes: tuple[Route, ...]) -> Iterator[Instruction]:
    """One compute: take what it needs, run it, send what it made."""
    incoming: list[Edge] = []
    outgoing: list[Edge] = []
    for route in routes:
        if action.kind is Kind.F:
            incoming += [route.activations] if route.target == action.stage else []
            outgoing += [route.activations] if route.source == action.stage else []
        elif action.kind is Kind.B and route.gradients:
            incoming += [route.gradients] if route.source == action.stage else []
            outgoing += [route.gradients] if route.target == action.stage else []
    microbatch = Microbatch(action.microbatch)
    for edge in incoming:
        yield Post(edge.name)
        yield Wait(edge.name, microbatch)
    yield Compute(action, microbatch)
    yield from (Send(edge.name, microbatch) for edge in outgoing)
