"""A YAML file -> plain Python values, and the place of each of them.

YAML 1.2's core types only: `3e-4` is a number, `no` is text. Tags that would build an object are
refused, and aliases are followed only up to a limit. What is wrong with one value does not hide
what is wrong with the next: complaints are collected.
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import MaxDepthExceededError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from ..errors import Location, SpecError

max_bytes, max_depth, max_values = 1 << 20, 64, 100_000

core_tag = "tag:yaml.org,2002:"
numbers_and_words = {"null", "bool", "int", "float"}
unclosed = ("while parsing a flow mapping", "while parsing a flow sequence", "end of stream")
remedies: Mapping[str, str] = MappingProxyType(  # words of ruamel.yaml -> what to do
    {
        "another document": "a file holds one spec: give the other a file of its own",
        "undefined alias": "write the value itself, or mark it with & and this name further up",
        "escape character": "write two backslashes for one, or single quotes around the text",
        "cannot start any token": "put the text in quotes",
        "mapping values": "indent the keys of a mapping alike; put text with ': ' in quotes",
        "block": "indent the keys of a mapping, or the items of a list, alike",
    }
)
otherwise = "look at the indentation, the brackets and the quotes here and in the line above"

text_like = {"str", "timestamp", "merge", "value"}  # YAML 1.2's core schema has no dates and no <<


@dataclass(frozen=True, slots=True)
class Complaint:
    """An error and the dotted path of what it is about."""

    path: str
    error: SpecError


@dataclass(frozen=True, slots=True)
class Document:
    """What a YAML file holds."""

    file: str
    tree: Any
    """None, bool, int, float, str, list, or dict with str keys."""
    locations: Mapping[str, Location]
    """Dotted path -> place of the key or list item."""
    complaints: tuple[Complaint, ...]


def dotted(parts: Iterable[str | int]) -> str:
    """A path as people write it: `parallel.cuts[1]`."""
    steps = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return "".join(steps).removeprefix(".")


def within(path: str, key: str) -> str:
    """The path of a key of the mapping at `path`."""
    return f"{path}.{key}" if path else key


def read_document(path: Path) -> Document:
    """Raises SpecError where the file cannot be read, or is no YAML at all."""
    text = read_text(path)
    root, yaml = compose(text, str(path))
    if root is None:
        raise SpecError(
            "the file is empty", Location(str(path)), "`ppc init` writes a spec to start from"
        )
    builder = Builder(str(path), yaml)
    tree = builder.build(root, "")
    return Document(str(path), tree, builder.locations, tuple(builder.complaints))


def read_text(path: Path) -> str:
    where = Location(str(path))
    try:
        if path.is_dir():
            raise SpecError("is a folder, not a spec", where, "name a YAML file in it")
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        hint = "name a YAML file that is there and may be read; `ppc init` writes one"
        raise SpecError(f"cannot be read: {reason.lower()}", where, hint) from None
    if len(content) > max_bytes:
        hint = "a spec takes a few kB; put long lists of files into a pattern"
        raise SpecError(f"is larger than {max_bytes} bytes", where, hint)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"is not UTF-8 text: byte {content[error.start]:#04x} at {error.start}"
        hint = "save the file as UTF-8"
        raise SpecError(message, Location(str(path), line), hint) from None


def compose(text: str, file: str) -> tuple[Node | None, YAML]:
    """The tree of YAML nodes; the YAML object knows how to read their scalars."""
    yaml = YAML(typ="safe", pure=True)
    yaml.max_depth = max_depth
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an anchor may be given anew
            root = yaml.compose(text)
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"YAML forbids the character U+{error.character:04X}"
        raise SpecError(message, Location(file, line), "leave it out") from None
    except MaxDepthExceededError as error:
        where = Location(file, error.problem_mark.line + 1, error.problem_mark.column + 1)
        message = f"the spec is nested deeper than {max_depth} levels"
        raise SpecError(message, where, "close each bracket that you open") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = Location(file, mark.line + 1, mark.column + 1) if mark else Location(file)
        message = f"not YAML: {reason_of(error)}"
        raise SpecError(message, where, remedy_for(error, text, where)) from None
    except (YAMLError, ValueError) as error:
        raise SpecError(f"not YAML: {reason_of(error)}", Location(file), otherwise) from None
    if yaml.resolver.processing_version != (1, 2):
        hint = "leave the %YAML line out"
        raise SpecError("a spec is written in YAML 1.2", Location(file, 1), hint)
    return root, yaml


def reason_of(error: Exception) -> str:
    if isinstance(error, MarkedYAMLError):
        parts = [part for part in (error.context, error.problem) if part]
        return ", ".join(part.strip().splitlines()[0] for part in parts)
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def remedy_for(error: MarkedYAMLError, text: str, where: Location) -> str:
    lines = text.splitlines()
    if where.line and where.line <= len(lines) and "\t" in lines[where.line - 1]:
        return "indent with spaces, not tabs"
    reason, opened = reason_of(error), error.context_mark
    if opened and any(words in reason for words in unclosed):
        return f"close the {text[opened.index]} of line {opened.line + 1}"
    return next((remedy for words, remedy in remedies.items() if words in reason), otherwise)


@dataclass(slots=True)
class Builder:
    """Walks the nodes once."""

    file: str
    yaml: YAML
    locations: dict[str, Location] = field(default_factory=dict)
    complaints: list[Complaint] = field(default_factory=list)
    values: int = 0
    depth: int = 0

    def complain(self, node: Node, path: str, message: str, hint: str) -> None:
        error = SpecError(message, self.place(node), hint)
        self.complaints.append(Complaint(path, error))

    def place(self, node: Node) -> Location:
        return Location(self.file, node.start_mark.line + 1, node.start_mark.column + 1)

    def build(self, node: Node, path: str) -> Any:
        self.values += 1
        self.depth += 1
        if self.values > max_values or self.depth > max_depth:
            limit = f"{max_values} values" if self.values > max_values else f"{max_depth} levels"
            hint = "an alias (*name) repeats all that it stands for"
            raise SpecError(f"with its aliases, the spec has over {limit}", self.place(node), hint)
        tag = (node.tag or "").removeprefix(core_tag)
        value = None
        if isinstance(node, ScalarNode):
            value = self.build_scalar(node, tag, path)
        elif isinstance(node, MappingNode) and tag == "map":
            value = self.build_mapping(node, path)
        elif isinstance(node, SequenceNode) and tag == "seq":
            value = self.build_sequence(node, path)
        else:
            self.refuse_tag(node, tag, path)
        self.depth -= 1
        return value

    def build_scalar(self, node: ScalarNode, tag: str, path: str) -> Any:
        if tag in text_like:
            return self.build_text(node, path)
        if tag not in numbers_and_words:
            return self.refuse_tag(node, tag, path)
        try:
            return self.yaml.constructor.construct_object(node)
        except (ValueError, LookupError, YAMLError):
            message = f"{node.value[:40]!r} is no {tag}"
            self.complain(node, path, message, "put it in quotes if it is text")

    def build_text(self, node: ScalarNode, path: str) -> str | None:
        """The text, two halves of a character joined: JSON escapes one beyond U+FFFF by two."""
        try:
            return str(node.value).encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            message = f"{ascii(node.value)[:60]} has half a character"
            hint = "leave it out; the other half is a \\u of its own"
            self.complain(node, path, message, hint)
            return None

    def refuse_tag(self, node: Node, tag: str, path: str) -> None:
        name = tag if tag.startswith("!") else f"!!{tag}"
        hint = "write plain numbers, text, lists and mappings"
        self.complain(node, path, f"the tag {name} is not allowed in a spec", hint)

    def build_mapping(self, node: MappingNode, path: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key_node, ScalarNode) or (
                (key_node.tag or "").removeprefix(core_tag) not in text_like
            ):
                written = key if isinstance(key, str) else "a list or mapping"
                self.complain(
                    key_node, path, f"the key {written} is not text", "put the key in quotes"
                )
                continue
            key = self.build_text(key_node, path)
            if key is None:
                continue
            place = within(path, key)
            if key in result:
                first = self.locations[place]
                message = f"{place} is given twice, first in line {first.line}"
                self.complain(key_node, place, message, "keep one of them")
                continue
            self.locations[place] = self.place(key_node)
            result[key] = self.build(value_node, place)
        return result

    def build_sequence(self, node: SequenceNode, path: str) -> list[Any]:
        result = []
        for index, item in enumerate(node.value):
            self.locations[f"{path}[{index}]"] = self.place(item)
            result.append(self.build(item, f"{path}[{index}]"))
        return result
