"""A loop of the user's, which a trace unrolls, is a loop again in the script."""

from pathlib import Path

import pytest
from emitted import Emitted, emit
from jobs import make_spec, prove
from nets import net

from ppc.check import size

pytestmark = pytest.mark.dist


def spec_of(folder: Path, forward: str, init: str = "", **sections):
    fields = {"x": {"shape": [6, 5]}, "y": {"shape": [6, 1]}}
    return make_spec(
        folder,
        net(forward, init),
        data={"source": "random", "samples": 10, "fields": fields},
        **sections,
    )


def emitted(folder: Path, forward: str, init: str = "") -> Emitted:
    """Compiled, and compared with the graph."""
    return emit(spec_of(folder, forward, init))


scan = """
h = self.a(x)
decay = self.b(h).sigmoid()
state = torch.zeros_like(h[:, 0])
states = []
for t in range(6):
    state = decay[:, t] * state + h[:, t]
    states.append(state)
return self.b(torch.stack(states, dim=1))
"""


def test_a_scan(tmp_path):
    assert emitted(tmp_path, scan).forward() == [
        "h = self.a(x)",
        "decay = self.b(h).sigmoid()",
        "state = torch.zeros_like(h[:, 0])",
        "states = []",
        "for i in range(6):",
        "    state = decay[:, i] * state + h[:, i]",
        "    states.append(state)",
        "b = self.b(torch.stack(states, dim=1))",
        "return F.mse_loss(b, y)",
    ]


loops = {
    "two values": """
h, g = self.a(x), self.a(x).tanh()
a, b = torch.zeros_like(h[:, 0]), torch.ones_like(h[:, 0])
out = []
for t in range(6):
    a, b = b * h[:, t], a + b * g[:, t]
    out.append(a + b)
return self.b(torch.stack(out, 1))
""",
    "modules": """
h = self.a(x)
s = torch.zeros_like(h[:, 0])
out = []
for t in range(6):
    s = torch.tanh(self.c(h[:, t]) + self.d(s))
    out.append(self.b(s))
return torch.stack(out, 1)
""",
    "the first value is read later": """
h = self.a(x)
start = h[:, 0].tanh()
s = start
for t in range(1, 6):
    s = s * h[:, t] + s.cos()
return self.b((s + start)[:, None] + h)
""",
    "the first value is read in every round": """
h = self.a(x)
s = h
for t in range(6):
    s = (s * h).tanh()
return self.b(s)
""",
    "only the last": """
s = self.a(x)
for t in range(5):
    s = (s + 1).tanh() * 0.5
return self.b(s)
""",
    "pieces": """
h = self.a(x)
out = [h[:, :1]]
for t in range(5):
    out.append(out[-1] + h[:, t + 1 : t + 2])
return self.b(torch.cat(out, 1))
""",
    "from the end": """
h = self.a(x)
s, out = torch.zeros_like(h[:, 0]), []
for t in reversed(range(6)):
    s = s * 0.5 + h[:, t]
    out.append(s)
return self.b(torch.stack(out[::-1], 1))
""",
    "two rounds back": """
h = self.a(x)
s, r = h[:, 0], h[:, 1]
for t in range(6):
    s, r = r * h[:, t], s
return self.b(h + (s + r)[:, None])
""",
    "each on its own": """
h = self.a(x)
s, out = h[:, 0], []
for t in range(6):
    s = s.tanh() * h[:, t]
    out.append(s)
return self.b(h + (out[1] * out[4])[:, None])
""",
    "a loop in a loop": """
h = self.a(x)
s, out = h[:, 0], []
for t in range(6):
    for k in range(4):
        s = s.tanh() + h[:, t]
    out.append(s)
return self.b(torch.stack(out, 1))
""",
    "dropout": """
h = self.a(x)
s = h[:, 0]
for t in range(6):
    s = nn.functional.dropout(s + h[:, t], 0.5)
return self.b(h + s[:, None])
""",
    "in place": """
h = self.a(x)
s = torch.zeros_like(h[:, 0])
for t in range(6):
    s += h[:, t]
return self.b(h + s[:, None])
""",
    "writes to a part": """
h = self.a(x)
out = torch.zeros_like(h)
for t in range(6):
    out[:, t] = h[:, t].tanh()
return self.b(out)
""",
}
INIT = "self.c = nn.Linear(8, 8)\nself.d = nn.Linear(8, 8)"


@pytest.mark.parametrize("forward", loops.values(), ids=loops)
def test_it_computes_the_same(tmp_path, forward):
    """`emit` compares the text with the graph."""
    emitted(tmp_path, forward, INIT)


@pytest.mark.parametrize(
    "name", ["two values", "modules", "the first value is read later", "only the last", "pieces",
             "dropout", "in place"],
)  # fmt: skip
def test_it_is_a_loop(tmp_path, name):
    lines = emitted(tmp_path, loops[name], INIT).forward()
    assert sum(line.lstrip().startswith("for i in range(") for line in lines) == 1
    assert len(lines) < 14


def test_a_few_rounds_stay_as_they_are(tmp_path):
    lines = emitted(
        tmp_path, loops["only the last"].replace("range(5)", "range(3)"), INIT
    ).forward()
    assert not any("for " in line for line in lines)


def test_a_rank_trains_with_it(tmp_path, fork_server):
    spec = spec_of(tmp_path, scan, parallel={"pipeline": 2}, cluster={"devices_per_node": 2})
    prove(spec, fork_server)


def test_the_count_is_told(tmp_path, monkeypatch):
    forward = loops["only the last"].replace("range(5)", "range(9)")
    assert not emitted(tmp_path, forward).job.graph.messages
    monkeypatch.setattr(size, "many", 20)
    (message,) = emitted(tmp_path, forward).job.graph.messages
    assert message.startswith("a is 28 operations, 27 of them of net.py:16 in Net: a trace unrolls")


def test_the_count_names_the_module_to_keep_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(size, "many", 20)
    before = """
class Scan(nn.Module):
    def forward(self, s):
        for _ in range(9):
            s = (s + 1).tanh() * 0.5
        return s
"""
    code = net("return self.b(self.s(self.a(x)))", "self.s = Scan()", before=before)
    (message,) = emit(make_spec(tmp_path, code)).job.graph.messages
    assert message.endswith("or that module kept whole: model: {leaf: [s]}")
