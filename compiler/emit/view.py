"""A rank's program, unit and settings -> the flat values that the templates lay out.

Arithmetic, naming and joining happen here; a template shows what it gets.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from ..ir.graph import TensorMeta
from ..ir.program import Collective, Instruction, Loop, Program
from ..ir.spec import Spec
from ..ir.unit import Unit
from .classes import Class
from .constants import training_constants
from .data import steps_per_epoch, view_data
from .describe import describe_rank, paragraph
from .expression import quote
from .job import Job, dtypes
from .layout import wrap
from .lift import lift
from .messages import is_general
from .start import finish_lines, start_lines
from .steps import StepWriter
from .weights import spell_weights


def view_rank(job: Job, program: Program, unit: Unit) -> dict[str, object]:
    """The values for rank.py.j2, all but the imports and the compilation's name."""
    spec, plan = job.spec, job.plan
    lifted = lift(job.graph, unit, job.hints, job.boundary, dtypes[spec.train.precision])
    data = view_data(spec, plan, unit, job.paths)
    weights = spell_weights(job.graph, unit)
    longer = job.longer[program.rank]
    steps = StepWriter(
        plan, program, longer, unit, job.boundary, lifted.results, seeds=bool(unit.seeds)
    )
    title, manual = describe_rank(job, program, unit, data)
    return {
        "title": title,
        "manual": manual,
        "rank": program.rank,
        "world_size": plan.world_size,
        "stage": unit.stage,
        "microbatches": plan.microbatches,
        "training_constants": training_constants(spec, data, even=plan.even),
        "default_dtype": ["", "torch.set_default_dtype(torch.float64)"]
        if spec.train.precision == "fp64"
        else [],
        "classes": [view_class(c, job, unit) for c in (*lifted.classes, lifted.stage)],
        "seeds": bool(unit.seeds),
        "draws": weights.draws,
        "saved": weights.saved,
        "init": weights.lines,
        "init_doc": init_doc(draws=weights.draws),
        "data": data and asdict(data),
        "general": is_general(program),
        "uneven": not plan.even,
        "comm": view_comm(job, program) if program.edges else None,
        "steps": asdict(steps.write()),
        **view_update(job, program, unit),
        "edges": bool(program.edges),
        "start": list(start_lines(job, program, unit, data)),
        "finish": list(finish_lines(program)),
    }


def init_doc(*, draws: bool) -> str:
    seeded = "; seeded by name, it is the same however the model is cut" if draws else ""
    return f"The model's own initialisation{seeded}."


def view_class(form: Class, job: Job, unit: Unit) -> dict[str, object]:
    """A class, its lines indented and wrapped."""
    is_stage = form.name == "Stage"
    comment = f"  # {form.where}" if form.where else ""
    if is_stage:
        comment = f"  # the part of {job.graph.model} on this rank; names as in the whole model"
    return {
        "name": form.name,
        "comment": comment if len(f"class {form.name}(nn.Module):{comment}") <= 100 else "",
        "init_head": list(wrap(f"def __init__({', '.join(['self', *form.parameters])}):", 4)),
        "init": [line for text in form.init for line in wrap(text, 8)],
        "forward_head": list(forward_head(job, unit, form)),
        "forward": [line for item in form.forward for line in wrap(item.text, 8 + item.indent)],
    }


def forward_head(job: Job, unit: Unit, form: Class) -> Iterator[str]:
    """`def forward(self, x):`, the stage's with its shapes if they fit."""
    *lines, last = wrap(f"def forward({', '.join(['self', *form.arguments])}):", 4)
    shapes = stage_shapes(job, unit) if form.name == "Stage" else ""
    yield from lines
    yield last + shapes if not lines and len(last + shapes) <= 100 else last


def stage_shapes(job: Job, unit: Unit) -> str:
    """`  # int64[batch, 128] -> float32[batch, 128, 128]`"""
    taken = [t.meta for t in unit.receives] + [i.meta for i in unit.inputs]
    given = list(dict.fromkeys(t.value for t in unit.sends))
    results = ["loss"] * bool(unit.outputs) + [
        show_meta(job.graph.values[value]) for value in given
    ]
    return f"  # {', '.join(map(show_meta, taken))} -> {', '.join(results)}"


def show_meta(meta: TensorMeta) -> str:
    return f"{meta.dtype}[{', '.join(map(str, meta.shape))}]"


