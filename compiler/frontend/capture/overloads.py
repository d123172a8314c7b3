"""An operation's other forms: what writes nothing, for what writes in place or into a tensor."""

import torch

from .private import OpOverload, schema_of
from .recipe import full_overwrites

fillers = frozenset(target.split(".")[1] for target in full_overwrites)


def functional_form(target: str) -> str | None:
    """`aten.relu.default` for `aten.relu_.default`; None where none has equal arguments, and for
    what fills a tensor, since Python has no `x.exponential()`."""
    namespace, name, overload = target.split(".")
    if namespace != "aten" or not name.endswith("_") or name.startswith("__") or name in fillers:
        return None
    packet = getattr(torch.ops.aten, name.rstrip("_"), None)
    wanted = signature(getattr(getattr(torch.ops.aten, name), overload))
    overloads = packet.overloads() if packet is not None else ()
    found = (getattr(packet, other) for other in sorted(overloads, key=overload.__ne__))
    return next((str(function) for function in found if signature(function) == wanted), None)


def signature(function: OpOverload) -> list[tuple[str, str]]:
    """Names and types of an operation's arguments."""
    return [(a.name, str(a.type)) for a in schema_of(function).arguments]


def without_out(func: OpOverload) -> OpOverload | None:
    """`aten.div.Tensor` for `aten.div.out`, whose result goes to a tensor that is given."""
    makers = ("dtype", "layout", "device", "pin_memory")
    wanted = [a.name for a in schema_of(func).arguments if not a.is_out]
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        arguments = [a for a in schema_of(other).arguments if a.name not in makers]
        if [a.name for a in arguments] == wanted and not any(a.is_out for a in arguments):
            return other  # type: ignore[no-any-return]
    return None
