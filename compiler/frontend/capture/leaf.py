"""How to build torch's own modules again: read off the instance, rebuilt, compared, never trusted.

`nn.Linear(128, 384, bias=False)` comes out with only those arguments that differ from the defaults.
What does not rebuild to an equal module is no leaf, and is lifted as a class.
"""

import inspect
import re
from collections.abc import Mapping
from functools import cache

import torch
from torch import nn

from ...ir.graph import Constructor
from .arguments import dtype_name, to_arg

containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
ignored_attributes = frozenset(("_parameters", "_buffers", "_modules", "training", "inplace"))
variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
rnn_arguments = (
    "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional",
)  # fmt: skip


def constructor(module: nn.Module) -> Constructor | None:
    """How to build an equal module; None where that cannot be shown."""
    cls = type(module)
    if getattr(nn, cls.__name__, None) is not cls or isinstance(module, containers):
        return None
    if "forward" in vars(module):
        return None
    arguments = read_arguments(module)
    if arguments is None:
        return None
    for name, value in arguments.items():  # (3, 3) -> 3
        if (
            isinstance(value, tuple)
            and value
            and len(set(value)) == 1
            and builds(module, {**arguments, name: value[0]})
        ):
            arguments = {**arguments, name: value[0]}
    if not builds(module, arguments):
        return None
    needed = required(cls)
    for name in [name for name in arguments if name not in needed]:
        fewer = {key: value for key, value in arguments.items() if key != name}
        if builds(module, fewer):
            arguments = fewer
    try:
        written = {name: to_arg(value, lambda _: None) for name, value in arguments.items()}
    except TypeError:  # a tensor or a function
        return None
    keywords = tuple((name, value) for name, value in written.items() if name not in needed)
    return Constructor(f"nn.{cls.__name__}", tuple(written[name] for name in needed), keywords)


@cache
def required(cls: type[nn.Module]) -> tuple[str, ...]:
    """Arguments without a default."""
    if issubclass(cls, nn.RNNBase):
        return rnn_arguments[:2]
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.default is p.empty and p.kind not in variable)


def read_arguments(module: nn.Module) -> dict[str, object] | None:
    """The constructor's arguments, from the attributes of the same names."""
    cls = type(module)
    if isinstance(module, nn.RNNBase):
        own = {"LSTM": "proj_size", "RNN": "nonlinearity"}.get(cls.__name__)
        names = [*rnn_arguments, *([own] if own else [])]
    else:
        parameters = inspect.signature(cls).parameters
        names = [name for name, p in parameters.items() if p.kind not in variable]
    arguments: dict[str, object] = {}
    for name in names:
        if name.startswith("_") or name in ("device", "dtype", "inplace"):
            continue
        if name == "bias" and not isinstance(getattr(module, "bias", None), bool):
            bias = (
                getattr(module, "bias", None)
                if hasattr(module, "bias")
                else getattr(module, "in_proj_bias", None)
            )
            arguments[name] = bias is not None
        elif name == "add_bias_kv":
            arguments[name] = getattr(module, "bias_k", None) is not None
        elif hasattr(module, name):
            arguments[name] = getattr(module, name)
        elif name in required(cls):  # type: ignore[arg-type]  # classes are hashable
            return None
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()} - {
        torch.get_default_dtype()
    }
    return arguments | ({"dtype": dtypes.pop()} if dtypes else {})


def builds(module: nn.Module, arguments: Mapping[str, object]) -> bool:
    """Whether the arguments build an equal module."""
    try:
        built = build(type(module), tuple(arguments.items()), torch.get_default_dtype())  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001  # any complaint of the constructor means no
        return False
    return describe(built) == describe(module, vars(built))


@cache
def build(
    cls: type[nn.Module], arguments: tuple[tuple[str, object], ...], _: torch.dtype
) -> nn.Module:
    with torch.device("meta"):
        return cls(**dict(arguments))


def describe(module: nn.Module, keys: Mapping[str, object] | None = None) -> tuple[object, ...]:
    """All that makes two modules equal but the values of their tensors. `keys`: the attributes that
    count (libraries put further ones on every module)."""
    counted = keys if keys is not None else vars(module)
    attributes = {
        name: repr(value)
        for name, value in vars(module).items()
        if name in counted
        and name not in ignored_attributes
        and not name.startswith("_flat_weight_refs")
        and name != "_flat_weights"
    }
    children = [(name, type(child)) for name, child in module.named_children()]
    tensors = [(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in module.named_parameters()]
    tensors += [(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in module.named_buffers()]
    return (
        attributes,
        children,
        tensors,
        re.sub(r"(, )?inplace(=\w+)?", "", module.extra_repr()),
    )
