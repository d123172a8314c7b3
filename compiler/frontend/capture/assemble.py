"""A trace and the model around it -> Graph, under the user's names."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import nn

from ...errors import CaptureError, Location
from ...ir.graph import (
    Arg,
    Call,
    CallId,
    Graph,
    Input,
    Module,
    Op,
    Parameter,
    Recipe,
    Ref,
    State,
    TensorMeta,
)
from ...ir.spec import Dataset, Spec, whole_fields
from .arguments import dtype_name
from .build import Built, build_model, named_tensors, state_tensors
from .export import RawCall
from .fields import first_sample, sample_keys
from .leaf import constructor
from .loss import output_name, returned_loss
from .measure import measure
from .raw import Raw
from .rewrite import substitute
from .training import Training
from .weight import weight_fields
from .whole import known
from .written import refuse_written_parameters


def assemble(
    spec: Spec, raw: Raw, built: Built, training: Training, sizes: tuple[int, int],
    messages: tuple[str, ...],
) -> Graph:  # fmt: skip
    """Put the parts together. `sizes`: two batch sizes to measure at, equal for a fixed one."""
    folder = spec.folder
    names = name_inputs(raw, training)
    parameters = read_parameters(built, raw)
    aliases = read_aliases(built.model)
    canonical = {name: fqn for fqn, p in parameters.items() for name in (fqn, *p.aliases)}
    name_of = dict(zip(training.binding.fields, names.values(), strict=True))
    known: dict[str, Arg] = {old: Ref(new) for old, new in names.items()}
    ops = [own_names(rename(op, known, folder), aliases) for op in raw.ops]
    refuse_written_parameters(spec, raw.ops, canonical, parameters)
    values = {names.get(name, name): meta for name, meta in raw.values.items()}
    measured, metas = measure(ops, values, tuple(names.values()), parameters, canonical, sizes)
    saved, told = save_unrecorded(spec, parameters, raw, built.why_saved)
    live = {*names.values(), *(name for op in measured for name in op.outputs)}
    results = raw.output if isinstance(raw.output, tuple) else (raw.output,)
    refuse_taken_names(spec, training.names)
    return Graph(
        model=type(built.model).__name__,
        inputs=read_inputs(spec, training.binding.fields, names.values(), metas),
        parameters=parameters,
        modules={path: read_module(path, m, folder) for path, m in built.model.named_modules()},
        calls={key: finish_call(key, call, raw, known) for key, call in raw.calls.items()},
        ops=measured,
        values={name: meta for name, meta in metas.items() if name in live},
        outputs=tuple(zip(training.names, map(str, results), strict=True)),
        weight=tuple(name_of[field] for field in weight_fields(spec, training.binding)),
        canonical=canonical,
        names=read_names(raw, training),
        statements={n: replace(s, where=short(s.where, folder)) for n, s in raw.statements.items()},
        recompute=tuple(raw.checkpoints.paths),
        saved=saved,
        messages=messages + told + tuple(map(kept_checkpoint, raw.checkpoints.lone)),
    )


def name_inputs(raw: Raw, training: Training) -> dict[str, str]:
    """Traced input -> its field's name, unless a value, parameter or buffer has that."""
    taken = {*raw.values, *(name for name, _ in named_tensors(training.model)), *raw.constants}
    pairs = zip(raw.inputs, training.binding.fields, strict=True)
    return {old: new if new not in taken else old for old, new in pairs}


def refuse_taken_names(spec: Spec, names: Sequence[str]) -> None:
    """Raises CaptureError for a metric that the log calls something else by."""
    for name in names[1:]:
        if name in ("step", "lr", "norm", "gradient_norm") or name.endswith("_per_second"):
            raise CaptureError(
                f"the loss gives a metric called {name}, which means something else in the log",
                spec.at("model.loss"),
                f"give it another name, such as mean_{name}",
            )


def kept_checkpoint(where: Location | None) -> str:
    """A word on a checkpoint for which no module stands."""
    return f"{where}: this checkpoint calls no module: what it computes is kept for the backward"


def read_inputs(
    spec: Spec, fields: Iterable[str], names: Iterable[str], metas: Mapping[str, TensorMeta]
) -> tuple[Input, ...]:
    """The data's fields, under their names in the graph."""
    data = spec.data
    keys = sample_keys(data, first_sample(spec, data)) if isinstance(data, Dataset) else {}
    whole = whole_fields(data)
    return tuple(
        Input(name, field, metas[name], keys.get(field), whole=field in whole)
        for name, field in zip(names, fields, strict=True)
    )


def save_unrecorded(
    spec: Spec, parameters: Mapping[str, Parameter], raw: Raw, why: str
) -> tuple[bytes, tuple[str, ...]]:
    """First values that no recipe gives, from the real model, as a safetensors file; and a word."""
    names = [name for name, parameter in parameters.items() if parameter.recipe.saved]
    if not names:
        return b"", ()
    from safetensors.torch import save

    model = dict(state_tensors(build_model(spec)))
    values = {
        name: (raw.constants[name] if name in raw.constants else model[name]) for name in names
    }
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    why = (
        f"the factory cannot be recorded, {why}"
        if why
        else "they come from arrays, generators or complex numbers that no script draws again"
    )
    message = f"the first values of {listed} are in weights.safetensors, beside the scripts: {why}"
    for name, value in values.items():
        if value.dtype is torch.complex128:
            raise CaptureError(
                f"no file of weights holds complex128, and {name} is drawn as such",
                spec.at("model.factory"),
                "torch.complex(torch.randn(...), torch.randn(...)), which a script repeats",
            )
    copies = {name: value.detach().clone().contiguous() for name, value in values.items()}
    return save(copies), (message,)


