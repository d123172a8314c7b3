"""Modules that the model holds under several names are in a graph under their first: `a`, where
nn.Sequential(self.a, ...) calls it too. A class of that Sequential would have to hold what is
outside of it, so its call is dissolved: what it runs stands where it was called."""

from collections.abc import Iterator
from dataclasses import replace

from ...ir.graph import CallId
from .canonical import calls_around
from .raw import Raw


def dissolve_borrowers(raw: Raw) -> Raw:
    """After: whatever a call runs lies inside its module, by name."""
    gone = {call for inner in raw.parents for call in borrowers(inner, raw)}
    if not gone:
        return raw

    def kept(call: CallId) -> CallId:
        return next((outer for outer in calls_around(call, raw) if outer not in gone), ("", 0))

    return replace(
        raw,
        ops=[replace(op, call=kept(op.call)) for op in raw.ops],
        calls={call: noted for call, noted in raw.calls.items() if call not in gone},
        parents={c: kept(parent) for c, parent in raw.parents.items() if c not in gone},
    )


def borrowers(call: CallId, raw: Raw) -> Iterator[CallId]:
    """The calls around a call whose modules do not have its module inside, by name."""
    for outer in calls_around(call, raw)[1:]:
        if outer[0] and not call[0].startswith(f"{outer[0]}."):
            yield outer
