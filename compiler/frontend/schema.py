"""The tree of a spec against schemas/spec.schema.json -> complaints in people's words.

What a value should be is the schema's `title`, what to write instead is the schema's `examples`:
the words stand beside the rule, and editors show the same ones.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import jsonschema
from jsonschema.exceptions import ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend

from ..errors import Location, SpecError, nearest
from .document import Complaint, dotted, within

# Words of the language's plan that no version admits yet: path -> what to do meanwhile.
planned: Mapping[str, str] = MappingProxyType(
    {
        "model.weights": "leave it out: the model's own initialisation is used",
        "train.optimizer.capturable": "leave it out: scripts record no CUDA graph",
        "train.optimizer.differentiable": "leave it out: nothing goes back through an update",
        "train.precision=fp16": "precision: bf16",
    }
)


@cache
def schema() -> dict[str, Any]:
    """The schema, read once."""
    text = (files("ppc.schemas") / "spec.schema.json").read_text(encoding="utf-8")
    result: dict[str, Any] = json.loads(text)
    return result


largest = 2**63 - 1
"""Whole numbers above it fit into no tensor."""


def is_integer(_: object, value: object) -> bool:
    """4.0 is no count of layers, though JSON schema says so."""
    return isinstance(value, int) and not isinstance(value, bool) and not is_huge(value)


def is_huge(value: object) -> bool:
    return isinstance(value, int) and abs(value) > largest


def is_number(_: object, value: object) -> bool:
    """Finite, and well within the range of a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


@cache
def validator() -> Validator:
    draft = jsonschema.Draft202012Validator
    types = draft.TYPE_CHECKER.redefine_many({"integer": is_integer, "number": is_number})
    rules = {"pattern": matches}
    made: Validator = extend(draft, rules, type_checker=types)(schema())  # type: ignore[no-untyped-call]  # its stub
    return made


