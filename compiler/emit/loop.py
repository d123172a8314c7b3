"""The training loop: its body and its log."""

from collections.abc import Iterator, Sequence

from ..ir.program import Collective, Instruction
from ..ir.unit import Unit
from .expression import quote
from .job import Job
from .layout import wrap
from .optimizer import varies
from .source import steps_per_epoch


def loop_lines(job: Job, unit: Unit, body: Sequence[Instruction], *, trains: bool) -> Iterator[str]:
    """The body of the training loop."""
    batch = "get_batch(step)" if unit.inputs else ""
    if not job.plan.even:
        yield "    sizes = [len(part) for part in samples_of(step).tensor_split(MICROBATCHES)]"
    yield f"    {'loss = ' if unit.outputs else ''}run_microbatches({batch})"
    names = {held.canonical: held.fqn for held in unit.state}
    for item in body:
        if isinstance(item, Collective) and item.value.startswith("gradient of "):
            name = names[item.value.removeprefix("gradient of ")]
            ranks = " and ".join(map(str, item.group))
            yield f"    # {name} is tied: its gradient is the sum over ranks {ranks}"
            group = (
                ""
                if len(item.group) == job.plan.world_size
                else f", dist.ReduceOp.SUM, groups[{item.group}]"
            )
            yield f"    gradient = stage.get_parameter({quote(name)}).grad"
            what = quote(f"the gradient of {name}")
            yield from wrap(f"guard({what}, dist.all_reduce, gradient{group})", 4)
    clips = job.spec.train.clip_norm is not None
    if clips:
        yield f"    {'norm = ' if unit.outputs else ''}clip_gradients()"
    if trains:
        if varies(job.spec):
            yield '    optimizer.param_groups[0]["lr"] = lr_at(step)'
        yield "    optimizer.step()"
        yield "    optimizer.zero_grad()"
    if unit.outputs:
        yield f"    log(step, loss.item(){', norm.item()' if clips else ''})"


def view_log(job: Job) -> dict[str, object]:
    sequence = getattr(job.spec.data, "sequence", None)
    lr = "lr_at(step)" if varies(job.spec) else "LR"
    steps = job.spec.train.steps
    return {
        "norm": job.spec.train.clip_norm is not None,
        "count": "" if sequence is None else f" * {sequence}",
        "short": not job.plan.even and job.spec.data.last_batch == "keep",
        "steps_per_epoch": steps_per_epoch(job.spec.data),
        "lr": lr,
        "unit": "samples" if sequence is None else "tokens",
        "width": len(str(steps)) if steps else 5,
    }
