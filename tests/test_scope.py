"""A name holds a value until its last reader, and no longer than another value wants it."""

import keyword

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppc.emit.scope import Scope, clean, reserved


def test_a_name_is_free_after_the_last_reader():
    scope = Scope({"a": 0, "b": 1})
    assert scope.bind("a", "x", -1) == "x"
    assert scope.bind("b", "x", 0) == "x"
    assert "a" in scope
    assert "c" not in scope


def test_a_name_that_is_read_later_is_kept():
    scope = Scope({"a": 5, "b": 5, "c": 5})
    assert [scope.bind(value, "x", i) for i, value in enumerate("abc")] == ["x", "x_2", "x_3"]
    assert scope["a"] == "x"


def test_what_nobody_reads_holds_no_name():
    scope = Scope({})
    assert scope.bind("a", "x", 0) == scope.bind("b", "x", 1) == "x"


names = st.sampled_from(["x", "x_2", "y", "self", "class", "2d"])


@given(st.lists(st.tuples(names, st.lists(st.integers(0, 20), max_size=3)), min_size=1))
def test_every_reader_finds_its_value(steps):
    """Step i makes value i, after it has read some of those before."""
    reads = [sorted({r for r in wanted if r < i}) for i, (_, wanted) in enumerate(steps)]
    last = {str(value): float(i) for i, found in enumerate(reads) for value in found}
    scope, holds = Scope(last), {}
    for i, (wanted, _) in enumerate(steps):
        for value in reads[i]:
            assert holds[scope[str(value)]] == value
        holds[scope.bind(str(i), wanted, i)] = i


@given(st.text(max_size=8) | st.sampled_from(sorted(reserved)))
def test_clean_names_are_pythons(text):
    name = clean(text)
    assert name.isidentifier()
    assert not keyword.iskeyword(name)
    assert name not in reserved


@pytest.mark.parametrize(
    ("text", "name"),
    [("hidden_states", "hidden_states"), ("a.b-c", "a_b_c"), ("1x", "_1x"), ("", "value"),
     ("lambda", "lambda_"), ("batch", "batch_"), ("self", "self_")],
)  # fmt: skip
def test_clean(text, name):
    assert clean(text) == name
