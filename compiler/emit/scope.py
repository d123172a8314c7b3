"""Names of values in one function: the user's own where free, never one that is still read."""

import keyword
import re
from collections.abc import Mapping

reserved = frozenset(
    (
        *keyword.kwlist,
        "self",
        "torch",
        "nn",
        "F",
        "math",
        "device",
        "batch",
        "key",
        "seed_layer",
        "range",
        "str",
    )
)


class Scope:
    """Binds values to names while a function is written from top to bottom."""

    def __init__(self, last_use: Mapping[str, float]) -> None:
        self.last_use = last_use
        """Value -> position of its last reader."""
        self.names: dict[str, str] = {}
        self.bound: dict[str, str] = {}
        """Name -> the value that it holds now."""

    def bind(self, value: str, wanted: str, position: float) -> str:
        """Name a value from `position` on: as wanted, unless a value of that name is read later."""
        wanted = clean(wanted)
        name, count = wanted, 1
        while self.holds_other(name, position):
            count += 1
            name = f"{wanted}_{count}"
        self.names[value], self.bound[name] = name, value
        return name

    def holds_other(self, name: str, position: float) -> bool:
        held = self.bound.get(name)
        return held is not None and self.last_use.get(held, -1.0) > position

    def __getitem__(self, value: str) -> str:
        return self.names[value]

    def __contains__(self, value: str) -> bool:
        return value in self.names


def clean(name: str) -> str:
    """A name that Python takes and that means nothing else here."""
    name = re.sub(r"\W", "_", name) or "value"
    name = f"_{name}" if name[0].isdigit() else name
    return f"{name}_" if name in reserved else name
