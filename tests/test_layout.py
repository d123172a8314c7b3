"""Every statement that ppc writes comes out as ruff formats it."""

import ast

import pytest
from formatted import format_text
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ppc.emit import layout
from ppc.emit.expression import quote
from ppc.emit.layout import fits, last_bracket, outline, split_top, terms, wrap

names = st.text("abcdefgh_", min_size=1, max_size=30).map(lambda text: f"n{text}")
dotted = st.lists(names, min_size=1, max_size=3).map(".".join)
letters = st.characters(max_codepoint=0x17F) | st.sampled_from("'\"\\()[]{},=")  # a column each
texts = st.text(letters, max_size=40).map(quote)
numbers = st.sampled_from(["0", "1", "-1", "0.1", "1e-05", "None", "True", "-0.5"])
atoms = names | dotted | numbers | texts


def calls(inner):
    keywords = st.dictionaries(names, inner, max_size=3)
    return st.tuples(dotted, st.lists(inner, max_size=4), keywords).map(
        lambda p: f"{p[0]}({', '.join([*p[1], *(f'{k}={v}' for k, v in p[2].items())])})"
    )


def literals(inner):
    items = st.lists(inner, min_size=1, max_size=5)
    pairs = st.lists(st.tuples(texts | names, inner), min_size=1, max_size=4)
    return st.one_of(
        items.map(lambda found: f"[{', '.join(found)}]"),
        items.map(lambda found: f"({', '.join(found)}{',' * (len(found) == 1)})"),
        pairs.map(lambda found: f"{{{', '.join(f'{k}: {v}' for k, v in found)}}}"),
    )


def comprehensions(inner):
    parts = st.tuples(inner, names, dotted, st.booleans(), st.sampled_from(["[]", "()"]))
    return parts.map(
        lambda p: (
            f"{'list' * (p[4] == '()')}{p[4][0]}{p[0]} for {p[1]} in {p[2]}"
            f"{' if key' if p[3] else ''}{p[4][1]}"
        )
    )


def sums(inner):
    terms_ = st.lists(inner, min_size=2, max_size=3)
    return st.tuples(terms_, st.sampled_from(["+", "*", "@", "|"])).map(
        lambda parts: f" {parts[1]} ".join(parts[0])
    )


def compound(inner):
    lambdas = st.lists(inner, max_size=3).map(lambda found: f"lambda n: [{', '.join(found)}]")
    return calls(inner | lambdas) | literals(inner) | comprehensions(inner)


values = st.recursive(atoms, compound, max_leaves=12)
arguments = values | sums(dotted | calls(atoms))
# Operands of a statement of its own are names: others would be given one (Writer.group).
rights = compound(arguments) | sums(dotted) | dotted
assigned = st.builds(
    lambda target, right: target + right,
    st.sampled_from(["x = ", "q, k, v = ", "self.model.layers = ", "(x,) = ", 'facts["a = b"] = ']),
    rights,
)
tuples = st.lists(names, min_size=2, max_size=7).map(", ".join)
taken_apart = st.tuples(tuples, calls(atoms) | tuples).map(" = ".join)
nested = st.tuples(names, tuples, calls(atoms)).map(lambda p: f"{p[0]}, ({p[1]}) = {p[2]}")
functions = tuples.map(lambda text: f"def forward(self, {text}):")
returned = rights.map(lambda right: f"return {right}")
branches = st.tuples(names, literals(texts)).map(lambda p: f"if {p[0]} in {p[1]}:")
loops = st.tuples(names, literals(names)).map(lambda p: f"for {p[0]} in {p[1]}:")
kinds = assigned | returned | branches | loops | taken_apart | nested | functions
statements = st.tuples(kinds, st.sampled_from([4, 8, 12])).map(
    lambda p: (p[0], 4 if p[0].startswith("def ") else p[1])
)


def module(text: str, indent: int) -> str:
    """Wrapped lines in as many blocks as the indent says, as a file."""
    head = "class A:" if text.startswith("def ") else "def f():"
    heads = [head, "    if x:", "        if y:"][: indent // 4]
    body = [f"{' ' * (indent + 4)}pass"] if text.endswith(":") else []
    return "\n".join([*heads, *wrap(text, indent), *body])


quick = settings(max_examples=100, deadline=None)
one_by_one = [phase for phase in Phase if phase is not Phase.shrink]  # ruff would run for each


@settings(quick, max_examples=30, phases=one_by_one)
@given(st.lists(statements, min_size=15, max_size=15))
def test_wrapped_statements_are_formatted(found):
    text = "\n\n\n".join(module(*statement) for statement in found) + "\n"
    expected = format_text(text)
    blocks = zip(text.split("\n\n\n"), expected.split("\n\n\n"), strict=False)
    assert text == expected, next((before, after) for before, after in blocks if before != after)


def test_a_tuple_among_targets_has_its_own_lines():
    inner = ", ".join(f"name_of_{number:02}" for number in range(7))
    text = module(f"first, ({inner}) = function_of_the_users({'x' * 40}, {'y' * 40})", 12) + "\n"
    assert format_text(text) == text


def test_a_target_may_have_a_key():
    """Of a module that holds a part of another's layers, by names as long as ALBERT's."""
    text = f'self.layers["0"].{"name_of_a_projection_" * 4}layer = nn.Linear(32, 32)'
    lines = list(wrap(text, 8))
    assert ast.dump(ast.parse("\n".join(lines).strip())) == ast.dump(ast.parse(text))
    assert lines[0].endswith(" = (")


@quick
@given(statements)
def test_wrapping_changes_no_meaning(statement):
    text, _ = statement
    head = "class A:" if text.startswith("def ") else "def f():"
    one_line = f"{head}\n  {text}" + " pass" * text.endswith(":")
    assert ast.dump(ast.parse(module(text, 4))) == ast.dump(ast.parse(one_line))


@quick
@given(statements)
def test_what_fits_is_not_too_wide(statement):
    text, indent = statement
    if fits(text, indent):
        assert all(len(line) <= 100 for line in wrap(text, indent))


def test_strings_hide_what_they_hold():
    first, second, third = r'"a, (b\\"', "'it, \"s'", r'"\"), ["'
    assert split_top(f"{first}, {second}, {third}, c") == [first, second, third, "c"]
    assert outline(f"f({first}, [x])(y)") == f"f({'.' * (len(first) + 5)})(.)"
    assert last_bracket(f"f({third}, c)") == 1
    assert last_bracket("f()") == last_bracket("x") == -1
    assert terms("a + b * c - d") == ["a", "+ b * c", "- d"]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("x = f(aaaaa, b)", ["x = f(", "    aaaaa, b", ")"]),
        ("x = [aaaaaa, b]", ["x = [", "    aaaaaa,", "    b,", "]"]),
        ("x = (aaaaaaaa,)", ["x = (", "    aaaaaaaa,", ")"]),
        ("return aaaa + b", ["return (", "    aaaa + b", ")"]),
        ("if x in (a, b):", ["if x in (", "    a,", "    b,", "):"]),
    ],
)
def test_one_column_too_many(text, lines, monkeypatch):
    monkeypatch.setattr(layout, "width", 14)
    assert list(wrap(text, 0)) == lines
    monkeypatch.setattr(layout, "width", 15)
    assert list(wrap(text, 0)) == [text]
