"""The update: the optimizer, its learning rate by step, clipping."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..ir.program import Collective, Loop, Program
from ..ir.spec import Group, LrSchedule, Option, Spec
from ..ir.unit import Unit
from .constants import own_rates
from .expression import quote
from .job import Job
from .layout import width, wrap
from .reducer import sum_lines
from .weights import condition


@dataclass(frozen=True, slots=True)
class Part:
    """The parameters of one group of the optimizer that a stage holds."""

    number: int
    """Of the group in the spec; of the rest, the number of groups."""
    names: tuple[str, ...]
    """As the stage calls them."""
    options: Mapping[str, Option]
    """Arguments of its own, without the learning rate."""
    lr: str
    patterns: tuple[str, ...]

    def variable(self, groups: int) -> str:
        return "rest" if self.number == groups else f"group_{self.number}"


def parts_of(spec: Spec, unit: Unit) -> list[Part]:
    """The groups that have a parameter on a stage. A tied one is in the group of its first name."""
    form = spec.train.optimizer
    members: dict[int, list[str]] = {}
    for held in unit.state:
        if held.trainable:
            members.setdefault(form.group_of(held.canonical), []).append(held.fqn)
    rates = {i: f"GROUP_LRS[{k}]" for k, i in enumerate(own_rates(form))}
    found = []
    for number, names in sorted(members.items()):
        group = form.groups[number] if number < len(form.groups) else Group(params=())
        options = {key: value for key, value in group.options.items() if key != "lr"}
        rate = rates.get(number, "LR")
        found.append(Part(number, tuple(names), options, rate, group.params))
    return found


def optimizer_lines(job: Job, unit: Unit) -> Iterator[str]:
    """The optimizer over the stage's parameters, with their names."""
    parts, form = parts_of(job.spec, unit), job.spec.train.optimizer
    if not parts:
        return
    given = source(job, unit)
    options = dict(form.options)
    if len(parts) == 1:
        options |= parts[0].options
        rate = parts[0].lr
    else:
        names = [part.variable(len(form.groups)) for part in parts]
        yield from group_lines(parts, names, given)
        given, rate = f"[{', '.join(names)}]", "LR"
    arguments = [given, f"lr={rate}", *(f"{k}={spell_option(v)}" for k, v in options.items())]
    yield from wrap(f"optimizer = torch.optim.{form.name}({', '.join(arguments)})", 0)


def source(job: Job, unit: Unit) -> str:
    """The parameters with their names. Frozen ones do no harm, but to classes that look at all."""
    parameters = job.graph.parameters
    frozen = any(not h.trainable and not parameters[h.canonical].buffer for h in unit.state)
    if frozen and job.spec.train.optimizer.name in ("Muon", "Adagrad"):
        return "[(n, p) for n, p in stage.named_parameters() if p.requires_grad]"
    return "stage.named_parameters()"


def group_lines(parts: Sequence[Part], variables: Sequence[str], given: str) -> Iterator[str]:
    """A dict for each group, filled by the ends of the names."""
    for part, variable in zip(parts, variables, strict=True):
        own = [f'"lr": {part.lr}'] if part.lr != "LR" else []
        own += [f'"{key}": {spell_option(value)}' for key, value in part.options.items()]
        items = ", ".join(['"params": []', *own])
        line = f"{variable} = {{{items}}}"
        comment = f"  # {', '.join(part.patterns)}" if part.patterns else ""
        if comment.isprintable() and len(line + comment) <= width:
            yield line + comment
        else:
            yield from wrap(line, 0)
    yield from wrap(f"for name, parameter in {given}:", 0)
    for i, (part, variable) in enumerate(zip(parts, variables, strict=True)):
        others = [name for other in parts if other is not part for name in other.names]
        head = f"{'elif' if i else 'if'} {condition(part.names, others)}:"
        yield from wrap(head, 4) if i < len(parts) - 1 else ["    else:"]
        yield f"        group = {variable}"
    yield '    group["params"].append((name, parameter))'


def spell_option(value: Option) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(spell_option, value))})"
    return quote(value) if isinstance(value, str) else repr(value)