def matches(_: Validator, pattern: str, value: object, __: object) -> Iterator[ValidationError]:
    """A pattern's `$` is the very end, as in JSON schema: Python's lets a line end follow."""
    end = r"\Z" if pattern.endswith("$") else ""
    if isinstance(value, str) and not re.search(pattern.removesuffix("$") + end, value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def validate(tree: Any, locations: Mapping[str, Location], file: str) -> list[Complaint]:
    """Everything in the tree that the schema does not admit."""
    complaints: dict[tuple[str, bool], Complaint] = {}
    for error in validator().iter_errors(tree):
        for path, message, hint in explain(error):
            where = nearest(locations, path) or Location(file)
            complaint = Complaint(path, SpecError(message, where, hint))
            complaints.setdefault((path, error.validator == "type"), complaint)
    return [
        complaint
        for (path, of_type), complaint in complaints.items()
        if of_type or (path, True) not in complaints  # 0.5 is no whole number: that says it all
    ]


def explain(error: ValidationError) -> Iterator[tuple[str, str, str]]:
    """(path, message, hint) of each mistake that a validation error stands for."""
    path = dotted(error.absolute_path)
    rules: Any = error.schema
    value: Any = error.instance
    rule, wanted = str(error.validator), rules[error.validator]
    if "propertyNames" in error.schema_path:
        message = f"{path} has the key {value!a}, not {rules['title']}"
        yield within(path, value), message, "letters, digits and _, no digit first"
    elif rule == "additionalProperties":
        for key in sorted(value.keys() - rules["properties"].keys()):
            yield unknown_key(path, key, rules)
    elif rule == "required":
        for key in wanted:
            if key not in value:
                hint = f"{key}: {flow(example_of(rules['properties'][key]))}"
                yield within(path, key), f"{path or 'the spec'} needs {key}", hint
    elif rule == "not":
        first, second = wanted["required"]
        message = f"{path} has both {first} and {second}"
        yield within(path, second), message, f"keep {first} or {second}"
    elif rule == "uniqueItems":
        twice = next(item for i, item in enumerate(value) if item in value[:i])
        yield path, f"{path} names {show(twice)} twice", "name it once"
    elif rule not in limits or not is_huge(value):  # of such its type says so
        shown = {**rules, "examples": examples_along(error.absolute_schema_path)}
        yield path, *explain_value(path, rule, wanted, value, shown)


limits: Mapping[str, Callable[[Any], str]] = MappingProxyType(
    {
        "minimum": lambda limit: f"it must be at least {limit}",
        "maximum": lambda limit: f"it must be at most {limit}",
        "exclusiveMinimum": lambda limit: f"it must be above {limit}",
        "exclusiveMaximum": lambda limit: f"it must be below {limit}",
    }
)


def explain_value(
    path: str, rule: str, wanted: Any, value: Any, rules: Mapping[str, Any]
) -> tuple[str, str]:
    """(message, hint) for a value of the wrong kind or size."""
    name = path.rpartition(".")[2]
    later = planned.get(path if rule == "maximum" else f"{path}={value}")
    if (rule, value) == ("enum", "lbfgs"):
        message = "lbfgs needs a closure, which runs the model several times in a step"
        return message, "name: adamw, or another class of torch.optim"
    if later:
        return f"{path} {show(value)} is not supported yet", later
    examples = rules["examples"] or [expectation(rule, wanted, rules)]
    example = flow(examples[0])
    hint = f"such as {example}" if name.endswith("]") else f"such as {name}: {example}"
    if rule in limits:
        return f"{path} is {show(value)}; {limits[rule](wanted)}", hint
    if rule == "type" and is_huge(value):
        return f"{path} is {show(value)}; it must be below 2**63", hint
    if rule == "type" and wanted == "boolean" and isinstance(value, str) and value in spelled:
        hint = f"{name}: {spelled[value]}; in YAML 1.2 {value} is text"
    expected = expectation(rule, wanted, rules)
    words = [str(word) for word in rules.get("enum", ())]
    close = difflib.get_close_matches(str(value), words, n=1)
    hint = f"did you mean {close[0]}?" if close else hint
    if value is None:
        return f"{path} is empty; it takes {expected}", hint
    shown = show_name(value) if path == "name" and isinstance(value, str) else show(value)
    return f"{path} is {shown}, not {expected}", hint


spelled: Mapping[str, str] = MappingProxyType(
    {"no": "false", "off": "false", "yes": "true", "on": "true"}
)
"""What YAML 1.1 took for true and false."""


def expectation(rule: str, wanted: Any, rules: Mapping[str, Any]) -> str:
    if rule in ("enum", "const"):
        return alternatives([flow(word) for word in (wanted if rule == "enum" else [wanted])])
    if "title" in rules:
        return str(rules["title"])
    if "enum" in rules:
        return alternatives([flow(word) for word in rules["enum"]])
    names = {"object": "a mapping", "array": "a list", "boolean": "true or false", "string": "text"}
    return names.get(str(rules.get("type")), "what belongs here")


def unknown_key(path: str, key: str, rules: Mapping[str, Any]) -> tuple[str, str, str]:
    place = within(path, key)
    if place in planned:
        return place, f"{place} is not supported yet", planned[place]
    known = rules["properties"]
    kinds = [f" with {name} {rule['const']}" for name, rule in known.items() if "const" in rule]
    subject = f" in {path}{kinds[0] if kinds else ''}" if path else ""
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(known)}"
    if key == "<<":
        hint = "YAML 1.2 merges no mappings: write the keys themselves"
    return place, f"unknown key {key!a}{subject}", hint


def examples_along(steps: Iterable[str | int]) -> list[Any]:
    """The examples of the key that a path through the schema leads to."""
    rules: Any = schema()
    found: list[Any] = []
    for step in steps:
        if isinstance(rules, dict) and step not in rules:  # jsonschema leaves the $ref steps out
            rules = definition(rules)
            found = found or rules.get("examples", [])
        rules = rules[step]
        if step in ("properties", "items", "additionalProperties"):
            found = []
        if isinstance(rules, dict) and step != "properties":
            found = found or rules.get("examples", [])
    return found


def definition(rules: Mapping[str, Any]) -> Any:
    return schema()["$defs"][rules["$ref"].rpartition("/")[2]]


def example_of(rules: Mapping[str, Any]) -> Any:
    """A value that the rules admit."""
    if "examples" in rules:
        return rules["examples"][0]
    if "$ref" in rules:
        return example_of(definition(rules))
    return {key: example_of(rules["properties"][key]) for key in rules.get("required", ())}


def alternatives(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def show(value: object) -> str:
    """A value as a message quotes it."""
    return shorten(repr(value) if isinstance(value, str) else flow(value))


def show_name(name: str) -> str:
    """A name that should be of plain letters: one that only looks like another shows."""
    return shorten(ascii(name))


def shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def flow(value: object) -> str:
    """A value as YAML writes it on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str) and not re.fullmatch(r"[\w./+-][\w./:+ -]*", value):
        return json.dumps(value)
    return str(value)