def read_names(raw: Raw, training: Training) -> dict[str, str]:
    """Names for the model's output, from the loss that takes it, and for metrics."""
    output = raw.calls["", 0].output
    named = isinstance(output, Ref) and training.loss is not returned_loss
    metrics = raw.output[1:] if isinstance(raw.output, tuple) else ()
    names = dict(zip(map(str, metrics), training.names[1:], strict=False))
    return names | ({output.name: output_name(training.loss)} if named else {})  # type: ignore[union-attr]


def short(where: str, folder: Path) -> str:
    """A place as people know it: relative to the spec, or to the folder that packages lie in."""
    path = where.rsplit("site-packages/", maxsplit=1)[-1]
    base = f"{folder.resolve()}/"
    return path.removeprefix(base) if path.startswith(base) else path


def rename(op: Op, known: Mapping[str, Arg], folder: Path) -> Op:
    """The op with the data's names for the inputs."""
    return replace(
        op,
        args=tuple(substitute(a, known) for a in op.args),
        kwargs=tuple((key, substitute(a, known)) for key, a in op.kwargs),
        views=tuple(str(known.get(name, name)) for name in op.views),
        mutates=tuple(str(known.get(name, name)) for name in op.mutates),
        where=short(op.where, folder),
    )


def read_aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Every name of a tied tensor -> all of its names, the first first."""
    groups: dict[int, list[str]] = {}
    named = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    for name, tensor in named:
        groups.setdefault(id(tensor), []).append(name)
    return {name: tuple(names) for names in groups.values() for name in names}


def read_parameters(built: Built, raw: Raw) -> dict[str, Parameter]:
    """Parameters, buffers and plain tensors of the model, then the large literals of forward.

    Plain tensors that forward does not read are left out: libraries keep results in such.
    """
    aliases = read_aliases(built.model)
    used = {str(ref) for op in raw.ops for ref in op.operands if isinstance(ref, State)}
    persistent = built.model.state_dict().keys()
    parameters = {}
    for name, tensor in state_tensors(built.model):
        if name not in aliases and name not in used:
            continue
        meta = TensorMeta(tuple(tensor.shape), dtype_name(tensor.dtype), tensor.requires_grad)
        parameters[name] = Parameter(
            name, meta, built.recipes[name], aliases.get(name, (name,))[1:],
            buffer=not isinstance(tensor, nn.Parameter),
            persistent=name in aliases and name in persistent,
        )  # fmt: skip
    for name, value in raw.constants.items():
        if name in used:
            meta = TensorMeta(tuple(value.shape), dtype_name(value.dtype))
            recipe = raw.recipes.get(name, Recipe(saved=True))
            parameters[name] = Parameter(name, meta, recipe, buffer=True, persistent=False)
    return parameters


def own_names(op: Op, aliases: Mapping[str, tuple[str, ...]]) -> Op:
    """Export reads every tied tensor by one of its names: read it by the one whose owner is around
    the op."""

    def own(argument: Arg) -> Arg:
        if isinstance(argument, State) and len(aliases.get(argument.fqn, ())) > 1:
            return State(closest(op.call[0], aliases[argument.fqn]))
        if isinstance(argument, tuple):
            return tuple(map(own, argument))
        return argument

    return replace(
        op, args=tuple(map(own, op.args)), kwargs=tuple((key, own(a)) for key, a in op.kwargs)
    )


def closest(path: str, names: tuple[str, ...]) -> str:
    """The name whose owner shares most of the path."""

    def shared(name: str) -> int:
        count = 0
        for a, b in zip(path.split("."), name.split(".")[:-1], strict=False):
            if a != b:
                break
            count += 1
        return count

    return max(names, key=shared)


def read_module(path: str, module: nn.Module, folder: Path) -> Module:
    """What emission needs to know of a module."""
    cls = type(module)
    return Module(
        path=path,
        cls=cls.__name__,
        where="" if cls.__module__.startswith("torch.") else short(defined_at(cls), folder),  # type: ignore[arg-type]  # types can be hashed
        children=tuple(name for name, _ in module.named_children()),
        parameters=tuple(name for name, _ in module.named_parameters(recurse=False)),
        buffers=tuple(name for name, _ in module.named_buffers(recurse=False)),
        constructor=known.leaves[path].constructor if path in known.leaves else constructor(module),
        sequential=isinstance(module, nn.Sequential) and cls.forward is nn.Sequential.forward,
        indexed=isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential),
        training=module.training,
    )


@cache  # finding a class parses its whole file
def defined_at(cls: type) -> str:
    """Where a class is defined, `file:line`; "" where that is not known."""
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return ""


def finish_call(key: CallId, call: RawCall, raw: Raw, known: Mapping[str, Arg]) -> Call:
    arguments = tuple((name, substitute(value, known)) for name, value in call.arguments)
    statement = raw.call_statements.get(key, 0)
    return Call(
        *key,
        arguments,
        call.positional,
        substitute(call.output, known),
        statement,
        raw.parents.get(key),
    )
