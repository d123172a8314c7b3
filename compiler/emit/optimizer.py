"""The update: the optimizer, its learning rate by step, clipping."""

from collections.abc import Iterator
from dataclasses import asdict

from ..ir.program import Collective, Loop, Program
from ..ir.spec import SGD, AdamW, Spec
from ..ir.unit import Unit
from .expression import quote
from .job import Job
from .layout import wrap
from .reducer import sum_over


def optimizer_lines(spec: Spec, unit: Unit) -> Iterator[str]:
    """The optimizer over the stage's parameters, with their names."""
    if not any(held.trainable for held in unit.state):
        return
    form = spec.train.optimizer
    defaults = AdamW() if isinstance(form, AdamW) else SGD()
    options = [
        f"{name}={spell_option(value)}"
        for name, value in asdict(form).items()
        if name not in ("name", "lr") and value != getattr(defaults, name)
    ]
    cls = "torch.optim.AdamW" if isinstance(form, AdamW) else "torch.optim.SGD"
    yield from wrap(
        f"optimizer = {cls}({', '.join(['stage.named_parameters()', 'lr=LR', *options])})", 0
    )


def spell_option(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(spell_option, value))})"
    return repr(value)


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


def view_clip(job: Job, program: Program, unit: Unit) -> dict[str, object]:
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
    pipeline = norm_group(program)
    logs = unit.outputs and not program.coords.get("data", 0)
    if pipeline:
        # without gradients the total is on the CPU, whatever the device
        there = ".to(device)" if job.spec.cluster.device.kind == "cuda" else ""
        lines.append(f"square = nn.utils.get_total_norm(grads).square(){there}")
        group = sum_over(job.plan, pipeline)
        lines.append(f'guard("the norm of all gradients", dist.all_reduce, square{group})')
        lines += ["norm = square.sqrt()"] if logs else []
    else:
        lines.append("norm = nn.utils.get_total_norm(grads)")
    norm = "norm" if logs or not pipeline else "square.sqrt()"
    lines.append(f"nn.utils.clip_grads_with_norm_(stage.parameters(), MAX_NORM, {norm})")
    lines += ["return norm"] if logs else []
    doc = "Clip by the norm over the whole model: the stages add up their squared norms."
    if not pipeline:
        doc = "Clip by the norm over the whole model."
    return {"doc": doc, "lines": [wrapped for line in lines for wrapped in wrap(line, 4)]}


def norm_group(program: Program) -> tuple[int, ...]:
    """The ranks that add up their squared norms: those of the pipeline; () for one stage."""
    loop = next(item for item in program.actions if isinstance(item, Loop))
    sums = (c.group for c in loop.body if isinstance(c, Collective) and c.value == "norm")
    return next(sums, ())
