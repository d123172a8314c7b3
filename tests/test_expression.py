"""Expressions carry just the parentheses they need."""

import ast
import math

import pytest
from formatted import format_text
from hypothesis import given, settings
from hypothesis import strategies as st

from ppc.emit.expression import (
    MARK,
    Expr,
    Level,
    binary,
    call,
    marked,
    method,
    number,
    plain,
    quote,
    sequence,
    subscript,
    unary,
)
from ppc.emit.ops import operators

x = Expr("x")
levels = dict(operators.values()) | {"**": Level.POWER, "<<": Level.SHIFT}
nodes = {
    "+": ast.Add, "-": ast.Sub, "*": ast.Mult, "/": ast.Div, "//": ast.FloorDiv, "%": ast.Mod,
    "@": ast.MatMult, "&": ast.BitAnd, "|": ast.BitOr, "^": ast.BitXor, "**": ast.Pow,
    "<<": ast.LShift, "==": ast.Eq, "!=": ast.NotEq, "<": ast.Lt, "<=": ast.LtE, ">": ast.Gt,
    ">=": ast.GtE,
}  # fmt: skip


def names(name):
    return Expr(name), ast.Name(name)


def numbers(value):
    found = ast.Constant(abs(value))
    negative = math.copysign(1, value) < 0
    return number(value, "size"), ast.UnaryOp(ast.USub(), found) if negative else found


def joined(parts):
    (left, one), operator, (right, other) = parts
    node = nodes[operator]()
    if isinstance(node, ast.cmpop):
        tree = ast.Compare(one, [node], [other])
    else:
        tree = ast.BinOp(one, node, other)
    return binary(left, operator, right, levels[operator]), tree


def called(parts):
    (receiver, tree), (argument, value) = parts
    node = ast.Call(ast.Attribute(tree, "mean"), [value])
    return method(receiver, "mean", [argument.text]), node


def no_number(pair):
    return not isinstance(pair[1], ast.Constant)  # `0.mean` is no Python, and no op needs it


def listed(parts):
    expressions, values = [e for e, _ in parts], [t for _, t in parts]
    return (
        (call("f", [e.text for e in expressions]), ast.Call(ast.Name("f"), values)),
        (sequence(expressions), ast.Tuple(values)),
        (sequence(expressions, "[]"), ast.List(values)),
    )


def grow(inner):
    return st.one_of(
        st.tuples(inner, st.sampled_from(sorted(levels)), inner).map(joined),
        inner.map(lambda p: (unary("-", p[0]), ast.UnaryOp(ast.USub(), p[1]))),
        inner.map(lambda p: (unary("~", p[0]), ast.UnaryOp(ast.Invert(), p[1]))),
        st.tuples(inner.filter(no_number), inner).map(called),
        st.tuples(inner, inner).map(
            lambda p: (subscript(p[0][0], p[1][0].text), ast.Subscript(p[0][1], p[1][1]))
        ),
        st.lists(inner, min_size=1, max_size=3).map(listed).flatmap(st.sampled_from),
    )


atoms = st.one_of(
    st.sampled_from("abc").map(names),
    st.integers(-9, 9).map(numbers),
    st.floats(-10, 10).map(numbers),
)
trees = st.recursive(atoms, grow, max_leaves=15)


def dump(tree) -> str:
    """A tree without contexts and empty fields, which those made by hand leave out."""
    if isinstance(tree, ast.AST):
        fields = [(n, v) for n, v in ast.iter_fields(tree) if n not in ("ctx", "kind") and v != []]
        return f"{type(tree).__name__}({', '.join(f'{n}={dump(v)}' for n, v in fields)})"
    if isinstance(tree, list):
        return f"[{', '.join(map(dump, tree))}]"
    return repr(tree)


@given(trees)
def test_text_means_the_tree(found):
    expr, tree = found
    assert dump(ast.parse(plain(expr.text), mode="eval").body) == dump(tree)


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (binary(binary(x, "+", x, Level.SUM), "+", x, Level.SUM), "x + x + x"),
        (binary(x, "-", binary(x, "+", x, Level.SUM), Level.SUM), "x - (x + x)"),
        (binary(x, "+", binary(x, "*", x, Level.PRODUCT), Level.SUM), "x + x * x"),
        (method(binary(x, "@", x, Level.PRODUCT), "view", ["-1"]), "(x @ x).view(-1)"),
        (method(unary("-", x), "exp", []), "(-x).exp()"),
        (binary(unary("-", x), "+", x, Level.SUM), "-x + x"),
        (unary("-", unary("-", x)), "--x"),
        (sequence([x]), "(x,)"),
        (sequence([]), "()"),
        (sequence([x], "[]"), "[x]"),
    ],
)
def test_no_parentheses_but_those_needed(expr, text):
    assert expr.text == text


@pytest.mark.parametrize("value", [0, -1, 2.5, -0.0, 1e-5, 1e300, True, 1j, math.inf, -math.inf])
def test_numbers_come_back(value):
    text = plain(number(value).text)
    found = eval(text)  # noqa: S307  # a literal of our own
    assert repr(found) == repr(value)
    assert type(found) is type(value)


def test_nan_comes_back():
    assert math.isnan(eval(plain(number(math.nan).text)))  # noqa: S307  # a literal of our own


def test_a_mark_bears_value_and_hint():
    (found,) = marked.finditer(f"f({number(-3, 'width').text}, {number(True, 'flag').text})")
    assert found.groups() == ("-3", "width")


@given(st.text() | st.text("\"'\\{}\n\0\r\u2028", max_size=6))
def test_strings_come_back_formatted(text):
    shown = quote(text)
    assert ast.literal_eval(shown) == text
    assert shown.isprintable()
    assert MARK not in shown


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text("\"'\\ab{\n", max_size=8), min_size=30, max_size=30))
def test_quotes_are_chosen_as_the_formatter_does(found):
    text = "".join(f"x = {quote(text)}\n" for text in found)
    assert format_text(text) == text
