"""Classes that differ in numbers only become one class whose arguments those numbers are.

A draft is a class's text with its numbers marked. Drafts of the same user's class with the same
text around their numbers are one class; a number that is equal in all of them stays where it is.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .body import Line
from .expression import Expr, call, marked, number, plain
from .scope import clean


@dataclass(frozen=True, slots=True)
class Draft:
    """One instance of a class."""

    path: str
    cls: str
    where: str
    init: tuple[str, ...]
    """Statements of __init__ after super().__init__()."""
    arguments: tuple[str, ...]
    """Of forward."""
    forward: tuple[Line, ...]
    base: str

    @property
    def texts(self) -> tuple[str, ...]:
        return (*self.init, *(line.text for line in self.forward))

    @property
    def skeleton(self) -> tuple[object, ...]:
        """All but the numbers."""
        bare = tuple(marked.sub("#", text) for text in self.texts)
        return self.cls, bare, self.arguments, tuple(line.indent for line in self.forward)

    @property
    def numbers(self) -> tuple[tuple[str, str], ...]:
        """(value, hint) of each number, in order."""
        return tuple(match.groups() for text in self.texts for match in marked.finditer(text))  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class Class:
    """A class as it is written."""

    name: str
    where: str
    parameters: tuple[str, ...]
    """Arguments of __init__."""
    init: tuple[str, ...]
    arguments: tuple[str, ...]
    forward: tuple[Line, ...]
    base: str
    given: str = ""
    """What the base's __init__ is given."""


def unify(drafts: Sequence[Draft], taken: Iterable[str]) -> tuple[list[Class], dict[str, Expr]]:
    """The classes of some drafts, and how to make each draft's instance, by path."""
    groups: dict[tuple[object, ...], list[Draft]] = {}
    for draft in drafts:
        groups.setdefault(draft.skeleton, []).append(draft)
    names, classes, instances = set(taken), [], {}
    for members in groups.values():
        name = free_name(members[0], names)
        names.add(name)
        columns = list(zip(*(draft.numbers for draft in members), strict=True))
        varying = choose_parameters(columns)
        classes.append(make_class(name, members[0], varying))
        for i, draft in enumerate(members):
            parameters = dict.fromkeys(varying.values())
            for position, parameter in varying.items():
                parameters[parameter] = number(parse(columns[position][i][0]), parameter).text
            instances[draft.path] = call(name, [str(text) for text in parameters.values()])
    return classes, instances


def parse(text: str) -> int | float:
    if text.startswith("float("):  # inf, which has no literal
        return float(text.removeprefix('float("').removesuffix('")'))
    return int(text) if text.lstrip("-").isdigit() else float(text)


def free_name(draft: Draft, taken: set[str]) -> str:
    """The user's class name; with the attribute's name where it means two things here."""
    cls = clean(draft.cls)
    if cls not in taken:
        return cls
    role = next((part for part in reversed(draft.path.split(".")) if not part.isdigit()), "")
    name = clean(cls + "".join(word.capitalize() for word in role.split("_")))
    count = 2
    while name in taken:
        name, count = f"{cls}{count}", count + 1
    return name


def choose_parameters(columns: Sequence[Sequence[tuple[str, str]]]) -> dict[int, str]:
    """Position of each number that differs -> the argument it becomes; numbers that agree in all
    drafts share one."""
    names: dict[tuple[str, ...], str] = {}
    chosen: dict[int, str] = {}
    for position, column in enumerate(columns):
        values = tuple(value for value, _ in column)
        if len(set(values)) == 1:
            continue
        if values not in names:
            hint = column[0][1] or "size"
            same = sum(1 for name in names.values() if name.rstrip("0123456789_") == hint)
            names[values] = f"{hint}_{same + 1}" if same else hint
        chosen[position] = names[values]
    return chosen


def make_class(name: str, draft: Draft, varying: Mapping[int, str]) -> Class:
    """The text with arguments in the place of the numbers that differ."""
    count = iter(range(len(draft.numbers)))
    used_in_forward: list[str] = []

    def fill(text: str, prefix: str) -> str:
        def one(match: re.Match[str]) -> str:
            parameter = varying.get(next(count))
            if parameter is None:
                return str(match[1])
            if prefix:
                used_in_forward.append(parameter)
            return prefix + parameter

        return marked.sub(one, text)

    init = [fill(text, "") for text in draft.init]
    forward = tuple(replace(line, text=fill(line.text, "self.")) for line in draft.forward)
    kept = [f"self.{parameter} = {parameter}" for parameter in dict.fromkeys(used_in_forward)]
    parameters = tuple(dict.fromkeys(varying.values()))
    lines = (*kept, *init)
    return Class(name, draft.where, parameters, lines, draft.arguments, forward, draft.base)


def whole(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Lines with their numbers written out."""
    return tuple(replace(line, text=plain(line.text)) for line in lines)
