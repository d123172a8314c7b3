"""Everything that can go wrong, as one tree:

PpcError             the user can mend it: message, place, hint
  SpecError          the spec is wrong; the place is in the YAML file
  CaptureError       the model cannot be captured; the place is the user's own source line
  PlanError          no plan fits; the place is the field that asks too much
  OutputError        a file cannot be written
  RunError           a run of the emitted scripts failed or differs from the user's model
  Complaints         several of these at once, in file order
InternalError        a verifier failed: a bug of ppc, shown with the pass and the printed forms

A complaint prints as its place, its message and, on a line of its own, what to write instead:

    specs/x.yaml:12:7: pipeline 3 x data 2 needs 6 devices; the cluster has 8
    hint: pipeline: 4
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a file: prints as `file:line:column`, as far as it is known."""

    file: str
    line: int | None = None
    """Counted from 1."""
    column: int | None = None
    """Counted from 1."""

    def __str__(self) -> str:
        parts = (visible(self.file), self.line, self.column)
        return ":".join(str(part) for part in parts if part is not None)


def visible(text: str, keep: str = "") -> str:
    """The text with escapes for characters that do not show, or that turn a line around: no name in
    a file can paint over a complaint, or continue a comment in a line of its own."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def nearest(locations: Mapping[str, Location], path: str) -> Location | None:
    """The place of the longest beginning of a dotted path that is there."""
    while path and path not in locations:
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return locations.get(path)


class PpcError(Exception):
    """A mistake that the user can mend: what is wrong, where, and what to write instead."""

    def __init__(
        self, message: str, where: Location | None = None, hint: str | None = None
    ) -> None:
        message, hint = visible(message, "\n\t"), visible(hint, "\n\t") if hint else hint
        super().__init__(message, where, hint)
        self.message, self.where, self.hint = message, where, hint

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        hint = f"\nhint: {self.hint}" if self.hint else ""
        return f"{place}{self.message}{hint}"


class SpecError(PpcError):
    """The spec is wrong."""

    def __init__(
        self, message: str, where: Location | None = None, hint: str | None = None
    ) -> None:
        super().__init__(visible(message), where, visible(hint) if hint else hint)


class CaptureError(PpcError):
    """The model cannot be captured."""


class PlanError(PpcError):
    """No plan fits."""


class OutputError(PpcError):
    """A file cannot be written."""


class RunError(PpcError):
    """A run of the emitted scripts failed, or differs from the user's model."""


class Complaints(PpcError):  # noqa: N818  # the plural says that it holds several
    """Several errors at once; prints them all, in the order given."""

    def __init__(self, errors: Iterable[PpcError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(map(str, self.errors)))

    def __reduce__(self) -> tuple[type["Complaints"], tuple[tuple[PpcError, ...]]]:
        return type(self), (self.errors,)


class InternalError(Exception):
    """A verifier failed: a bug of ppc, not the user's mistake, so it is no PpcError."""

    def __init__(
        self, message: str, pass_name: str = "", before: str = "", after: str = ""
    ) -> None:
        super().__init__(message, pass_name, before, after)
        self.message, self.pass_name, self.before, self.after = message, pass_name, before, after

    def __str__(self) -> str:
        heading = f"{self.pass_name}: {self.message}" if self.pass_name else self.message
        forms = (("before", self.before), ("after", self.after))
        return "\n".join([heading, *(f"--- {name}\n{form}" for name, form in forms if form)])
