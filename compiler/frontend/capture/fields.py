"""What a sample of the data is made of, and how its fields reach the model and the loss."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import nn

from ...errors import CaptureError
from ...ir.graph import TensorMeta
from ...ir.spec import Arrays, Dataset, Factory, Random, Spec, Text, Tokens, whole_fields
from .arguments import dtype_name
from .arrays import read_arrays
from .build import seeded
from .loss import arguments, find_loss
from .loss_fields import feed_loss
from .padding import check_padding, fill_up
from .trees import tree_leaves
from .undivided import read_attributes
from .user import call, users_errors


@dataclass(frozen=True, slots=True)
class Binding:
    """Which fields feed the model, by position and by name, and which the loss."""

    positional: tuple[str, ...]
    keywords: Mapping[str, str]
    """Argument -> field."""
    loss: tuple[str, ...]
    """The loss gets the model's output, then these."""
    loss_keywords: Mapping[str, str]
    """Argument of the loss -> field, where one before it has a default and no field."""
    note: str = ""
    """What was chosen that the spec does not say."""
    whole: frozenset[str] = frozenset()
    """Fields without a batch dimension."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Every field in use, once, in the order in which the model and the loss take them."""
        model, loss = self.keywords.values(), (*self.loss, *self.loss_keywords.values())
        return tuple(dict.fromkeys((*self.positional, *model, *loss)))


def read_fields(spec: Spec) -> dict[str, TensorMeta]:
    """Shape and dtype of one sample's fields, and of those that are no samples'. Floats have the
    spec's precision."""
    if isinstance(spec.data, Text | Tokens):
        tokens = TensorMeta((spec.data.sequence,), "int64")
        return {"tokens": tokens, "labels": tokens}
    if isinstance(spec.data, Random):
        fields = {name: TensorMeta(f.shape, f.dtype) for name, f in spec.data.fields.items()}
    elif isinstance(spec.data, Arrays):
        fields = read_arrays(spec, spec.data)
    else:
        fields = read_sample(spec, spec.data)
    floats = "float64" if spec.train.precision == "fp64" else "float32"
    return {
        name: TensorMeta(meta.shape, floats if is_float(meta.dtype) else meta.dtype)
        for name, meta in fields.items()
    }


def is_float(dtype: str) -> bool:
    return getattr(torch, dtype).is_floating_point  # type: ignore[no-any-return]


def make_dataset(data: Dataset, spec: Spec) -> object:
    """The user's dataset."""
    return call(Factory(target=data.source, args=data.args), spec.folder, spec.at("data.source"))


def read_sample(spec: Spec, data: Dataset) -> dict[str, TensorMeta]:
    """The fields of a dataset, from its first sample, filled up where the spec says so."""
    where, sample = spec.at("data.source"), first_sample(spec, data)
    keys = sample_keys(data, sample)
    whole = read_attributes(spec, data, make_dataset(data, spec)) if data.whole else {}
    tensors = {
        name: torch.as_tensor(sample if key is None else sample[key])  # type: ignore[index]
        for name, key in keys.items()
    }
    check_padding(spec, data, tensors)
    for name, value in data.pad.items():
        with users_errors(where, f"{data.source}: {name} of sample 0"):
            tensors[name] = fill_up(tensors[name], value, data.length or 0)
    tensors |= whole
    return {name: TensorMeta(tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items()}


def first_sample(spec: Spec, data: Dataset) -> object:
    """Sample 0. Raises CaptureError where it cannot be taken apart as the spec says."""
    where = spec.at("data.source")
    dataset = make_dataset(data, spec)
    sample, again = (read_first(spec, data, dataset) for _ in range(2))
    if not same(sample, again):
        raise CaptureError(
            f"sample 0 of {data.source} is another when it is read again, with the same seed: each "
            "rank reads on its own, so they would train on different samples",
            where,
            "keep no count of what was read; draw from torch, random or numpy.random, which are "
            "seeded for each sample, not from a generator of its own",
        )
    if not isinstance(sample, Mapping):
        count = len(sample) if isinstance(sample, tuple | list) else 1
        if count != len(data.fields):
            raise CaptureError(
                f"a sample of {data.source} has {count} elements, "
                f"data.fields names {len(data.fields)}",
                spec.at("data.fields"),
                "data: {fields: [x, y]}, one name for each element",
            )
    return sample


def read_first(spec: Spec, data: Dataset, dataset: object) -> object:
    """Sample 0 as it is drawn with the spec's seed."""
    where = spec.at("data.source")
    with users_errors(where, f"{data.source}: reading sample 0 failed"), seeded(spec.train.seed):
        return copy.deepcopy(dataset[0])  # type: ignore[index]


def same(one: object, other: object) -> bool:
    """Whether two samples hold equal numbers; not a number equals itself."""
    leaves = zip(tree_leaves(one), tree_leaves(other), strict=False)
    pairs = [(torch.as_tensor(a), torch.as_tensor(b)) for a, b in leaves]
    return all(
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())  # noqa: PLR0124
        for a, b in pairs
    )


def sample_keys(data: Dataset, sample: object) -> dict[str, int | str | None]:
    """Field -> where a sample has it; None for a sample that is the field itself."""
    if isinstance(sample, Mapping):
        return {str(key): str(key) for key in sample}
    if isinstance(sample, tuple | list):
        return {name: index for index, name in enumerate(data.fields)}
    return {data.fields[0]: None}


