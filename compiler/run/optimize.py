"""The optimizer that a spec asks for: torch's own, on named parameters, its rate by step."""

import fnmatch
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import RunError
from ..frontend.capture.user import resolve, users_errors
from ..ir.spec import LrSchedule, Spec, Train

Course = Callable[[int], float]
"""Step, counted from 0 -> factor on the learning rate."""


def make_optimizer(train: Train, named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    """The optimizer over (name, parameter) pairs; it leaves alone what has no gradient."""
    form = train.optimizer
    left = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    groups: list[dict[str, Any]] = []
    for wanted in form.groups:
        own = [p for p in left if any(fnmatch.fnmatchcase(p[0], each) for each in wanted.params)]
        left = [pair for pair in left if all(pair[0] != name for name, _ in own)]
        groups.append({"params": own, **wanted.options})
    groups.append({"params": left})
    cls = getattr(torch.optim, form.name)
    made: Optimizer = cls(groups, lr=form.lr, **form.options)
    for group in made.param_groups:
        group["highest_lr"] = group["lr"]
    return made


def step_optimizer(optimizer: Optimizer, course: Course, step: int) -> None:
    """Take a step at its rate, of each group its own."""
    for group in optimizer.param_groups:
        group["lr"] = group["highest_lr"] * course(step)
    optimizer.step()


def make_course(spec: Spec, steps: int) -> Course:
    """The factor by step of a training of `steps` steps: the warm-up's, then the schedule's."""
    form = spec.train.lr_schedule
    if ":" in form.name:
        factor = users_function(form.name, spec.folder)
        return lambda step: warm(form, step) * factor(step)
    kinds: dict[str, Course] = {
        "constant": lambda _: 1.0,
        "linear": lambda step: fall(form, 1 - progress(form, step, steps)),
        "cosine": lambda step: fall(form, half_cosine(progress(form, step, steps))),
        "one_cycle": lambda step: one_cycle(form, step, steps),
        "step": lambda step: form.gamma ** ((step - form.warmup) // (form.every or 1)),
        "inverse_sqrt": lambda step: math.sqrt(max(form.warmup, 1) / (step + 1)),
    }
    course = kinds[form.name]
    return lambda step: warm(form, step) if step < form.warmup else course(step)


def warm(form: LrSchedule, step: int) -> float:
    return min(1.0, (step + 1) / form.warmup) if form.warmup else 1.0


def progress(form: LrSchedule, step: int, steps: int) -> float:
    """Which part of the course after the warm-up is over."""
    return (step - form.warmup) / (steps - form.warmup)


def half_cosine(progress: float) -> float:
    """From 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def fall(form: LrSchedule, left: float) -> float:
    """To final; `left` goes from 1 to 0."""
    return form.final + (1 - form.final) * left


def one_cycle(form: LrSchedule, step: int, steps: int) -> float:
    """As torch's OneCycleLR: up until pct_start of the steps, down until the last."""
    top = form.pct_start * steps - 1
    first = 1 / form.div_factor
    if step < top:
        return first + (1 - first) * (1 - half_cosine(step / top))
    last = first / form.final_div_factor
    return last + (1 - last) * half_cosine((step - top) / (steps - 1 - top))


def make_after(spec: Spec) -> Callable[[nn.Module], None]:
    """What the spec wants done to the model after each step."""
    name = spec.train.after_step
    after = users_function(name, spec.folder) if name else None

    def run(model: nn.Module) -> None:
        if after is not None:
            with torch.no_grad(), users_errors(spec.at("train.after_step"), f"{name} failed"):
                after(model)

    return run


def users_function(name: str, folder: Path) -> Callable[..., Any]:
    """The user's callable, whose results count as they are."""
    found = resolve(name, folder, None)
    if not callable(found):
        raise RunError(f"{name} is not callable")
    return found
