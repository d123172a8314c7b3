"""What replicas of a stage share: which of them a rank is, and how they sum their gradients."""

from collections.abc import Iterator, Sequence

from ..ir.program import Collective, Loop, Program
from ..ir.unit import Unit
from .expression import quote
from .groups import spell_ranks
from .job import Job, dtypes
from .layout import width


def view_replica(job: Job, program: Program, unit: Unit) -> dict[str, object]:
    """How the rank calls itself in messages, and which of how many replicas it is, if there are."""
    here = f"rank {program.rank}, stage {unit.stage}"
    if job.plan.replicas == 1:
        return {"here": here, "replica_constants": []}
    replica, size = program.coords["data"], job.plan.bucket_bytes >> 20
    constants = [
        f"REPLICA, REPLICAS = {replica}, {job.plan.replicas}  # each takes a share of every batch",
        f"BUCKET_BYTES = {size} * 2**20  # of gradients in a message",
    ]
    return {"here": f"{here}, replica {replica}", "replica_constants": constants}


def reduction(program: Program) -> Collective | None:
    """The sum of the replicas' gradients that runs beside the last backward."""
    loop = next(item for item in program.actions if isinstance(item, Loop))
    sums = (item for item in loop.body if isinstance(item, Collective) and item.bucket_bytes)
    return next(sums, None)


def padded(job: Job, unit: Unit) -> list[str]:
    """Parameters on several stages whose gradients are summed though a replica without samples, or
    without any that counts, makes none: they start, and stay, as zeros."""
    always = job.plan.even and job.spec.model.weight.kind == "samples"
    if always or job.plan.replicas == 1:
        return []
    return [held.fqn for held in unit.state if held.trainable and len(held.stages) > 1]


def sum_over(group: tuple[int, ...]) -> str:
    """The further arguments of an all_reduce over a group, which is never torch's default: that one
    cannot be counted on to end before Python does."""
    return f"dist.ReduceOp.SUM, groups[{spell_ranks(group)}]"


def sum_lines(what: str, tensor: str, group: tuple[int, ...]) -> Iterator[str]:
    """Statements of a function that sum a tensor over a group."""
    over = f"{tensor}, {sum_over(group)}"
    short = f"guard({quote(what)}, dist.all_reduce, {over})"
    if 4 + len(short) <= width:
        yield short
    else:
        yield f"args = {over}"
        yield f"guard({quote(what)}, dist.all_reduce, *args)"


def view_reducer(job: Job, program: Program, unit: Unit) -> dict[str, object] | None:
    """What the class Reducer hangs on."""
    collective = reduction(program)
    if collective is None:
        return None
    found = {
        job.graph.parameters[h.canonical].meta.dtype for h in unit.state if h.fqn in unit.summed
    }
    default = found == {dtypes[job.spec.train.precision]}
    return {
        "over": sum_over(collective.group),
        "mixed": len(found) > 1,
        "dtype": "" if default else ", dtype=b[0].dtype",
    }


def reduced_parameters(job: Job, unit: Unit) -> str:
    """The parameters in buckets, as an expression: all, or without those that are frozen, that no
    loss reaches, or that other stages hold too."""
    names = {held.fqn for held in unit.state if not job.graph.parameters[held.canonical].buffer}
    left_out = [held.fqn for held in unit.state if held.trainable and held.fqn not in unit.summed]
    frozen = any(not h.trainable for h in unit.state if h.fqn in names)
    if not left_out:
        some = "[p for p in stage.parameters() if p.requires_grad]"
        return some if frozen else "list(stage.parameters())"
    paths = cover(left_out, names)
    if len(left_out) == 1:
        others = f"name != {quote(left_out[0])}"
    elif names.isdisjoint(paths):  # whole modules
        starts = [quote(f"{path}.") for path in paths]
        listed = starts[0] if len(starts) == 1 else f"({', '.join(starts)})"
        others = f"not name.startswith({listed})"
    else:
        others = f"name not in ({', '.join(map(quote, left_out))})"
    also = " and p.requires_grad" if frozen else ""
    return f"[p for name, p in stage.named_parameters() if {others}{also}]"


def cover(chosen: Sequence[str], names: set[str]) -> list[str]:
    """The fewest paths that stand for all chosen names and no other."""
    left, found = list(chosen), []
    while left:
        parts = left[0].split(".")
        paths = [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
        path = next(
            p for p in paths if all(n in chosen for n in names if n == p or n.startswith(f"{p}."))
        )
        found.append(path)
        left = [n for n in left if n != path and not n.startswith(f"{path}.")]
    return found
