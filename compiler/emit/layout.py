"""Lines of at most 100 columns, laid out as ruff formats them.

What ppc writes is a name, a literal, a call or a chain of operators, after a target or a keyword.
Where a person would sooner name a part than see it opened, `fits` says no.
"""

import re
from collections.abc import Iterator

width = 100
token = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|.', re.DOTALL)
target = re.compile(
    r"return |if |elif |for [^()]+? in |"
    r"(?:[^=\"']|\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|\([^=\"']*\))+? = "
)
item_head = re.compile(r"\w+=(?!=)|lambda \w+: |[^:{[]+?: ")
clauses = re.compile(r" (?=for |if )")
operators = (
    re.compile(r" (?=(?:in|==|!=|<|<=|>|>=) )"), re.compile(r" (?=\| )"), re.compile(r" (?=\^ )"),
    re.compile(r" (?=& )"), re.compile(r" (?=[-+] )"), re.compile(r" (?=(?:\*|/|//|%|@) )"),
)  # fmt: skip
"""Before each operator; loosest first."""


def outline(text: str) -> str:
    """The text with all that strings and brackets hold blanked out."""
    depth, result = 0, ""
    for part in token.findall(text):
        depth -= part in tuple(")]}")
        shown = part if depth == 0 and len(part) == 1 else "." * len(part)
        depth += part in tuple("([{")
        result += shown
    return result


def split_top(text: str, at: str | re.Pattern[str] = ", ") -> list[str]:
    """Split at separators outside of all brackets and strings."""
    matches = re.finditer(re.escape(at) if isinstance(at, str) else at, outline(text))
    parts, start = [], 0
    for match in matches:
        parts.append(text[start : match.start()])
        start = match.end()
    return [*parts, text[start:]]


def terms(text: str) -> list[str]:
    """The operands of the loosest operators, each but the first after its operator."""
    found = (split_top(text, operator) for operator in operators)
    return next((parts for parts in found if len(parts) > 1), [text])


def last_bracket(text: str) -> int:
    """Where the bracket opens that the text's last character closes; -1 where it closes none or
    holds nothing."""
    shown = outline(text)
    opening = max(map(shown.rfind, "([{")) if shown.endswith((")", "]", "}")) else -1
    return opening if opening < len(text) - 2 else -1


def wrap(text: str, indent: int) -> Iterator[str]:
    """A statement as lines: whole if it fits, else its last brackets opened, or parentheses put
    around its right side."""
    if indent + len(text) <= width:
        yield " " * indent + text
        return
    found = target.match(text)
    before = found[0] if found else ""
    names = before.removesuffix(" = ")
    if len(names) < len(before) and indent + len(before) >= width and "," in outline(names):
        *lines, before = opened(f"({names})", 0, indent, "", " = ")  # a tuple too long itself
        yield from lines
        before = before[indent:]
    colon = ":" if text.endswith(":") else ""
    right = text[found.end() if found else 0 :].removesuffix(":")
    if len(split_top(right)) > 1:  # a tuple without brackets
        yield from opened(f"({right})", 0, indent, before, "")
        return
    opening = last_bracket(right)
    opens = 0 <= opening < width - indent - len(before)
    count = len(terms(right))
    if indent + len(before + right + colon) <= width:
        yield " " * indent + before + right + colon
    elif opens and count < 3:
        yield from opened(right, opening, indent, before, colon)
    elif count > 1 or opening >= 0 or indent + 4 + len(right) <= width:
        yield from opened(f"({right})", 0, indent, before, colon)
    else:
        yield " " * indent + before + right + colon


def expression(text: str, indent: int, before: str = "", after: str = "") -> Iterator[str]:
    """An expression inside brackets as lines; `before` and `after` on the first and the last."""
    parts = terms(text)
    opening = last_bracket(text)
    if indent + len(before + text + after) <= width or (len(parts) == 1 and opening < 0):
        yield " " * indent + before + text + after
    elif len(parts) > 1:
        for i, part in enumerate(parts):
            first, last = i == 0, i == len(parts) - 1
            yield from expression(part, indent, before if first else "", after if last else "")
    else:
        yield from opened(text, opening, indent, before, after)


def opened(text: str, opening: int, indent: int, before: str, after: str) -> Iterator[str]:
    """A call or literal with what its last brackets hold on lines of their own."""
    yield " " * indent + before + text[: opening + 1]
    yield from inside(text[opening + 1 : -1], indent + 4, literal=is_literal(text[:opening]))
    yield " " * indent + text[-1] + after


def is_literal(before: str) -> bool:
    """Whether brackets after a text are a list, tuple, set or dict (or a def's), not a call's or an
    index's."""
    return before.startswith("def ") or not re.search(r"[\w\)\]\}\"']$", before)


def inside(text: str, indent: int, *, literal: bool) -> Iterator[str]:
    """What brackets hold: on one line, but for a literal of several; else a line for each item."""
    items = split_top(text.removesuffix(","))
    parts = split_top(text, clauses)
    single = len(items) == 1 and not text.endswith(",")
    if indent + len(text) <= width and (not literal or single or len(parts) > 1):
        yield " " * indent + text
    elif len(parts) > 1:
        for part in parts:
            yield from item(part, indent, "")
    else:
        for part in items:
            yield from item(part, indent, "" if single else ",")


def item(text: str, indent: int, comma: str) -> Iterator[str]:
    """One item: `value`, `key=value`, `"key": value`, `lambda n: value`, `for i in values`."""
    found = item_head.match(outline(text)) or target.match(outline(text))
    before = text[: found.end()] if found else ""
    yield from expression(text[len(before) :], indent, before, comma)


def fits(text: str, indent: int) -> bool:
    """Whether a statement's lines all fit when wrapped: one plain call at its end, no more."""
    if indent + len(text) <= width:
        return True
    found = target.match(text)
    right = text[found.end() :] if found else text
    plain = re.fullmatch(r"[\w.]+", right[: max(last_bracket(right), 0)])
    return bool(plain) and all(len(line) <= width for line in wrap(text, indent))
