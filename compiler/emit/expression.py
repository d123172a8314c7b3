"""Python expressions as text, with just the parentheses they need.

Numbers in them are marked, so that classes that differ in numbers only can share one text: see
`classes.py`. A marked number is `MARK value | hint MARK`.
"""

import math
import re
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

MARK = "\x00"
marked = re.compile(f"{MARK}([^|{MARK}]*)\\|([^{MARK}]*){MARK}")


class Level(IntEnum):
    """How tightly an expression binds; from Python's reference, loosest first."""

    LAMBDA = 0
    COMPARE = 1
    OR = 2
    XOR = 3
    AND = 4
    SHIFT = 5
    SUM = 6
    PRODUCT = 7
    UNARY = 8
    POWER = 9
    ATOM = 10


class Expr(NamedTuple):
    """Text and how tightly it binds."""

    text: str
    level: Level = Level.ATOM

    def within(self, level: Level) -> str:
        """The text, in parentheses where the place around it binds at least as tightly."""
        return self.text if self.level > level else f"({self.text})"

    def at_least(self, level: Level) -> str:
        """The text, in parentheses where the place around it binds more tightly."""
        return self.text if self.level >= level else f"({self.text})"


def number(value: complex, hint: str = "") -> Expr:
    """A number; `hint` names it, should it become an argument of a class."""
    if isinstance(value, bool | complex):
        return Expr(repr(value))
    finite = isinstance(value, int) or math.isfinite(value)
    text = repr(value) if finite else f'float("{value}")'
    level = Level.UNARY if text.startswith("-") else Level.ATOM
    return Expr(f"{MARK}{text}|{hint}{MARK}", level)


def plain(text: str) -> str:
    """The text with every marked number written out."""
    return marked.sub(lambda match: match[1], text)


def call(function: str, arguments: Sequence[str]) -> Expr:
    return Expr(f"{function}({', '.join(arguments)})")


def method(receiver: Expr, name: str, arguments: Sequence[str]) -> Expr:
    return Expr(f"{receiver.at_least(Level.ATOM)}.{name}({', '.join(arguments)})")


def binary(left: Expr, operator: str, right: Expr, level: Level) -> Expr:
    """`left operator right`; the operators used here associate to the left, `**` to the right."""
    if level in (Level.POWER, Level.COMPARE):
        return Expr(f"{left.within(level)} {operator} {right.within(level)}", level)
    return Expr(f"{left.at_least(level)} {operator} {right.within(level)}", level)


def unary(operator: str, operand: Expr) -> Expr:
    return Expr(f"{operator}{operand.at_least(Level.UNARY)}", Level.UNARY)


def subscript(receiver: Expr, index: str) -> Expr:
    return Expr(f"{receiver.at_least(Level.ATOM)}[{index}]")


def sequence(items: Sequence[Expr], brackets: str = "()") -> Expr:
    inner = ", ".join(item.text for item in items)
    comma = "," if brackets == "()" and len(items) == 1 else ""
    return Expr(f"{brackets[0]}{inner}{comma}{brackets[1]}")


def quote(text: str) -> str:
    """A string as Python, in the quotes that need fewer escapes; nothing in it can end it."""
    body = repr(f'"{text}')[2:-1]  # in single quotes, since it holds a double one
    if text.count('"') > text.count("'"):
        return f"'{body}'"
    swapped = {"\\'": "'", '"': '\\"'}
    body = re.sub(r'\\.|"', lambda part: swapped.get(part[0], part[0]), body)
    return f'"{body}"'
