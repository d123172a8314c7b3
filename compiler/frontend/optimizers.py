"""The classes of torch.optim that a spec can name, and what torch would refuse of them.

Their arguments, with kinds and defaults, are those that schemas/spec.schema.json gives under the
class's name. torch is not imported: a test holds both to the installed one.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from ..ir.spec import Option, Spec
from .schema import definition, schema

classes: Mapping[str, str] = MappingProxyType(
    {
        name.lower(): name
        for name in (
            "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Muon", "NAdam",
            "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam",
        )
    }
)  # fmt: skip
"""The language's name -> torch's."""
left_out = frozenset(("params", "capturable", "differentiable"))
"""Arguments of torch's that no spec gives: scripts record no CUDA graph, and nothing goes back
through an update."""

Found = Iterator[tuple[str, str, str]]  # (path, message, hint)


def defaults(name: str) -> dict[str, Option]:
    """The arguments of a class by the language's name of it, with torch's defaults; None where
    torch decides."""
    rules: Mapping[str, Any] = schema()["$defs"][name]["properties"]
    own = [key for key in rules if key not in ("name", "params", "groups")]
    return {key: frozen(default_of(rules[key])) for key in own}


def default_of(rules: Mapping[str, Any]) -> Any:
    if "default" in rules or "$ref" not in rules:
        return rules.get("default")
    return definition(rules).get("default")


def frozen(value: Any) -> Option:
    """A list as a tuple."""
    result: Option = tuple(map(frozen, value)) if isinstance(value, list) else value
    return result


def spell_names(tree: Any) -> Any:
    """The tree of a spec with the optimizer's class as the schema spells it."""
    train = tree.get("train")
    form = train.get("optimizer") if isinstance(train, dict) else None
    if isinstance(form, str):
        return tree | {"train": train | {"optimizer": spell_name(form)}}
    if isinstance(form, dict) and isinstance(form.get("name"), str):
        named = form | {"name": spell_name(form["name"])}
        return tree | {"train": train | {"optimizer": named}}
    return tree


def spell_name(name: str) -> str:
    lower = name.lower()
    return lower if lower in classes or lower == "lbfgs" else name


def check_optimizer(spec: Spec) -> Found:
    """Arguments that do not go together, of each group with those of the optimizer."""
    form, place = spec.train.optimizer, "train.optimizer"
    if f"{place}.params" in spec.locations:
        hint = "groups: [{params: ..., weight_decay: 0}]"
        yield f"{place}.params", "params stands in a group; the optimizer has all the rest", hint
    own = list(option_faults(spec, place, form.options))
    yield from own
    for index, group in enumerate(form.groups):
        here = f"{place}.groups[{index}]"
        for key in ("name", "groups"):
            if f"{here}.{key}" in spec.locations:
                message = f"a group has no {key} of its own"
                yield f"{here}.{key}", message, f"leave {key} out"
        said = [message for _, message, _ in own]
        faults = option_faults(spec, here, {**form.options, **group.options})
        yield from (fault for fault in faults if fault[1] not in said)


def option_faults(spec: Spec, place: str, options: Mapping[str, Option]) -> Found:
    """What torch would refuse, or leave out without a word, when the script starts."""
    name, momentum = spec.train.optimizer.name, options.get("momentum", 0)
    dampening = options.get("dampening", 0)
    if name == "SGD" and options.get("nesterov"):
        if momentum == 0:
            yield f"{place}.nesterov", "nesterov needs momentum above 0", "momentum: 0.9"
        if dampening != 0:
            message = f"nesterov needs dampening 0; it is {dampening}"
            yield f"{place}.nesterov", message, "leave dampening out"
    if options.get("fused") and options.get("foreach"):
        yield f"{place}.fused", "fused and foreach do not go together", "keep fused or foreach"
    if name == "Adagrad" and options.get("fused") and spec.cluster.device.kind == "cuda":
        message = "torch 2.9, which the scripts may run with, has no fused Adagrad for GPUs"
        yield f"{place}.fused", message, "leave fused out, or foreach: true"
