"""What forward does becomes a graph under the user's names: what each module is given and returns,
tied tensors, regions without gradient, tensors that are no parameters."""

import pytest
import torch
import torch.nn.functional as F
from jobs import make_spec
from nets import net

from ppc.analysis.invariants.graph import verify_graph
from ppc.check.outcome import run_ops
from ppc.frontend.capture.build import build_model, state_tensors
from ppc.frontend.capture.capture import capture
from ppc.ir.graph import Items, Ref, State
from ppc.passes.segment import segment

pytestmark = pytest.mark.torch

sequences = {
    "source": "random",
    "samples": 9,
    "fields": {"x": {"shape": [6, 5]}, "y": {"shape": [1]}},
}
linear = """
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
"""


def graph_of(folder, code, **sections):
    graph = capture(make_spec(folder, code, **sections))
    verify_graph(graph)
    verify_graph(segment(graph))
    return graph


def given(graph, path, number=0):
    """What a call was given, by argument, with the targets of the ops that made it."""
    made = {name: op.target.split(".")[1] for op in graph.ops for name in op.outputs}

    def spell(value):
        if isinstance(value, tuple):
            return tuple(map(spell, value))
        return made.get(value.name, value.name) if isinstance(value, Ref) else value

    return {name: spell(value) for name, value in graph.calls[path, number].arguments}


def targets(graph, path=None):
    ops = [op for op in graph.ops if path is None or op.call[0] == path]
    return [op.target.split(".")[1] for op in ops]


def test_arguments_by_position_and_name(tmp_path):
    inner = f"""{linear}
    def forward(self, hidden, mask=None, *, scale, flag=True):
        return self.inner(hidden * scale) + mask
"""
    forward = "return self.b(self.m(self.a(x), scale=3, mask=torch.sin(x[:, :1])))"
    graph = graph_of(tmp_path, net(forward, "self.m = Twice()", before=inner))
    assert given(graph, "m") == {"hidden": "linear", "mask": "sin", "scale": 3}
    assert graph.calls["m", 0].positional == 1
    assert given(graph, "") == {"x": "x"}
    assert given(graph, "m.inner") == {"input": "mul"}


def test_arguments_in_nests(tmp_path):
    inner = f"""{linear}
    def forward(self, pair, *rest, **named):
        return self.inner(pair[0] + pair[1][0]) * rest[1] + named["shift"]
"""
    forward = "h = self.a(x)\nreturn self.b(self.m((h, [h.sin()]), 1, h.cos(), shift=h.tanh()))"
    graph = graph_of(tmp_path, net(forward, "self.m = Twice()", before=inner))
    assert given(graph, "m") == {
        "pair": ("linear", ("sin",)),
        "rest_0": 1,
        "rest_1": "cos",
        "shift": "tanh",
    }


def test_results_in_nests(tmp_path):
    inner = f"""{linear}
    def forward(self, x):
        h = self.inner(x)
        return h, (h.sin(), None), {{"c": h.cos(), "k": 3, "opaque": object()}}
"""
    forward = "h, (s, _), named = self.m(self.a(x))\nreturn self.b(h + s + named['c'])"
    graph = graph_of(tmp_path, net(forward, "self.m = Twice()", before=inner))
    first, (sine, nothing), named = graph.calls["m", 0].output
    assert [first, sine, nothing] == [Ref("linear_1"), Ref("sin"), None]
    assert named == Items((("c", Ref("cos")), ("k", 3), ("opaque", None)))


def test_a_data_class(tmp_path):
    inner = f"""
from dataclasses import dataclass
@dataclass
class Result:
    hidden: torch.Tensor
    count: int
{linear}
    def forward(self, x):
        return Result(self.inner(x), 1)
"""
    graph_of(
        tmp_path, net("return self.b(self.m(self.a(x)).hidden)", "self.m = Twice()", before=inner)
    )


def test_lstm(tmp_path):
    code = net(
        "out, (h, c) = self.l(x, (x.new_zeros(1, len(x), 8), x.new_zeros(1, len(x), 8)))\n"
        "return self.b(out[:, -1])",
        "self.l = nn.LSTM(5, 8, batch_first=True)",
    )
    graph = graph_of(tmp_path, code, data=sequences)
    assert given(graph, "l") == {"input": "x", "hx": ("new_zeros", "new_zeros")}
    (op,) = [op for op in graph.ops if op.target.startswith("aten.lstm")]
    out, (h, c) = graph.calls["l", 0].output
    assert (out, h != c, op.outputs[1:]) == (Ref(op.outputs[0]), True, ("", ""))
    assert graph.modules["l"].constructor.cls == "nn.LSTM"


