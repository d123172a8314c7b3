"""The first weights of the user's model, as recipes give them, and whether the recipes are true."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..frontend.capture.build import state_tensors
from ..frontend.capture.replay import replay
from ..ir.graph import Graph, Parameter
from .observe import copy, state_of

MANY = 1024
"""From this many elements on, a mean and a deviation tell distributions apart."""
SIGMAS = 10.0
"""Allowed difference in standard errors: wide, for the elements of a tensor may hang together."""


def replay_weights(graph: Graph, seed: int, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor that the graph holds, by its first name; `saved` has those without a recipe."""
    return {
        fqn: saved[fqn] if parameter.recipe.saved else first_value(parameter, seed)
        for fqn, parameter in graph.parameters.items()
        if not parameter.recipe.saved or fqn in saved
    }


def first_value(parameter: Parameter, seed: int) -> Tensor:
    meta = parameter.meta
    shape = tuple(size for size in meta.shape if isinstance(size, int))
    return replay(parameter.recipe, shape, getattr(torch, meta.dtype), seed)


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of its parameters, buffers and plain tensors, a tied one under each of its names."""
    plain = {name: copy(tensor) for name, tensor in state_tensors(model)}
    return plain | state_of(model)


def load_weights(model: nn.Module, graph: Graph, values: Mapping[str, Tensor]) -> None:
    """Load what a state dict has by name and strictly, the rest in place."""
    names = {n: p.fqn for p in graph.parameters.values() for n in (p.fqn, *p.aliases)}
    held = model.state_dict()
    model.load_state_dict({name: values[names[name]] for name in held if name in names})
    with torch.no_grad():
        for name, tensor in state_tensors(model):
            if name not in held:
                tensor.copy_(values[name])


def check_recipes(
    graph: Graph, real: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> dict[str, str]:
    """Where the recipes differ from the user's real model: name -> how.

    Recipes without randomness give its values; random ones, and values that were saved because
    they could not be recorded, have its distributions.
    """
    found = {}
    for fqn, parameter in graph.parameters.items():
        if fqn not in real:  # a literal of forward
            continue
        random = parameter.recipe.saved or any(op.random for op in parameter.recipe.ops)
        difference = (unlike if random else unequal)(values[fqn], real[fqn])
        if difference:
            found[fqn] = difference
    return found


def unequal(value: Tensor, real: Tensor) -> str:
    """How a tensor differs from the real one by more than rounding; "" if it does not."""
    if value.shape != real.shape or value.dtype != real.dtype:
        return f"{value.dtype}{list(value.shape)}, the model has {real.dtype}{list(real.shape)}"
    if torch.allclose(value, real, rtol=1e-6, atol=1e-7, equal_nan=True):
        return ""
    return f"off by {(value.double() - real.double()).abs().max():.3g}"


def unlike(value: Tensor, real: Tensor) -> str:
    """How the distribution of a tensor differs from the real one's; "" if it does not."""
    if value.shape != real.shape or value.dtype != real.dtype:
        return unequal(value, real)
    if value.numel() < MANY or not value.is_floating_point():
        return ""
    a, b = value.double(), real.double()
    both = torch.cat([a - a.mean(), b - b.mean()])
    std = both.std().item()
    tails = (both**4).mean().item() / std**4 if std else 1.0
    limit = SIGMAS * std * (2 / a.numel()) ** 0.5
    for what, difference, allowed in (
        ("mean", abs(a.mean() - b.mean()), limit),
        ("standard deviation", abs(a.std() - b.std()), limit * max(0.1, tails - 1) ** 0.5 / 2),
    ):
        if difference > allowed:
            return f"{what} differs by {difference:.3g}, beyond chance ({allowed:.3g})"
    return ""
