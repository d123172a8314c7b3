"""Builds the user's model: without values, recording its initialisation, or really."""

import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from ...errors import CaptureError, Location
from ...ir.graph import Recipe
from ...ir.spec import Spec
from .autocast import lists_of
from .made import Given, noting_arguments
from .private import (
    FakeTensorMode,
    fake_mode,
    forward_hooks,
    is_counting_norm,
    is_fake,
    one_trunc_normal,
    stores,
)
from .recipe import assign_seeds, zeros
from .record import Recorder
from .replaced import fakes_convert
from .sharing import find_shared
from .user import call, first_line
from .whole import stand_in

dtypes = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.float32}
"""Of weights and of the data's floats, by precision."""


@torch.library.custom_op("ppc::trunc_normal_", mutates_args=("tensor",))
def trunc_normal_(tensor: torch.Tensor, mean: float, std: float, a: float, b: float) -> None:
    """nn.init.trunc_normal_ as one operation: torch's own loops on the values that it drew."""
    raise NotImplementedError("only recorded, never run")


trunc_normal_.register_fake(lambda *_: None)


def record_trunc_normal(
    tensor: torch.Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Stands in for nn.init.trunc_normal_ while a factory is recorded."""
    with torch.no_grad():
        if generator is None:
            trunc_normal_(tensor, mean, std, a, b)
        else:  # no script repeats it, so any operation with a generator will do
            tensor.normal_(mean, std, generator=generator)
    return tensor


@contextmanager
def default_dtype(precision: str) -> Iterator[None]:
    """New floating-point tensors get the precision's dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtypes[precision])
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def numerics(spec: Spec) -> Iterator[None]:
    """Compute as the spec's scripts do on its devices: new tensors get the precision's dtype, and
    autocast follows the lists of the kind of device."""
    with default_dtype(spec.train.precision), lists_of(spec.cluster.device.kind):
        yield


@dataclass(frozen=True)
class Built:
    """A model whose tensors have no values, and the recipes of those values."""

    model: nn.Module
    mode: FakeTensorMode
    recipes: dict[str, Recipe]
    """By full name: parameters, buffers, then plain tensor attributes."""
    recorder: Recorder
    why_saved: str
    """Why the factory could not be recorded, where it could not."""
    shared: tuple[tuple[str, str], ...] = ()
    """Pairs of different tensors in one memory."""
    given: Mapping[int, Given] = field(default_factory=dict)
    """What modules were built from, by their ids."""


def build_model(spec: Spec) -> nn.Module:
    """The user's model, really. Its random numbers start from the spec's seed."""
    with default_dtype(spec.train.precision), seeded(spec.train.seed):
        return make_model(spec)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch, numpy and Python draw from a seed, so that two builds agree; then as before."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


def build_fake(spec: Spec) -> Built:
    """The user's model without values, its initialisation recorded, or saved where recording fails
    (a file is read, a dry run is made)."""
    mode = fake_mode()
    recorder, why_saved = Recorder(), ""
    with noting_arguments(wanted=bool(spec.model.leaf)) as given:
        try:
            model = record(spec, mode, recorder)
            recipes = assign_seeds(recorder.recipes(dict(state_tensors(model))))
        except CaptureError as error:
            if error.__cause__ is None:
                raise
            model = build_model(spec)
            why_saved = f"{type(error.__cause__).__name__}: {first_line(error.__cause__)}"
            recipes = {name: Recipe(saved=True) for name, _ in state_tensors(model)}
    refuse_uninitialised(spec, model, recipes)
    shared = find_shared(state_tensors(model))
    make_fake(model, mode)
    known = {name: r if r.saved or r.ops else zeros for name, r in recipes.items()}
    stand_in(model)
    return Built(model, mode, known, recorder, why_saved, shared, given)


def record(spec: Spec, mode: FakeTensorMode, recorder: Recorder) -> nn.Module:
    """Build the model without values, while the recorder notes how each tensor gets its first."""
    with (
        default_dtype(spec.train.precision),
        seeded(spec.train.seed),
        mode,
        recorder,
        one_trunc_normal(record_trunc_normal),
        fakes_convert(),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        return make_model(spec)


def refuse_uninitialised(spec: Spec, model: nn.Module, recipes: Mapping[str, Recipe]) -> None:
    """Raises CaptureError where a parameter would start as whatever is in memory."""
    for name, parameter in model.named_parameters():
        recipe = recipes[name]
        if not recipe.saved and not recipe.ops and parameter.numel():
            raise CaptureError(
                f"{name} is never initialised",
                spec.at("model.factory"),
                "nn.init.zeros_, or another of torch.nn.init, in the factory",
            )


def make_model(spec: Spec) -> nn.Module:
    """Call the factory; for proofs in float64 all of the model is, whatever dtypes it names."""
    model = call(spec.model.factory, spec.folder, spec.at("model.factory"))
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"{spec.model.factory.target} returned {type(model).__name__}, not a torch.nn.Module",
            spec.at("model.factory"),
            "a function that returns the model, or the model's class",
        )
    for path, module in model.named_modules():
        refuse_unsupported(path or "the model", module, spec.at("model.factory"))
    for name, tensor in state_tensors(model):
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise CaptureError(
                f"{name} has no size yet",
                spec.at("model.factory"),
                "call lazy modules once in the factory, on zeros of the right shape",
            )
        if tensor.device.type != "cpu":
            raise CaptureError(
                f"{spec.model.factory.target} puts {name} on {tensor.device}",
                spec.at("model.factory"),
                "build the model on the CPU, where tensors start; the scripts choose their device",
            )
    if spec.train.precision == "fp64":
        to_float64(model)
    return model


def refuse_unsupported(path: str, module: nn.Module, where: Location | None) -> None:
    """Raises CaptureError for a module that is no Python, or whose parameter is made by a hook."""
    if isinstance(module, torch.jit.ScriptModule):
        raise CaptureError(
            f"{path} is TorchScript, which has no Python to capture",
            where,
            "hold the module itself, without torch.jit.script or trace",
        )
    if is_counting_norm(module) and module.momentum is None:
        raise CaptureError(
            f"{path} averages over all steps so far, by a count that forward reads (momentum=None)",
            where,
            "a momentum: 0.1 is torch's default",
        )
    for hook in forward_hooks(module):
        made = type(hook).__module__
        if made in ("torch.nn.utils.spectral_norm", "torch.nn.utils.prune"):
            raise CaptureError(
                f"{path} has a tensor that a hook of {made} computes anew before each call",
                where,
                "torch.nn.utils.parametrizations.spectral_norm, which is no hook"
                if made.endswith("norm")
                else "prune.remove(module, name), which makes the pruning lasting",
            )


def to_float64(model: nn.Module) -> None:
    """model.to(torch.float64), which tensors without values do not allow; ties are kept."""
    known: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for store in stores(module):
            for name, tensor in list(store.items()):
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
                setattr(module, name, known[id(tensor)])  # recurrent layers keep a second list


def state_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the model, tied names once: parameters, buffers, plain attributes, but those
    that are computed from parameters, which hold no state."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    yield from ((name, tensor) for name, tensor in plain_tensors(model) if tensor.is_leaf)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the model under each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    yield from plain_tensors(model)


def plain_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are attributes of modules, and neither parameters nor buffers."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}" if path else name, value


def fake_copy(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor of the same shape and dtype."""
    return mode.from_tensor(tensor.detach())


def make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace the real tensors that a factory put in (from numpy, say) by fakes; ties are kept."""
    known: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in known:
            copy = fake_copy(mode, tensor)
            known[id(tensor)] = (
                nn.Parameter(copy, tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else copy
            )
        return known[id(tensor)]

    for module in model.modules():
        for store in (*stores(module), vars(module)):
            for name, value in list(store.items()):
                if isinstance(value, torch.Tensor) and not is_fake(value) and value.is_leaf:
                    setattr(module, name, fake(value))
