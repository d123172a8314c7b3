"""Runs torch.export on the model with its loss, at one batch size, and notes what modules take.

Export alone forgets the argument names of forward, which values a module returns, checkpoints and
custom backwards: hooks note all that while it traces, and those on gradients are refused.
"""

import contextlib
import inspect
import io
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from ...errors import CaptureError, PpcError
from ...ir.graph import Arg, CallId, Items, Ref, TensorMeta
from .arguments import to_arg
from .attributes import Assigned, note_assignments, refuse_written_attributes
from .autocast import autocast
from .blame import blaming_fields
from .build import Built
from .checkpoints import Regions, noting_checkpoints
from .functions import Application, keeping_functions
from .held import is_own
from .hooks import refuse_freezing, refuse_hooks
from .inner_backward import refuse_inner_backward
from .loss_state import refuse_assigned
from .private import node_name, regions_flat, running_call, uncompiled
from .python_state import refuse_python_state
from .remedies import has_experts, is_data_dependent, leaf_hint, needs_values
from .replaced import inference_noted, users_run_plainly
from .stacks import forwards_alone
from .training import Training
from .user import call_site, first_line, users_errors, users_line
from .whole import known

loss_alone = "leave it out: scripts go back from the loss that it returns"


@dataclass(frozen=True)
class RawCall:
    """What went into one call of a module and what came out, by names of traced nodes."""

    arguments: tuple[tuple[str, Arg], ...]
    positional: int
    output: Arg = None


@dataclass(frozen=True)
class Traced:
    """An exported program and the calls of the user's modules, path relative to the model."""

    program: torch.export.ExportedProgram
    calls: Mapping[CallId, RawCall]
    assigned: Assigned
    checkpoints: Regions
    keys: Mapping[CallId, CallId]
    """A call as nodes have it, by any path of its module -> its key in `calls`."""
    functions: Mapping[int, Application]
    """What a user's autograd functions were given, by the number that their nodes bear."""
    autocast: str | None = None
    """The dtype of the torch.autocast that it was traced under."""


def export(
    training: Training, built: Built, fields: Mapping[str, TensorMeta], batch: int
) -> Traced:
    """Trace one microbatch of `batch` samples."""
    inputs = make_inputs(training, built, fields, batch)
    calls: dict[CallId, RawCall] = {}
    keys: dict[CallId, CallId] = {}
    assigned = Assigned()
    running: list[str] = []
    again = runs_again(training, built, inputs)
    with (
        blaming_fields(known.spec, dict(zip(training.binding.fields, inputs, strict=True)), again),
        refuse_python_state(training, again),
        noting_checkpoints(training) as regions,
        note_calls(training.model, calls, keys, running),
        note_assignments(training.model, assigned),
        refuse_written_attributes(training, again),
        refuse_hooks(training.model),
        refuse_assigned(training.loss),
        refuse_freezing(training.model),
        inference_noted(),
        users_run_plainly(),
        keeping_functions() as functions,
        refuse_inner_backward(lambda: leaf_hint(running) if running else loss_alone),
        quiet(),
        regions_flat(),
        lean(),
        users_errors(training.where, "the model cannot be captured"),
        plain_words(running),
        autocast(training.autocast),  # export sees operations above it: no cast is traced
    ):
        program = torch.export.export(training, inputs, strict=False)
    return Traced(program, calls, assigned, regions, keys, functions, training.autocast)


def runs_again(
    training: Training, built: Built, inputs: Sequence[torch.Tensor]
) -> Callable[..., None]:
    """Runs forward and the loss once more, without a trace, within what it is given."""

    def again(watch: AbstractContextManager[object] | None = None) -> None:
        with (
            users_errors(training.where, "the model fails when it runs again"),
            quiet(),
            built.mode,
            watch or nullcontext(),
        ):
            training.run(*inputs)

    return again


def make_inputs(
    training: Training, built: Built, fields: Mapping[str, TensorMeta], batch: int
) -> tuple[torch.Tensor, ...]:
    """A microbatch without values."""
    with built.mode:
        return tuple(
            torch.zeros(
                (*(() if name in training.binding.whole else (batch,)), *fields[name].shape),  # type: ignore[arg-type]
                dtype=getattr(torch, fields[name].dtype),
            )
            for name in training.binding.fields
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Torch prints, logs and warns by the page when it fails; what counts is in its exception."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The tensor attribute")
            yield
    finally:
        logging.disable(before)


