"""tests/errors/*.yaml: each begins with the exact text that it is answered with, as a comment."""

from pathlib import Path

import pytest

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