def varies(spec: Spec) -> bool:
    """Whether the learning rate is not the same in every step."""
    schedule = spec.train.lr_schedule
    return schedule.name != "constant" or bool(schedule.warmup)


def rate_lines(job: Job, unit: Unit) -> Iterator[str]:
    """Give each group of the stage's its learning rate, in the training loop."""
    rates = [part.lr for part in parts_of(job.spec, unit)]
    if len(rates) == 1:
        own = f", {rates[0]}" if rates[0] != "LR" else ""
        yield f'    optimizer.param_groups[0]["lr"] = lr_at(step{own})'
    elif set(rates) == {"LR"}:
        yield "    for group in optimizer.param_groups:"
        yield '        group["lr"] = lr_at(step)'
    else:
        yield f"    for group, lr in zip(optimizer.param_groups, [{', '.join(rates)}]):"
        yield '        group["lr"] = lr_at(step, lr)'


def view_course(job: Job, unit: Unit, *, needed: bool) -> dict[str, object]:
    """The function lr_at, on ranks that need it, and what it imports."""
    if not needed or not varies(job.spec):
        return {"optimizer": None, "course_modules": []}
    own = any(part.lr != "LR" for part in parts_of(job.spec, unit))
    name = job.spec.train.lr_schedule.name.partition(":")[2]
    imported = [f"from {job.course_module} import {name} as lr_factor"] if name else []
    return {
        "optimizer": {
            "parameters": "step, lr=LR" if own else "step",
            "lr": [f"    {line}" for line in lr_lines(job.spec, "lr" if own else "LR")],
        },
        "course_modules": imported,
    }


def lr_lines(spec: Spec, lr: str) -> Iterator[str]:
    """The body of lr_at; `lr` is the rate at its highest."""
    course = spec.train.lr_schedule
    factor = " * lr_factor(step)" if ":" in course.name else ""
    if course.warmup:
        yield "if step < WARMUP_STEPS:"
        yield f"    return {lr} * (step + 1) / WARMUP_STEPS{factor}"
    passed = "(step - WARMUP_STEPS)" if course.warmup else "step"
    if course.name == "constant":
        yield f"return {lr}"
    elif factor:
        yield f"return {lr}{factor}"
    elif course.name == "step":
        yield f"return {lr} * GAMMA ** ({passed} // EVERY)"
    elif course.name == "inverse_sqrt":
        under = "WARMUP_STEPS / (step + 1)" if course.warmup else "1 / (step + 1)"
        yield f"return {lr} * math.sqrt({under})"
    elif course.name == "one_cycle":
        yield from one_cycle_lines(lr)
    else:
        yield from fall_lines(course, lr)


def one_cycle_lines(lr: str) -> Iterator[str]:
    """Up from the first rate and down to the last, each along half a cosine."""
    yield f"first, peak = {lr} / DIV_FACTOR, PCT_START * STEPS - 1"
    yield "if step < peak:"
    yield f"    return {lr} + (first - {lr}) * 0.5 * (1 + math.cos(math.pi * step / peak))"
    yield "last, done = first / FINAL_DIV_FACTOR, (step - peak) / (STEPS - 1 - peak)"
    yield f"return last + ({lr} - last) * 0.5 * (1 + math.cos(math.pi * done))"


def fall_lines(course: LrSchedule, lr: str) -> Iterator[str]:
    """Down to FINAL, straight or along half a cosine."""
    done = "(step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS)" if course.warmup else "step / STEPS"
    left = "(1 - {})" if course.name == "linear" else "0.5 * (1 + math.cos(math.pi * {}))"
    left = f"(FINAL + (1 - FINAL) * {left})" if course.final else left
    rate = f"return {lr} * {left}"
    if len(rate.format(done)) <= 96:
        yield rate.format(done)
    else:
        yield f"done = {done}"
        yield rate.format("done")


def clip_value_lines(spec: Spec) -> Iterator[str]:
    """Clip each element, in the training loop; torch's own function fails without gradients."""
    if spec.train.clip_value is not None:
        yield "    for parameter in stage.parameters():"
        yield "        if parameter.grad is not None:"
        yield "            parameter.grad.clamp_(-MAX_VALUE, MAX_VALUE)"


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
        lines += sum_lines("the norm of all gradients", "square", pipeline)
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