def test_attention(tmp_path):
    code = net(
        "mixed, weights = self.m(x, x, x, need_weights=False)\nreturn self.b(self.a(mixed[:, 0]))",
        "self.m = nn.MultiheadAttention(5, 1, batch_first=True)",
    )
    graph = graph_of(tmp_path, code, data=sequences)
    assert given(graph, "m") == {"query": "x", "key": "x", "value": "x", "need_weights": False}
    assert graph.calls["m", 0].output[1] is None
    assert graph.modules["m"].constructor.cls == "nn.MultiheadAttention"


def test_a_module_called_twice(tmp_path):
    inner = f"{linear}\n    def forward(self, x):\n        return self.inner(x).relu()"
    graph = graph_of(
        tmp_path, net("return self.b(self.m(self.m(self.a(x))))", "self.m = Twice()", before=inner)
    )
    assert [op.call for op in graph.ops] == [
        ("a", 0), ("m.inner", 0), ("m", 0), ("m.inner", 1), ("m", 1), ("b", 0), ("", 0),
    ]  # fmt: skip
    assert graph.calls["m.inner", 1].parent == ("m", 1)
    assert given(graph, "m", 1) == {"x": "relu"}


@pytest.mark.parametrize("first", ["c", "d"])
def test_a_module_under_two_names(first, tmp_path):
    second = "d" if first == "c" else "c"
    code = net(
        f"return self.b(self.{first}(self.{second}(self.a(x))))",
        "self.c = self.d = nn.Linear(8, 8)",
    )
    graph = graph_of(tmp_path, code)
    assert graph.parameters["c.weight"].aliases == ("d.weight",)
    assert len(graph.parameters) == 6
    assert given(graph, "c", 1) == {"input": "linear"}


def test_tied_names(tmp_path):
    code = net(
        "return self.b(torch.tanh(self.head(self.body(self.a(x)))))",
        "self.body = nn.Linear(8, 8)\nself.head = nn.Linear(8, 8)\n"
        "self.head.weight = self.body.weight",
    )
    graph = graph_of(tmp_path, code)
    assert graph.parameters["body.weight"].aliases == ("head.weight",)
    assert graph.canonical["head.weight"] == "body.weight"
    used = {op.call[0]: op.operands[1] for op in graph.ops if op.call[0] in ("body", "head")}
    assert used == {"body": State("body.weight"), "head": State("head.weight")}


no_grad = {
    "with": "with torch.no_grad():\n    h = self.a(x).sin()",
    "a module in it": "with torch.no_grad():\n    h = self.m(x).sin()",
    "an op of two results": """
with torch.no_grad():
    p, q = self.a(x).sin().split(4, 1)
    h = torch.cat([q, p], 1)
""",
    "two results": "with torch.no_grad():\n    h, k = self.a(x).sin(), x.cos()\nh = h + k[:, :1]",
    "set_grad_enabled": "with torch.set_grad_enabled(False):\n    h = self.a(x).sin()",
    "autocast that is off": """
with torch.no_grad(), torch.autocast('cpu', enabled=False):
    h = self.a(x).sin()
""",
}


@pytest.mark.parametrize("forward", no_grad.values(), ids=no_grad)
def test_no_grad(forward, tmp_path):
    graph = graph_of(tmp_path, net(f"{forward}\nreturn self.b(h)", "self.m = nn.Linear(5, 8)"))
    assert {op.target.split(".")[1]: op.grad for op in graph.ops}["sin"] is False
    assert graph.ops[-1].grad
    assert given(graph, "b")["input"] in ("sin", "cat", "add")
    (first,) = [path for path in ("a", "m") if (path, 0) in graph.calls]
    assert given(graph, first) == {"input": "x"}
    assert not graph.values["linear"].requires_grad


def test_names_of_a_region_are_not_those_of_its_ops(tmp_path):
    before = """
class Product(nn.Module):
    def forward(self, p, q):
        return p * q
"""
    code = net("""
with torch.no_grad():
    p, q = self.a(x).split(4, 1)
    h = self.m(p, q)
p, q = self.c(h).split(2, 1)
return self.m(p, q).sum(1, keepdim=True)
""", "self.m, self.c = Product(), nn.Linear(4, 4)", before=before)  # fmt: skip
    graph = graph_of(tmp_path, code)
    split = next(op for op in graph.ops if op.target.startswith("aten.split"))
    assert graph.calls["m", 0].arguments == tuple(zip("pq", map(Ref, split.outputs), strict=True))
    assert given(graph, "c") == {"input": "mul"}


