"""The training loop: its body and its log."""

from collections.abc import Iterator, Sequence

from ..ir.plan import Plan
from ..ir.program import Collective, Instruction, Log, Loop, Program
from ..ir.unit import Unit
from .checkpoint import save_lines
from .expression import quote
from .groups import written_out
from .job import Job
from .layout import wrap
from .optimizer import clip_value_lines, rate_lines, varies
from .reducer import padded, reduction, sum_lines
from .scope import clean_outside
from .source import steps_per_epoch


def loop_lines(
    job: Job, program: Program, unit: Unit, body: Sequence[Instruction]
) -> Iterator[str]:
    """The body of the training loop."""
    batch = "get_batch(step)" if unit.inputs else ""
    reduces = reduction(program) is not None
    if not job.plan.even:
        yield from size_lines(job.plan, weighted=job.spec.model.weight.kind != "samples")
    result = "means" if len(unit.outputs) > 1 else "loss"
    if reads_early(job, program, unit):
        batch = "batch"
    if unit.outputs and job.spec.model.weight.kind != "samples":
        yield from [f"    batch = {batch}"] * (batch != "batch")
        yield "    shares = weigh(batch)"
        batch = "batch"
    yield f"    {f'{result} = ' if unit.outputs else ''}run_microbatches({batch})"
    if reduces:
        yield "    reducer.finish()"
    yield from tied_lines(unit, body)
    clips = job.spec.train.clip_norm is not None
    if clips:
        yield f"    {'norm = ' if Log() in body else ''}clip_gradients()"
    yield from update_lines(job, unit, reduces=reduces)
    for item in body:
        if isinstance(item, Collective) and item.value == "loss":
            for line in sum_lines("the loss of a replica", result, item.group):
                yield from wrap(line, 4)
    if reads_early(job, program, unit):
        yield "    if step + 1 < STEPS:  # read while the GPU computes: the log waits for it"
        yield "        batch = get_batch(step + 1)"
    if Log() in body:
        values = "*means.tolist()" if len(unit.outputs) > 1 else "loss.item()"
        yield f"    log(step, {values}{', norm.item()' if clips else ''})"
    yield from save_lines(program)


def update_lines(job: Job, unit: Unit, *, reduces: bool) -> Iterator[str]:
    """A step of the optimizer, and what the user wants done to the parameters after it, frozen ones
    among them."""
    trains = any(held.trainable for held in unit.state)
    if trains:
        yield from clip_value_lines(job.spec)
        if varies(job.spec):
            yield from rate_lines(job, unit)
        yield "    optimizer.step()"
    if job.spec.train.after_step is not None:
        yield "    with torch.no_grad():"
        yield "        after_step(stage)"
    if trains:
        stay = reduces or padded(job, unit)
        yield f"    optimizer.zero_grad({'set_to_none=False' if stay else ''})"


def reads_early(job: Job, program: Program, unit: Unit) -> bool:
    """Whether the next batch is read before the step's end. On a GPU the process runs ahead of the
    computation, but for the rank that logs: it waits for the loss."""
    loop = next(item for item in program.actions if isinstance(item, Loop))
    logs = Log() in loop.body and bool(unit.inputs)
    return logs and job.spec.cluster.device.kind == "cuda"


def tied_lines(unit: Unit, body: Sequence[Instruction]) -> Iterator[str]:
    """The sums of tied gradients."""
    names = {held.canonical: held.fqn for held in unit.state}
    for item in body:
        if isinstance(item, Collective) and item.value.startswith("gradient of "):
            name = names[item.value.removeprefix("gradient of ")]
            ranks = f"ranks {' and '.join(map(str, item.group))}"
            if len(item.group) > written_out:
                ranks = f"{len(item.group)} ranks"
            yield f"    # {name} is tied: its gradient is the sum over {ranks}"
            gradient = f"stage.get_parameter({quote(name)}).grad"
            for line in sum_lines(f"the gradient of {name}", gradient, item.group):
                yield from wrap(line, 4)


def size_lines(plan: Plan, *, weighted: bool) -> Iterator[str]:
    """The sizes of the microbatches, where they differ."""
    if plan.replicas == 1:
        yield "    sizes = [len(part) for part in samples_of(step).tensor_split(MICROBATCHES)]"
        return
    yield "    parts = samples_of(step).tensor_split(MICROBATCHES * REPLICAS)"
    if not weighted:
        yield "    batch_size = sum(map(len, parts))"
    yield "    sizes = [len(part) for part in parts[REPLICA::REPLICAS]]"


def said(metric: str) -> str:
    """A metric in the line for people, as an f-string: `f" | accuracy {accuracy:.4f}"`."""
    label = quote(f" | {metric} ").replace("{", "{{").replace("}", "}}")
    return f"f{label[:-1]}{{{clean_outside(metric)}:.4f}}{label[-1]}"


def view_log(job: Job, unit: Unit) -> dict[str, object]:
    sequence = getattr(job.spec.data, "sequence", None)
    lr = "lr_at(step)" if varies(job.spec) else "LR"
    steps = job.spec.train.steps
    return {
        "metrics": [
            {"name": clean_outside(name), "key": quote(name), "said": said(name)}
            for name, _ in unit.outputs[1:]
        ],
        "done": "step + 1" if job.spec.checkpoint is None else "step + 1 - first",
        "norm": job.spec.train.clip_norm is not None,
        "count": "" if sequence is None else f" * {sequence}",
        "short": not job.plan.even
        and job.spec.data.last_batch == "keep"
        and job.spec.checkpoint is None,
        "steps_per_epoch": steps_per_epoch(job.spec.data),
        "lr": lr,
        "unit": "samples" if sequence is None else "tokens",
        "width": len(str(steps)) if steps else 5,
    }
