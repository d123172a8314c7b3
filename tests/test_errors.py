"""tests/errors/*.yaml: each begins with the exact text that it is answered with, as a comment."""

from copy import deepcopy
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from ppc.errors import (
    CaptureError,
    Complaints,
    InternalError,
    Location,
    OutputError,
    PlanError,
    PpcError,
    SpecError,
    nearest,
)
from ppc.frontend.load import load
from ppc.frontend.schema import validate

root = Path(__file__).parent.parent
specs = sorted(path.relative_to(root) for path in root.glob("tests/errors/*.yaml"))


@pytest.mark.parametrize("path", specs, ids=lambda path: path.stem)
def test_complaint(path, monkeypatch):
    monkeypatch.chdir(root)
    with pytest.raises(PpcError) as caught:
        load(path)
    lines = path.read_text().splitlines()
    expected = [line[2:] for line in lines[: len(str(caught.value).splitlines())]]
    assert str(caught.value).splitlines() == expected
    assert not lines[len(expected)].startswith("# ")  # the comment says no more than that
    for complaint, hint in zip(expected[::2], expected[1::2], strict=True):
        assert complaint.startswith(str(path))
        assert hint.startswith("hint: ")


def values_of(node):
    """(what holds it, its key) of every value within a value."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in list(items):
        yield node, key
        if isinstance(value, dict | list):
            yield from values_of(value)


sources = (
    {"source": "text", "files": ["*.py"], "sequence": 8, "last_batch": "drop"},
    {"source": "arrays", "files": {"x": "x.npy"}},
    {
        "source": "random",
        "samples": 8,
        "fields": {"x": {"shape": [3], "dtype": "int64", "high": 3}},
    },
    {"source": "d.py:D", "args": {"n": [1]}, "fields": ["x"]},
)


@pytest.mark.parametrize("data", sources, ids=lambda data: data["source"])
def test_whatever_the_schema_refuses_has_a_hint(data):
    """A wrong value at any key."""
    tree = YAML(typ="safe").load(root / "specs/quickstart.yaml")
    tree["data"] = deepcopy(data)
    tree["model"]["inputs"] = {"x": {"field": "x", "shape": ["batch", 3], "dtype": "int64"}}
    tree["train"]["optimizer"] = {"name": "adamw", "lr": 0.1, "betas": [0.9, 0.95]}
    tree["cluster"]["links"] = {"intra_node": {"bandwidth": "450GB/s", "latency": "5us"}}
    tree["parallel"]["cuts"] = ["blocks.2"]
    complaints = []
    for holder, key in values_of(tree):
        right = holder[key]
        for wrong in (None, -1, "?", [], [None], {"?": None}, {"kind": "cuda"}):
            holder[key] = wrong
            complaints += [str(found.error) for found in validate(tree, {}, "s.yaml")]
        holder[key] = right
    assert len(complaints) > 100
    assert [text for text in complaints if "\nhint: " not in text] == []


def test_there_are_cases():
    assert len(specs) > 35


def test_a_complaint_prints_place_message_and_hint():
    error = SpecError("pipeline 3 x data 2 needs 6 devices", Location("s.yaml", 12, 7), "data: 1")
    assert str(error) == "s.yaml:12:7: pipeline 3 x data 2 needs 6 devices\nhint: data: 1"
    assert str(PlanError("no plan fits")) == "no plan fits"
    assert str(Location("s.yaml", 3)) == "s.yaml:3"


def test_complaints_print_all_in_order():
    errors = Complaints([SpecError("a", Location("s.yaml", 2, 1)), SpecError("b", hint="c")])
    assert str(errors) == "s.yaml:2:1: a\nb\nhint: c"
    assert [e.message for e in errors.errors] == ["a", "b"]


def test_the_tree():
    for cls in (SpecError, CaptureError, PlanError, OutputError, Complaints):
        assert issubclass(cls, PpcError)
    assert not issubclass(InternalError, PpcError)


def test_an_internal_error_shows_the_pass_and_the_forms():
    error = InternalError("0F1 twice on rank 0", "order", before="plan\n", after="grid\n")
    assert str(error) == "order: 0F1 twice on rank 0\n--- before\nplan\n\n--- after\ngrid\n"
    assert str(InternalError("0F1 twice")) == "0F1 twice"


def test_nearest_place():
    places = {"a": Location("f", 1), "a.b": Location("f", 2), "a.b[0]": Location("f", 3)}
    for path, line in (("a.b[0]", 3), ("a.b[1]", 2), ("a.b[0].c", 3), ("a.x.y", 1)):
        assert nearest(places, path) == Location("f", line)
    assert nearest(places, "z.y") is None
