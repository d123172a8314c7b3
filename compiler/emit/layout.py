"""Lines of at most 100 columns, laid out as ruff formats them."""

from collections.abc import Iterator

width = 100


def split_top(text: str, separator: str = ", ") -> list[str]:
    """Split at separators outside of all brackets and strings."""
    parts, depth, start, quote = [], 0, 0, ""
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote and text[i - 1] != "\\" else quote
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif depth == 0 and text.startswith(separator, i):
            parts.append(text[start:i])
            start = i + len(separator)
    return [*parts, text[start:]]


def last_bracket(text: str) -> int:
    """Where the bracket opens that the text's last character closes; -1 where it closes none."""
    if not text or text[-1] not in ")]}":
        return -1
    depth = 0
    for i in range(len(text) - 1, -1, -1):
        depth += (text[i] in ")]}") - (text[i] in "([{")
        if depth == 0:
            return i
    return -1


def wrap(text: str, indent: int) -> Iterator[str]:
    """A statement as lines: whole if it fits, else its last brackets opened, their content on one
    line or one item a line. A statement that ends in no bracket stays whole."""
    space = " " * indent
    if indent + len(text) <= width:
        yield space + text
        return
    colon = ":" if text.endswith("):") else ""
    body = text.removesuffix(":") if colon else text
    opening = last_bracket(body)
    if opening < 0:
        yield space + text
        return
    head, content, tail = body[: opening + 1], body[opening + 1 : -1], body[-1] + colon
    yield space + head
    inner = indent + 4
    if inner + len(content) <= width and not content.endswith(","):
        yield " " * inner + content
    else:
        items = split_top(content.removesuffix(","))
        for item in items:
            yield from wrap_item(item, inner) if len(items) > 1 else wrap(item, inner)
    yield space + tail


def wrap_item(item: str, indent: int) -> Iterator[str]:
    """One item of an opened bracket, with its comma."""
    *lines, last = wrap(item, indent)
    yield from lines
    yield f"{last},"


def fits(text: str, indent: int) -> bool:
    """Whether a statement's lines all fit when wrapped: one call at its end, no more."""
    return all(len(line) <= width for line in wrap(text, indent)) and wraps_cleanly(text, indent)


def wraps_cleanly(text: str, indent: int) -> bool:
    """Whether ruff would open just the last brackets: the right side is a single plain call."""
    if indent + len(text) <= width:
        return True
    right = text.split(" = ", 1)[-1].removeprefix("return ")
    opening = last_bracket(right)
    head = right[:opening]
    return opening > 0 and all(char.isalnum() or char in "._" for char in head)
