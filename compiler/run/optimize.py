"""The optimizer that a spec asks for: torch's own, on named parameters, its rate by step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import torch
from torch import nn
from torch.optim import Optimizer

from ..ir.spec import Train

classes: Mapping[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


def make_optimizer(train: Train, named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    """The optimizer over (name, parameter) pairs; it leaves alone what has no gradient."""
    options = asdict(train.optimizer)
    return classes[options.pop("name")](named, **options)


def step_optimizer(optimizer: Optimizer, train: Train, step: int, steps: int) -> None:
    """Take step `step` of `steps` at its rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(train, step, steps)
    optimizer.step()


def learning_rate(train: Train, step: int, steps: int) -> float:
    """The rate of a step: linear warm-up, then the schedule from lr towards final x lr."""
    lr, course = train.optimizer.lr, train.lr_schedule
    if step < course.warmup:
        return lr * (step + 1) / course.warmup
    progress = (step - course.warmup) / (steps - course.warmup)
    if course.name == "linear":
        return lr * (1 - (1 - course.final) * progress)
    if course.name == "cosine":
        fall = 0.5 * (1 + math.cos(math.pi * progress))
        return lr * (course.final + (1 - course.final) * fall)
    return lr
