"""`ppc check` answers whatever it is given: exit code 0 or 1, complaints with their places, never a
traceback, no files left. A minute of cases, the same ones each time, and a minute of others among
the long tests; a failure names its case, which `python tests/fuzz.py KIND NUMBER` runs again."""

import random
import time

import fuzz
import pytest

from ppc.errors import visible

SECONDS = 20.0  # of each kind


@pytest.mark.parametrize("start", ["same", pytest.param("other", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["bytes", "text", "tree"])
def test_check_answers(kind, start, tmp_path):
    path = fuzz.stage(tmp_path)
    path.write_bytes(b"")
    before = set(fuzz.listing(tmp_path))
    end = time.monotonic() + SECONDS
    number = 0 if start == "same" else random.SystemRandom().randrange(10**9)
    while time.monotonic() < end:
        content = fuzz.make(kind, number)
        fault = fuzz.fault(path, content)
        assert not fault, f"python tests/fuzz.py {kind} {number}\n{content!r}\n{fault}"
        number += 1
    assert set(fuzz.listing(tmp_path)) == before


def test_cases_can_be_made_again():
    for kind in ("bytes", "text", "tree"):
        assert [fuzz.make(kind, n) for n in range(20)] == [fuzz.make(kind, n) for n in range(20)]


def test_a_traceback_is_found(tmp_path, monkeypatch):
    """The fuzz can fail."""
    path = fuzz.stage(tmp_path)
    assert not fuzz.fault(path, fuzz.valid[0])
    monkeypatch.setattr("ppc.frontend.load.validate", lambda *_: 1 / 0)
    assert "ZeroDivisionError" in fuzz.fault(path, fuzz.valid[0])


def test_what_does_not_show_is_escaped():
    assert visible("a\x1b[2J\u202e\ud800 \u0430é\n") == "a\\x1b[2J\\u202e\\ud800 \u0430é\\n"


@pytest.mark.parametrize(
    "data",
    [
        "source: tokens, files: LONG, dtype: uint16, sequence: 4",
        "source: tokens, files: 'LONG*', dtype: uint16, sequence: 4",
        "source: text, files: LONG, sequence: 4",
        "source: arrays, files: {x: LONG.npy}",
        "source: arrays, files: LONG.safetensors",
        "source: 'LONG.py:D', fields: [x]",
    ],
)
def test_a_name_too_long_for_the_disk(data, tmp_path):
    """Path.is_file raises for it under Python 3.11, which random cases come upon once in many."""
    path = fuzz.stage(tmp_path)
    content = b"data: {%b}\n" % data.encode() + fuzz.short
    fault = fuzz.fault(path, content.replace(b"LONG", b"a" * 300))
    assert not fault, fault