def test_enable_grad_within_no_grad(tmp_path):
    code = net("""
with torch.no_grad():
    h = self.a(x)
    with torch.enable_grad():
        g = self.c(h)
return self.b(g)
""", "self.c = nn.Linear(8, 8)")  # fmt: skip
    graph = graph_of(tmp_path, code)
    assert {op.call[0]: op.grad for op in graph.ops if op.call[0]} == {
        "a": False,
        "c": True,
        "b": True,
    }


def test_frozen_and_unused_parameters(tmp_path):
    code = net(init="self.a.requires_grad_(False)\nself.unused = nn.Linear(2, 2)")
    graph = graph_of(tmp_path, code)
    assert not graph.parameters["a.weight"].meta.requires_grad
    assert graph.parameters["unused.weight"].meta.requires_grad
    assert not graph.values["linear"].requires_grad
    assert graph.values["linear_1"].requires_grad


buffer = "self.register_buffer('k', {})".format
parameter = "self.k = nn.Parameter({})".format
tensors = {
    "plain attribute": ("self.k * h", "self.k = torch.tensor([2.0])", "k"),
    "non-persistent buffer": ("self.k * h", buffer("torch.ones(1), persistent=False"), "k"),
    "complex": ("h * self.k.abs().sum()", buffer("torch.ones(2, dtype=torch.complex64)"), "k"),
    "scalar parameter": ("h * self.k.exp()", parameter("torch.tensor(2.0)"), "k"),
    "integers": ("h[:, self.k]", buffer("torch.arange(8).flip(0)"), "k"),
    "mask": ("h.masked_fill(self.k, 0.0)", buffer("torch.arange(8) > 3"), "k"),
    "no elements": (
        "torch.cat([h, self.k.expand(len(h), 0)], 1)",
        parameter("torch.zeros(1, 0)"),
        "k",
    ),
    "in a list": ("h * self.k[0]", "self.k = [torch.ones(8) * 2]", None),
    "of the module's file": ("h * K", "", None),
    "written in forward": ("h * torch.tensor([2.0, 3.0])[1]", "", None),
    "long, written in forward": ("h * torch.tensor(list(range(24)))[3]", "", None),
    "ParameterList": ("h * self.k[0]", "self.k = nn.ParameterList([torch.ones(8)])", "k.0"),
    "ParameterDict": ("h * self.k['r']", "self.k = nn.ParameterDict({'r': torch.ones(8)})", "k.r"),
}


@pytest.mark.parametrize(("forward", "init", "name"), tensors.values(), ids=tensors)
def test_tensors(forward, init, name, tmp_path):
    before = "K = torch.arange(8.0)"
    spec = make_spec(tmp_path, net(f"h = self.a(x)\nreturn self.b({forward})", init, before=before))
    graph = capture(spec)
    verify_graph(graph)
    assert name is None or name in graph.parameters
    assert given(graph, "a") == {"input": "x"}  # whatever else the trace was given
    model = build_model(spec)
    persistent = {fqn for fqn, p in graph.parameters.items() if p.persistent}
    assert persistent == model.state_dict().keys()


def test_unread_plain_attributes_are_left_out(tmp_path):
    graph = graph_of(tmp_path, net(init="self.last = torch.zeros(3)"))
    assert "last" not in graph.parameters


def test_the_graph_computes_what_the_model_does(tmp_path):
    spec = make_spec(tmp_path, net("h = self.a(x)\nh[:, 1:3] *= 2\nreturn self.b(h.relu())"))
    graph, model = capture(spec), build_model(spec)
    x, y = torch.randn(3, 5), torch.randn(3, 1)
    values = run_ops(graph.ops, graph.canonical, dict(state_tensors(model)), {"x": x, "y": y}, 3)
    assert torch.equal(values[graph.outputs[0][1]], F.mse_loss(model(x), y))


@pytest.mark.parametrize(
    ("code", "random"),
    [
        ("nn.functional.dropout(x, 0.5)", True),
        ("nn.functional.rrelu(x)", False),
        ("nn.functional.rrelu(x, training=True)", True),
        ("torch.bernoulli(x, 0.0)", True),
        ("x * torch.rand_like(x)", True),
        ("nn.functional.scaled_dot_product_attention(x, x, x)", False),
        ("nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)", True),
        ("self.m(x.unsqueeze(0))[0].squeeze(0)", True),
    ],
)
def test_what_draws_random_numbers(tmp_path, code, random):
    init = "self.m = nn.LSTM(8, 8, 2, dropout=0.5)"
    code = net(f"x = self.a(x)\nreturn self.b({code})", init)
    graph = capture(make_spec(tmp_path, code, model={"coupled": "accept"}))
    assert any(op.random for op in graph.ops) == random
