"""Builds the user's model: without values, recording its initialisation, or really."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...errors import CaptureError
from ...ir.graph import Recipe
from ...ir.spec import Spec
from .private import fake_copy, fake_mode, is_fake, one_trunc_normal
from .recipe import assign_seeds
from .record import Recorder
from .user import call

dtypes = {"fp32": torch.float32, "fp64": torch.float64}


@torch.library.custom_op("ppc::trunc_normal_", mutates_args=("tensor",))
def trunc_normal_(tensor: torch.Tensor, mean: float, std: float, a: float, b: float) -> None:
    """nn.init.trunc_normal_ as one operation: torch's own loops on the values that it drew."""
    raise NotImplementedError("only recorded, never run")


@trunc_normal_.register_fake
def _(tensor: torch.Tensor, mean: float, std: float, a: float, b: float) -> None:
    return None


def record_trunc_normal(tensor, mean, std, a, b, generator=None):  # type: ignore[no-untyped-def]
    """Stands in for torch.nn.init._no_grad_trunc_normal_ while a factory is recorded."""
    with torch.no_grad():
        trunc_normal_(tensor, mean, std, a, b)
    return tensor


@contextmanager
def default_dtype(precision: str) -> Iterator[None]:
    """New floating-point tensors get the spec's precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtypes[precision])
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Built:
    """A model whose tensors have no values, and the recipes of those values."""

    model: nn.Module
    mode: FakeTensorMode
    recipes: dict[str, Recipe]
    """By full name: parameters, buffers, then plain tensor attributes."""


def build_model(spec: Spec) -> nn.Module:
    """The user's model, really. Its random numbers start from the spec's seed."""
    torch.manual_seed(spec.train.seed)
    with default_dtype(spec.train.precision):
        return make_model(spec)


def build_fake(spec: Spec) -> Built:
    """The user's model without values, its initialisation recorded."""
    mode, recorder = fake_mode(), Recorder()
    with (
        default_dtype(spec.train.precision),
        mode,
        recorder,
        one_trunc_normal(record_trunc_normal),
    ):
        model = make_model(spec)
    recipes = {name: recorder.recipe(tensor) for name, tensor in state_tensors(model)}
    make_fake(model, mode)
    return Built(model, mode, assign_seeds(recipes))


def make_model(spec: Spec) -> nn.Module:
    """Call the factory; for proofs in float64 all of the model is, whatever dtypes it names."""
    model = call(spec.model.factory, spec.folder, spec.at("model.factory"))
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"{spec.model.factory.target} returned {type(model).__name__}, not a torch.nn.Module",
            spec.at("model.factory"),
        )
    if spec.train.precision == "fp64":
        to_float64(model)
    return model


def to_float64(model: nn.Module) -> None:
    """model.to(torch.float64), which tensors without values do not allow; ties are kept."""
    known: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if (
                    tensor is None
                    or not tensor.is_floating_point()
                    or tensor.dtype == torch.float64
                ):
                    continue
                if id(tensor) not in known:
                    converted = tensor.detach().to(torch.float64)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    known[id(tensor)] = (
                        nn.Parameter(converted, tensor.requires_grad) if is_parameter else converted
                    )
                store[name] = known[id(tensor)]  # type: ignore[assignment]


def state_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the model, tied names once: parameters, buffers, plain attributes."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}" if path else name, value


def make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace the real tensors that a factory put in (from numpy, say) by fake ones."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not is_fake(parameter):
                fake = nn.Parameter(fake_copy(mode, parameter), parameter.requires_grad)
                setattr(module, name, fake)
        for store in (module._buffers, vars(module)):
            for name, value in list(store.items()):
                if isinstance(value, torch.Tensor) and not is_fake(value):
                    store[name] = fake_copy(mode, value)