@contextmanager
def lean() -> Iterator[None]:
    """Without what nobody reads of an export, the text of stacks and of graphs: a fifth of it."""
    with forwards_alone(), uncompiled():
        yield


@contextmanager
def plain_words(running: Sequence[str]) -> Iterator[None]:
    """Say in the user's words what torch says in its own. `running`: paths of the modules whose
    forward runs, the innermost last."""
    try:
        yield
    except PpcError:
        raise
    except Exception as error:
        if not is_data_dependent(error):
            if (leaf := leaf_hint(running)) and type(error).__module__.startswith("torch."):
                what = f"the model cannot be captured: {type(error).__name__}: {first_line(error)}"
                raise CaptureError(what, users_line(error), leaf) from error
            raise
        if any(f.name == "ctc_loss" for f in traceback.extract_tb(error.__traceback__)):
            raise CaptureError(
                "ctc_loss reads the lengths that it is given",
                users_line(error),
                "tuples of numbers where lengths are fixed: (9,) * len(x); where they are data, a "
                "module of your own that calls it, in the spec's model.leaf",
            ) from error
        raise needs_values(users_line(error), running, experts=has_experts(error)) from error


@contextmanager
def note_calls(
    model: nn.Module,
    calls: dict[CallId, RawCall],
    keys: dict[CallId, CallId],
    running: list[str],
) -> Iterator[None]:
    """Note arguments and results of every module call while it is traced, its key there, and the
    paths of those that run."""
    handles = []
    for path, module in model.named_modules():
        before, after = make_hooks(path, calls, keys, running)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def may_be_leaf(module: nn.Module) -> bool:
    """Whether scripts could import its class: torch's, or one of the user's."""
    file = getattr(sys.modules.get(type(module).__module__), "__file__", None)
    return type(module).__module__.startswith("torch.") or is_own(file)


def make_hooks(
    path: str, calls: dict[CallId, RawCall], keys: dict[CallId, CallId], running: list[str]
) -> tuple[Callable[..., None], Callable[..., None]]:
    """The hooks of one module; its k-th call has number k, and calls may nest."""
    numbers: list[int] = []

    def before(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if any(isinstance(value, PackedSequence) for value in args):
            leaf = leaf_hint(running)
            raise CaptureError(
                "a packed sequence is as long as the values of its data say",
                call_site(),
                "padded sequences, without pack_padded_sequence" + f"; or {leaf}" * bool(leaf),
            )
        number = sum(1 for other, _ in calls if other == path)
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        arguments = []
        for name, parameter in bound.signature.parameters.items():
            if name not in bound.arguments:
                continue
            value = bound.arguments[name]
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments += [(key, traced(item)) for key, item in value.items()]
            elif parameter.kind is parameter.VAR_POSITIONAL:
                arguments += [(f"{name}_{i}", traced(item)) for i, item in enumerate(value)]
            else:
                arguments.append((name, traced(value)))
        calls[path, number] = RawCall(tuple(arguments), len(args))
        keys[running_call() or (path, number)] = path, number
        numbers.append(number)
        running.append(path if may_be_leaf(module) else "")

    def after(_: nn.Module, __: tuple[object, ...], output: object) -> None:
        number = numbers.pop()
        running.pop()
        call = calls[path, number]
        calls[path, number] = RawCall(call.arguments, call.positional, traced(output))

    return before, after


def traced(value: object) -> Arg:
    """A value that a module was given, with nodes for tensors; opaque objects become None."""
    if isinstance(value, torch.Tensor):
        name = node_name(value)
        return None if name is None else Ref(name)
    if isinstance(value, Mapping):  # transformers' outputs are such
        return Items(tuple((str(key), traced(item)) for key, item in value.items()))
    if isinstance(value, tuple | list):
        return tuple(map(traced, value))
    try:
        return to_arg(value, lambda _: None)
    except TypeError:
        return None
