"""Ops belong to the user's statements, and know the names that these assign."""

from contextlib import nullcontext

import pytest
from jobs import make_spec
from nets import net

from ppc.frontend.capture import export
from ppc.frontend.capture.capture import capture
from ppc.frontend.capture.stacks import Frames
from ppc.frontend.capture.statements import Frame, forget, frames, statement, users_frame

pytestmark = pytest.mark.torch

block = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        y = self.inner(x)
        return x + y
"""


def spelled(folder, forward, init="", before=""):
    """The model's own ops, by statement: (names it assigns, line, ops and calls)."""
    graph = capture(make_spec(folder, net(forward, init, before=before)))
    text = (folder / "net.py").read_text().splitlines()
    groups = {}
    for op in graph.ops:
        call, number = op.call, op.statement
        while call[0] and graph.calls[call].parent != ("", 0):
            call = graph.calls[call].parent
        number = graph.calls[call].statement if call[0] else number
        name = call[0] or op.target.split(".")[1]
        groups.setdefault(number, []).append(name)
    found = []
    for number, names in groups.items():
        statement = graph.statements[number]
        if statement.where:
            line = text[int(statement.where.rpartition(":")[2]) - 1].strip()
            found.append((statement.targets, line, list(dict.fromkeys(names))))
    return found


def test_names_that_a_statement_assigns(tmp_path):
    forward = """
h = self.a(x).sin()
p, q = h.split(4, 1)
p = p.clone()
p += 1
k: torch.Tensor = torch.cat([p, q], 1)
return self.b(k)
"""
    assert spelled(tmp_path, forward) == [
        (("h",), "h = self.a(x).sin()", ["a", "sin"]),
        (("p", "q"), "p, q = h.split(4, 1)", ["split"]),
        (("p",), "p = p.clone()", ["clone"]),
        (("p",), "p += 1", ["add"]),
        (("k",), "k: torch.Tensor = torch.cat([p, q], 1)", ["cat"]),
        ((), "return self.b(k)", ["b"]),
    ]


def test_a_statement_of_several_lines(tmp_path):
    forward = """
h = torch.sin(
    self.a(
        x.cos()
    ),
)
return self.b(h)
"""
    assert spelled(tmp_path, forward)[0] == (("h",), "h = torch.sin(", ["cos", "a", "sin"])


def test_what_is_no_plain_name(tmp_path):
    forward = """
self.h = self.a(x)
h, *rest = self.h.split(2, 1)
h = k = h.sin()
return self.b(torch.cat([h, k, *rest[1:]], 1))
"""
    assert [names for names, *_ in spelled(tmp_path, forward)] == [(), (), (), ()]


def test_a_loop_over_modules_is_a_statement_each_time(tmp_path):
    forward = "for block in self.blocks:\n    x = block(x)\nreturn self.b(x)"
    init = "self.blocks = nn.ModuleList([self.a, Block(), Block()])"
    assert spelled(tmp_path, forward, init, block) == [
        (("x",), "x = block(x)", ["a"]),
        (("x",), "x = block(x)", ["blocks.1"]),
        (("x",), "x = block(x)", ["blocks.2"]),
        ((), "return self.b(x)", ["b"]),
    ]


def test_one_module_called_again(tmp_path):
    forward = "h = self.a(x)\nfor _ in range(2):\n    h = self.m(h)\nreturn self.b(h)"
    assert [line for _, line, _ in spelled(tmp_path, forward, "self.m = Block()", block)] == [
        "h = self.a(x)", "h = self.m(h)", "h = self.m(h)", "return self.b(h)",
    ]  # fmt: skip


def test_two_modules_in_one_statement(tmp_path):
    forward = "return self.b(self.m(self.a(x)))"
    (found,) = spelled(tmp_path, forward, "self.m = Block()", block)
    assert found == ((), forward, ["a", "m", "b"])


def test_a_helper_function(tmp_path):
    """What it computes belongs to the statement of forward that calls it."""
    before = "def twice(x):\n    y = x * 2\n    return y.sin()"
    found = spelled(tmp_path, "h = twice(self.a(x))\nreturn self.b(h)", before=before)
    assert found == [
        (("h",), "h = twice(self.a(x))", ["a", "mul", "sin"]),
        ((), "return self.b(h)", ["b"]),
    ]


def test_within_a_module(tmp_path):
    code = net("return self.b(self.m(self.a(x)))", "self.m = Block()", before=block)
    graph = capture(make_spec(tmp_path, code))
    add = next(op for op in graph.ops if op.target.startswith("aten.add"))
    assert graph.statements[graph.calls["m.inner", 0].statement].targets == ("y",)
    assert graph.statements[add.statement].targets == ()
    assert add.where == "net.py:13"


def test_torchs_own_names_do_not_count(tmp_path):
    """`attn_output_weights = ...` of nn.functional is no name of the user's."""
    graph = capture(make_spec(tmp_path, net("return self.b(self.m(self.a(x)))", """
self.m = nn.Sequential(nn.Linear(8, 8), nn.Softmax(1))
""")))  # fmt: skip
    calls = [graph.calls[path, 0] for path in ("m.0", "m.1")]
    assert [graph.statements[call.statement].targets for call in calls] == [(), ()]


def test_frames_of_a_stack_trace():
    trace = """
  File "/home/me/net.py", line 12, in forward
    return self.b(x)
  File "<eval_with_key>.1", line 3, in forward
  File "/home/me/my file.py", line 7, in helper"""
    assert frames(trace) == [
        Frame("/home/me/net.py", 12),
        Frame("<eval_with_key>.1", 3),
        Frame("/home/me/my file.py", 7),
    ]
    assert users_frame(frames(trace)) == Frame("/home/me/my file.py", 7)
    assert users_frame(frames(None)) is None


def test_a_file_that_is_no_python(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("x = (")
    assert statement(Frame(str(path), 1)) == (1, ())


def test_an_edit_between_captures_counts(tmp_path):
    path = tmp_path / "net.py"
    path.write_text("y = 1\n")
    assert statement(Frame(str(path), 1)) == (1, ("y",))
    path.write_text("value = 12\n")
    forget()
    assert statement(Frame(str(path), 1)) == (1, ("value",))


def test_the_same_by_torchs_own_stacks(tmp_path, monkeypatch):
    """What stands in for them, to be faster, leaves nothing out that is read; and it does stand in:
    without a stack no line is known."""
    spec = make_spec(
        tmp_path, net("y = self.a(x)\nreturn self.b(self.c(y))", "self.c = Block()", before=block)
    )
    shown = str(capture(spec))
    patched = export.forwards_alone
    monkeypatch.setattr(export, "forwards_alone", nullcontext)
    assert str(capture(spec)) == shown
    monkeypatch.setattr(export, "forwards_alone", patched)
    monkeypatch.setattr(Frames, "summary", lambda _: None)
    assert str(capture(spec)) != shown