def view_comm(job: Job, program: Program) -> dict[str, object]:
    """What the class Edge does on this rank."""
    ahead = [edge.ahead for edge in program.edges if edge.target == program.rank]
    windows = [edge.window for edge in program.edges if edge.source == program.rank]
    words = []
    if ahead:
        words.append(f"{'one receive' if max(ahead) == 1 else f'{max(ahead)} receives'} ahead")
    if windows:
        sends = "one send" if max(windows) == 1 else f"{max(windows)} sends"
        words.append(f"at most {sends} under way")
    return {
        "doc": paragraph(f"Messages from rank to rank, in order; {', '.join(words)}.", 89),
        "dtype": f"torch.{dtypes[job.spec.train.precision]}",
        "receives": bool(ahead),
        "sends": bool(windows),
        "ahead": max(ahead, default=1),
        "left": max(windows, default=1) - 1,
        "size": "MICROBATCH_SIZE" if job.plan.even else "sizes[mb]",
    }


def view_update(job: Job, program: Program, unit: Unit) -> dict[str, object]:
    """Learning rate, clipping, log and the lines of the training loop."""
    trains = any(held.trainable for held in unit.state)
    loop = next(item for item in program.actions if isinstance(item, Loop))
    return {
        "optimizer": {"lr": [f"    {line}" for line in lr_lines(job.spec)]}
        if varies(job.spec) and (trains or unit.outputs)
        else None,
        "clip": view_clip(job, unit) if job.spec.train.clip_norm is not None else None,
        "log": view_log(job) if unit.outputs else None,
        "loop": list(loop_lines(job, unit, loop.body, trains=trains)),
    }


def varies(spec: Spec) -> bool:
    """Whether the learning rate is not the same in every step."""
    schedule = spec.train.lr_schedule
    return schedule.name != "constant" or bool(schedule.warmup)


def lr_lines(spec: Spec) -> Iterator[str]:
    """The body of lr_at."""
    schedule = spec.train.lr_schedule
    if schedule.warmup:
        yield "if step < WARMUP_STEPS:"
        yield "    return LR * (step + 1) / WARMUP_STEPS"
    if schedule.name == "constant":
        yield "return LR"
        return
    done = "(step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS)" if schedule.warmup else "step / STEPS"
    left = "(1 - {})" if schedule.name == "linear" else "0.5 * (1 + math.cos(math.pi * {}))"
    left = f"(FINAL + (1 - FINAL) * {left})" if schedule.final else left
    rate = f"return LR * {left}"
    if len(rate.format(done)) <= 96:
        yield rate.format(done)
    else:
        yield f"done = {done}"
        yield rate.format("done")


def view_clip(job: Job, unit: Unit) -> dict[str, object]:
    """Clipping by the norm of the whole model; a tied parameter counts on its first stage."""
    elsewhere = [
        h.fqn for h in unit.state if h.trainable and len(h.stages) > 1 and h.stages[0] != unit.stage
    ]
    parameters = "stage.parameters()"
    lines = []
    if elsewhere:
        names = ", ".join(map(quote, elsewhere))
        others = f"!= {names}" if len(elsewhere) == 1 else f"not in ({names})"
        lines.append(f"counted = [p for name, p in stage.named_parameters() if name {others}]")
        parameters = "counted"
    lines.append(f"grads = [p.grad for p in {parameters} if p.grad is not None]")
    if job.plan.world_size > 1:
        # without gradients the total is on the CPU, whatever the device
        there = ".to(device)" if job.spec.cluster.device.kind == "cuda" else ""
        lines.append(f"square = nn.utils.get_total_norm(grads).square(){there}")
        lines.append('guard("the norm of all gradients", dist.all_reduce, square)')
        lines += ["norm = square.sqrt()"] if unit.outputs else []
    else:
        lines.append("norm = nn.utils.get_total_norm(grads)")
    norm = "norm" if unit.outputs or job.plan.world_size == 1 else "square.sqrt()"
    lines.append(f"nn.utils.clip_grads_with_norm_(stage.parameters(), MAX_NORM, {norm})")
    lines += ["return norm"] if unit.outputs else []
    doc = "Clip by the norm over the whole model: the stages add up their squared norms."
    if job.plan.world_size == 1:
        doc = "Clip by the norm over the whole model."
    return {"doc": doc, "lines": [wrapped for line in lines for wrapped in wrap(line, 4)]}


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
