"""check_after_step: what runs after each step does to the parts of a model what it does to all of
it."""

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CaptureError
from ..frontend.capture.build import build_fake, build_model, numerics, state_tensors
from ..frontend.capture.private import stores, version_of
from ..frontend.capture.python_state import numpy_state
from ..frontend.capture.remedies import is_data_dependent
from ..frontend.capture.restored import restored
from ..frontend.capture.user import resolve, users_errors
from ..ir.graph import Graph
from ..ir.spec import Spec
from ..ir.unit import Unit
from .outcome import is_small, make
from .real import read_state
from .stages import find, load
from .text import compile_classes, imported, make_stage

alone = (
    "change each parameter by itself: a stage has a part of them, in classes of the script's own"
)


def check_after_step(
    spec: Spec, graph: Graph, units: Sequence[Unit], scripts: Sequence[str]
) -> None:
    """Call the user's function on the model and on each stage's part, with random weights; on
    a large model without values, to see that it runs.

    Raises CaptureError at the spec's line, or the function's.
    """
    name = spec.train.after_step
    if name is None:
        return
    where = spec.at("train.after_step")
    after = resolve(name, spec.folder, where)
    if not callable(after):
        raise CaptureError(f"{name} is not callable", where, "name a function of a module")
    with numerics(spec), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        run = partial(run_after, after, spec)
        if not is_small(graph, 1):
            run_without_values(run, spec, graph, units, scripts)
            return
        model = build_model(spec)
        state = read_state(graph, model)
        for tensor in dict(state_tensors(model)).values():
            if isinstance(tensor, nn.Parameter):
                fill(tensor)
        stages = make_stages(graph, units, scripts, state)
        drawn = generators()
        run(model, "the model")
        if drawn != generators():
            raise CaptureError(f"{name} draws random numbers, which differ on every rank", where)
        expected = read_state(graph, model)
        for unit, stage in zip(units, stages, strict=True):
            run(stage, f"stage {unit.stage}")
            compare(spec, unit, stage, expected)


def generators() -> Hashable:
    """The states of all that a user draws from."""
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy_state()


def fill(tensor: Tensor) -> None:
    """Numbers of every size, so that bounds show."""
    with torch.no_grad():
        tensor.copy_(2 * torch.randn(tensor.shape)) if tensor.is_floating_point() else None


def run_without_values(
    run: Callable[[nn.Module, str], None], spec: Spec, graph: Graph, units: Sequence[Unit],
    scripts: Sequence[str],
) -> None:  # fmt: skip
    """On tensors without values; what asks for some is not known then."""
    built = build_fake(spec)
    state = dict(state_tensors(built.model))
    with built.mode:
        made = {fqn: state.get(fqn, make(p.meta, 0)) for fqn, p in graph.parameters.items()}
        stages = make_stages(graph, units, scripts, made)
        names = [f"stage {unit.stage}" for unit in units]
        for module, name in ((built.model, "the model"), *zip(stages, names, strict=True)):
            try:
                run(module, name)
            except CaptureError as error:
                if not isinstance(cause := error.__cause__, Exception) or not is_data_dependent(
                    cause
                ):
                    raise


def make_stages(
    graph: Graph, units: Sequence[Unit], scripts: Sequence[str], state: Mapping[str, Tensor]
) -> list[nn.Module]:
    """The scripts' stages with copies of the model's weights."""
    found = []
    for unit, script in zip(units, scripts, strict=True):
        stage = make_stage(compile_classes(script, unit, graph.functions), imported(graph))
        load(stage, unit, state)
        as_parameters(stage)
        found.append(stage)
    return found


def as_parameters(stage: nn.Module) -> None:
    """What was loaded, a plain tensor each, as the script has it."""
    made: dict[int, nn.Parameter] = {}
    for module in stage.modules():
        held, _ = stores(module)  # setattr takes no plain tensor for a parameter
        for name, tensor in held.items():
            if tensor is not None:
                made.setdefault(id(tensor), nn.Parameter(tensor.detach(), tensor.requires_grad))
                held[name] = made[id(tensor)]


def run_after(after: Callable[[nn.Module], Any], spec: Spec, module: nn.Module, what: str) -> None:
    """Call it, as if in the first step: a count of its own is a count of steps, in each rank as in
    one process. Raises CaptureError for what it may not do."""
    name, where = spec.train.after_step, spec.at("train.after_step")
    parameters = dict(module.named_parameters())
    buffers = {key: (t, version_of(t)) for key, t in module.named_buffers()}
    own = [(after, "after_step")]
    with restored(own), torch.no_grad(), users_errors(where, f"{name} failed on {what}"):
        after(module)
    for key, parameter in module.named_parameters():
        if parameters.get(key) is not parameter:
            hint = "parameter.copy_(...), and other methods that end with _"
            raise CaptureError(f"{name} puts another tensor in the place of {key}", where, hint)
    for key, tensor in module.named_buffers():
        before, version = buffers.get(key, (None, 0))
        if before is not tensor or version != version_of(tensor):
            hint = "leave buffers alone: replicas have their own"
            raise CaptureError(f"{name} changes the buffer {key}", where, hint)


def compare(spec: Spec, unit: Unit, stage: nn.Module, expected: Mapping[str, Tensor]) -> None:
    """Raises CaptureError where a parameter is another one than in the whole model."""
    for held in unit.state:
        tensor = find(stage, held.fqn)
        other = expected[held.canonical]
        if isinstance(tensor, nn.Parameter) and not torch.allclose(
            tensor, other, 1e-5, 1e-6, equal_nan=True
        ):
            raise CaptureError(
                f"{spec.train.after_step} does something else to {held.fqn} of stage {unit.stage} "
                "than to that of the whole model",
                spec.at("train.after_step"),
                alone,
            )