def bind(spec: Spec, model: nn.Module, fields: Mapping[str, TensorMeta]) -> Binding:
    """Decide which argument each field feeds: as model.inputs says, else by name; the one argument
    and the one field that are left over belong together."""
    forward = Signature.of(model)
    taken = None if spec.model.loss == "output" else arguments(find_loss(spec))
    note = ""
    positional: tuple[str, ...] = ()
    keywords: dict[str, str] = {}
    if spec.model.inputs:
        positional = tuple(i.field for name, i in spec.model.inputs if name is None)
        keywords = {name: i.field for name, i in spec.model.inputs if name is not None}
    elif forward.by_position or forward.by_name:
        keywords, note = match(spec, forward, fields, taken)
        alone = forward.by_position[:1] if note and len(keywords) == 1 else ()
        first = takewhile(keywords.__contains__, forward.only_by_position or alone)
        positional = tuple(keywords.pop(name) for name in tuple(first))
    elif forward.any_position:
        positional = tuple(fields)[: None if taken is None else 1]
    else:  # nothing but **kwargs
        keywords = {name: name for name in tuple(fields)[: None if taken is None else 1]}
    used = {*positional, *keywords.values()}
    rest = [name for name in fields if name not in used]
    loss, named = ((), {}) if taken is None else feed_loss(spec, taken, rest)
    whole = frozenset(whole_fields(spec.data))
    binding = Binding(positional, keywords, loss, named, note, whole)
    check_binding(spec, binding, fields, forward)
    return binding


def match(
    spec: Spec,
    forward: "Signature",
    fields: Mapping[str, TensorMeta],
    taken: Sequence[inspect.Parameter] | None,
) -> tuple[dict[str, str], str]:
    """Argument -> field, and a word on what has no name to go by. `taken`: the loss's arguments.

    Raises CaptureError where several arguments or fields are left over.
    """
    names = dict.fromkeys((*forward.by_position, *forward.by_name))
    found = {name: name for name in names if name in fields}
    needed = forward.required if found or forward.required else tuple(names)[:1]
    missing = [name for name in needed if name not in found]
    free = [name for name in fields if name not in found]
    free = [name for name in free if name not in claimed(taken or (), free)]
    if not missing:
        return found, ""
    if len(missing) > 1 or len(free) != 1:
        raise CaptureError(
            f"forward needs {', '.join(missing)}; the data's fields are {', '.join(fields)}",
            spec.at("model.inputs"),
            f"model: {{inputs: {{{', '.join(f'{name}: FIELD' for name in (*found, *missing))}}}}}",
        )
    (argument,), (field,) = missing, free
    note = (
        f"the field {field} feeds forward's {argument}, as both are left over; to say so: "
        f"model: {{inputs: {{{argument}: {field}, ...}}}}"
    )
    return found | {argument: field}, note


def claimed(taken: Sequence[inspect.Parameter], fields: Sequence[str]) -> set[str]:
    """Fields that a loss takes: those of its arguments' names, and the last for what else it must
    have."""
    named = {p.name for p in taken if p.name in fields}
    others = [name for name in fields if name not in named]
    count = sum(p.default is p.empty and p.name not in named for p in taken)
    return named | set(others[max(0, len(others) - count) :])


@dataclass(frozen=True, slots=True)
class Signature:
    """What a model's forward takes."""

    by_position: tuple[str, ...]
    by_name: tuple[str, ...]
    only_by_position: tuple[str, ...]
    required: tuple[str, ...]
    any_position: bool
    """It takes `*args`."""
    any_name: bool
    """It takes `**kwargs`."""

    @classmethod
    def of(cls, model: nn.Module) -> "Signature":
        parameters = inspect.signature(model.forward).parameters.values()
        either = inspect.Parameter.POSITIONAL_OR_KEYWORD
        kinds = {p.kind for p in parameters}
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        return cls(
            by_position=tuple(p.name for p in named if p.kind in (p.POSITIONAL_ONLY, either)),
            by_name=tuple(p.name for p in named if p.kind in (p.KEYWORD_ONLY, either)),
            only_by_position=tuple(p.name for p in named if p.kind is p.POSITIONAL_ONLY),
            required=tuple(p.name for p in named if p.default is p.empty),
            any_position=inspect.Parameter.VAR_POSITIONAL in kinds,
            any_name=inspect.Parameter.VAR_KEYWORD in kinds,
        )


def check_binding(
    spec: Spec, binding: Binding, fields: Mapping[str, TensorMeta], forward: Signature
) -> None:
    """Every field exists; every argument exists; every argument that forward must have is fed."""
    where, hint = spec.at("model.inputs"), "model: {inputs: {argument: field, ...}}"
    unknown = [field for field in binding.fields if field not in fields]
    if unknown:
        raise CaptureError(
            f"the data has no field {unknown[0]!r}; it has {', '.join(fields)}", where, hint
        )
    taken = forward.by_position[: len(binding.positional)]
    missing = [n for n in forward.required if n not in taken and n not in binding.keywords]
    if missing:
        raise CaptureError(
            f"forward needs {', '.join(missing)}; the data's fields are {', '.join(fields)}",
            where,
            hint,
        )
    strange = [n for n in binding.keywords if n not in forward.by_name and not forward.any_name]
    if strange or (len(binding.positional) > len(taken) and not forward.any_position):
        given = repr(strange[0]) if strange else f"{len(binding.positional)} inputs by position"
        accepted = ", ".join(dict.fromkeys((*forward.by_position, *forward.by_name)))
        raise CaptureError(f"forward does not take {given}; it takes {accepted}", where, hint)
    for name, declared in spec.model.inputs:
        meta = fields[declared.field]
        if declared.shape is not None and tuple(declared.shape[1:]) != meta.shape:
            raise CaptureError(
                f"input {name} is declared {declared.shape}, the data gives {meta} a sample",
                where,
                "leave shape out: the data tells it",
            )
