"""The optimizer that a spec asks for: torch's own, on named parameters, its rate by step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..ir.spec import Train
from .observe import Recording, Tensors, copy

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


def redo_updates(recording: Recording, train: Train, steps: int) -> list[dict[str, Tensor]]:
    """What the optimizer makes of the gradients that a rank itself had: its parameters by step.

    `steps` is the length of the training. Parameters that never have a gradient are left out.
    """
    trained = {name for step in recording.steps for name in step.gradients}
    parameters = {name: nn.Parameter(recording.initial[name].clone()) for name in sorted(trained)}
    if not parameters:
        return [{} for _ in recording.steps]
    optimizer, states = make_optimizer(train, list(parameters.items())), []
    for index, step in enumerate(recording.steps):
        set_gradients(parameters, step.gradients)
        step_optimizer(optimizer, train, index, steps)
        states.append({name: copy(parameter) for name, parameter in parameters.items()})
    return states


def set_gradients(parameters: Mapping[str, nn.Parameter], gradients: Tensors) -> None:
    for name, parameter in parameters.items():
        parameter.grad = gradients[name].clone() if name in gradients else None
