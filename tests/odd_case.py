"""One odd model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Odd:
    forward: str
    init: str = ""
    before: str = ""
    args: str = "x"
    """Of forward."""
    fields: tuple[str, ...] = ()
    """Of the data, beside x and y: those of odd.more."""
