"""Listings tell computations apart without values; check_capture finds what a graph does that the
user's model does not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from jobs import SPECS, make_spec, prove
from nets import net

from ppc.analysis.cost import price
from ppc.check import capture as check
from ppc.check import outcome
from ppc.check.listing import first_difference, list_operations
from ppc.errors import CaptureError
from ppc.frontend.capture.capture import capture
from ppc.frontend.capture.private import fake_mode
from ppc.frontend.load import load
from ppc.ir.graph import Ref
from ppc.passes.place import place
from ppc.passes.segment import segment
from ppc.pipeline import compile

pytestmark = pytest.mark.torch


def listing(run):
    """The lines of a computation on two tensors of 4 x 8, a result or several at the end."""
    mode = fake_mode()
    with mode:
        leaf = torch.zeros(4, 8, requires_grad=True)
        a, b = leaf.clone(), leaf.clone()  # may be written

    def results(_):
        found = run(a, b)
        return dict(enumerate(found)) if isinstance(found, tuple) else {"result": found}

    return list_operations(results, [("a", a), ("b", b)], mode)


def test_a_line():
    assert listing(lambda a, _: torch.add(a.t(), 2, alpha=3)) == [
        "add(a as float32[8, 4 by 1, 8] grad, 2, alpha=3) -> float32[8, 4]",
        "result = %0 grad",
    ]


same = {
    "views": (lambda a, _: a.view(2, 2, 8).exp(), lambda a, _: a.unflatten(0, (2, -1)).exp()),
    "a part": (lambda a, _: a[1:, 2].exp(), lambda a, _: a.select(1, 2).narrow(0, 1, 3).exp()),
    "in place": (lambda a, _: a.exp().relu_(), lambda a, _: a.exp().relu()),
    "a view in place": (
        lambda a, _: a.exp().view(2, 2, 8).relu_().sum(),
        lambda a, _: a.exp().view(2, 2, 8).relu().sum(),
    ),
    "to a tensor": (
        lambda a, b: (torch.div(a.detach(), 3, out=(c := b.detach())), c)[1],
        lambda a, _: a.detach() / 3,
    ),
    "a whole number": (lambda a, _: a * 2.0, lambda a, _: a * 2),
    "times one": (lambda a, _: (a * 1).exp(), lambda a, _: a.exp()),
    "a copy": (lambda a, _: a.clone()[1].exp(), lambda a, _: a[1].exp()),
    "a copy in another order": (lambda a, _: a.t().contiguous().sum(), lambda a, _: a.t().sum()),
    "copied before and after a transposition": (
        lambda a, _: a.view(2, 2, 8).transpose(0, 1).contiguous().transpose(1, 2).sum(),
        lambda a, _: a.view(2, 2, 8).permute(1, 2, 0).contiguous().sum(),
    ),
    "flattened after a copy": (
        lambda a, _: a.view(2, 2, 8).transpose(0, 1).reshape(4, 8).t().exp(),
        lambda a, _: a.view(2, 2, 8).permute(2, 1, 0).reshape(8, 4).exp(),
    ),
    "cast before and after a part is taken": (
        lambda a, _: a.t().double()[1].exp(),
        lambda a, _: a[:, 1].double().exp(),
    ),
    "results that lie otherwise": (
        lambda a, _: a.t().clone(memory_format=torch.contiguous_format).exp().view(4, 8),
        lambda a, _: a.t().exp().reshape(4, 8),
    ),
    "an empty piece": (lambda a, _: torch.cat([a, a.new_empty(0)]).exp(), lambda a, _: a.exp()),
    "written whole": (lambda a, b: b.copy_(a).exp(), lambda a, _: a.exp()),
    "dead": (lambda a, _: (torch.arange(1), a.exp())[1:], lambda a, _: (a.exp(),)),
    "another order": (
        lambda a, _: a.sin() - a.cos(),
        lambda a, _: (cos := a.cos(), a.sin() - cos)[1],
    ),
    "a literal": (lambda a, _: a * torch.tensor([2.0]), lambda a, _: a * torch.tensor([2.0])),
}


@pytest.mark.parametrize("name", same)
def test_same(name):
    first, second = map(listing, same[name])
    assert first_difference(first, second) is None, (first, second)


different = {
    "swapped": (lambda a, b: a - b, lambda a, b: b - a),
    "a number": (lambda a, _: a * 2, lambda a, _: a * 7),
    "a dimension": (lambda a, _: a.softmax(0), lambda a, _: a.softmax(1)),
    "a dtype": (lambda a, _: a.long(), lambda a, _: a.int()),
    "another tensor": (lambda a, b: a.exp() + b, lambda _, b: b.exp() + b),
    "another operation's": (
        lambda a, _: (a.sin(), a.cos()),
        lambda a, _: (a.cos(), a.sin()),
    ),
    "another part": (lambda a, _: a[:2].exp(), lambda a, _: a[2:].exp()),
    "another view": (lambda a, _: a.view(8, 4).exp(), lambda a, _: a.t().exp()),
    "copied too early": (
        lambda a, _: (b := a.clone(), a.zero_(), b.exp())[2],
        lambda a, _: (a.zero_(), a.clone().exp())[1],
    ),
    "flattened in another order": (
        lambda a, _: a.view(2, 2, 8).transpose(0, 1).reshape(4, 8).exp(),
        lambda a, _: a.view(2, 2, 8).reshape(4, 8).exp(),
    ),
    "no even strides": (
        lambda a, _: a.t().flatten()[1:6].clone().exp(),
        lambda a, _: a.t().flatten()[2:7].clone().exp(),
    ),
    "other bits": (
        lambda a, _: a.detach().view(torch.int32)[1].clone().add(2),
        lambda a, _: a.detach()[1].int().add(2),
    ),
    "another part of complex numbers": (
        lambda a, _: torch.view_as_complex(a.view(4, 4, 2)).clone().imag.exp(),
        lambda a, _: torch.view_as_complex(a.view(4, 4, 2)).clone().real.exp(),
    ),
    "a written part of a copy": (
        lambda a, _: (b := a[:1].expand(4, 8).clone(), b[0].zero_(), b)[2],
        lambda a, _: (b := a[:1].expand(4, 8).clone(), b[1].zero_(), b)[2],
    ),
    "what a written part leaves": (
        lambda a, _: (b := a.clone(), b[0].zero_(), b)[2],
        lambda a, _: (b := a[:1].expand(4, 8).clone(), b[0].zero_(), b)[2],
    ),
    "a written part": (lambda a, _: (a[0].zero_(), a)[1], lambda a, _: (a[1].zero_(), a)[1]),
    "detached": (lambda a, _: a.detach().exp(), lambda a, _: a.exp()),
    "dropped": (lambda a, _: a.exp().exp(), lambda a, _: a.exp()),
    "a literal": (lambda a, _: a * torch.tensor([2.0]), lambda a, _: a * torch.tensor([3.0])),
    "a dead draw": (lambda a, _: (torch.rand(2), a)[1], lambda a, _: a),
    "other draws": (
        lambda a, _: F.dropout(a) - F.dropout(a),
        lambda a, _: (b := F.dropout(a), F.dropout(a) - b)[1],
    ),
    "other statistics": (
        lambda a, b: (F.batch_norm(a, *b.detach()[:2], training=True), b)[1],
        lambda a, b: (F.batch_norm(a, *b.detach()[1:3], training=True), b)[1],
    ),
}


@pytest.mark.parametrize("name", different)
def test_different(name):
    first, second = map(listing, different[name])
    assert first_difference(first, second), first


def test_first_difference():
    assert first_difference(["a", "b"], ["a", "b"]) is None
    assert first_difference(["a", "b"], ["a", "c"]) == "operation 1 is b, not c"
    assert first_difference(["a"], ["a", "b"]) == "there are 1 operations, not 2"


forward = """
h = self.a(x)
h = (h - h.relu() * 2).softmax(-1)
return self.b(F.layer_norm(h, (8,), eps=1e-2) + h)
"""


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    code = "import torch.nn.functional as F\n" + net(forward)
    return planned(make_spec(tmp_path_factory.mktemp("check"), code))


def planned(spec):
    graph = segment(capture(spec))
    return spec, graph, place(graph, price(graph, spec), spec)


def without(graph, name):
    """The graph without an op: who reads it reads its first operand."""
    op = next(op for op in graph.ops if op.name == name)
    ops = tuple(
        replace(o, args=tuple(op.args[0] if a == Ref(name) else a for a in o.args))
        for o in graph.ops
        if o is not op
    )
    return replace(graph, ops=ops)


def with_args(graph, name, change):
    """The graph with other arguments of one op."""
    assert any(op.name == name for op in graph.ops)
    return replace(
        graph,
        ops=tuple(replace(o, args=change(*o.args)) if o.name == name else o for o in graph.ops),
    )


faults = {
    "swapped": lambda g: with_args(g, "sub", lambda a, b: (b, a)),
    "a constant": lambda g: with_args(g, "mul", lambda a, _: (a, 7)),
    "a dimension": lambda g: with_args(g, "softmax", lambda a, _: (a, 0)),
    "eps": lambda g: with_args(g, "layer_norm", lambda *args: (*args[:-1], 1e-3)),
    "another value": lambda g: with_args(g, "add", lambda _, b: (b, b)),
    "dropped": lambda g: without(g, "relu"),
}


@pytest.fixture(params=["lists", "numbers"])
def way(request, monkeypatch):
    """Whether faults are to be found in lists of operations alone, or by numbers alone."""
    if request.param == "lists":
        monkeypatch.setattr(outcome, "max_elements", 0)
    else:
        monkeypatch.setattr(check, "compare_listings", lambda *_: iter(()))
    return request.param


@pytest.mark.usefixtures("way")
def test_no_fault_none_found(captured):
    check.check_capture(*captured)


@pytest.mark.parametrize("fault", faults)
def test_fault_in_a_graph(captured, way, fault):
    spec, graph, plan = captured
    message = "operation" if way == "lists" else "the loss differs"
    with pytest.raises(CaptureError, match=f"the captured graph is not the model: .*{message}"):
        check.check_capture(spec, faults[fault](graph), plan)


def data(**more):
    fields = {"x": {"shape": [5]}, "y": {"shape": [1]}}
    return {"source": "random", "samples": 9, "fields": fields} | more


sizes = {
    "a last batch": ({"data": data()}, 2, "data: {last_batch: drop}"),
    "uneven microbatches": (
        {"data": data(last_batch="drop"), "train": {"global_batch": 3}},
        2,
        "a number of microbatches that divides the global batch of 3",
    ),
}
ones = {
    "a branch": ("x = x * 3 if len(x) == 1 else x\nreturn self.b(self.a(x))", "aten.", 1),
    "squeeze": ("h = self.a(x).squeeze()\nreturn self.b(h)", "squeeze.default gives [8], not", 1),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("kind", ones)
@pytest.mark.parametrize("case", sizes)
def test_a_model_that_treats_one_sample_otherwise(tmp_path, kind, case):
    code, what, line = ones[kind]
    sections, usual, hint = sizes[case]
    spec, graph, plan = planned(make_spec(tmp_path, net(code), **sections))
    with pytest.raises(CaptureError) as caught:
        check.check_capture(spec, graph, plan)
    assert "for 1" in caught.value.message
    assert f"{usual}" in caught.value.message
    assert what in caught.value.message
    assert caught.value.hint == f"{hint}, or make it independent of the number of samples"
    place = caught.value.where
    assert place.file.endswith("net.py")
    assert (
        code.splitlines()[line - 1]
        in (tmp_path / "net.py").read_text().splitlines()[place.line - 1]
    )


cheap = ("dlrm", "frozen", "lstm", "quickstart")


@pytest.mark.parametrize("name", [
    name if name in cheap else pytest.param(name, marks=pytest.mark.slow)
    for name in sorted(path.stem for path in SPECS.glob("*.yaml"))
])  # fmt: skip
def test_specs_by_their_lists_alone(name, monkeypatch):
    monkeypatch.setattr(outcome, "max_elements", 0)
    assert compile(load(SPECS / f"{name}.yaml"))


tokens = {"shape": [8], "dtype": "int64", "high": 50}
small = {
    "T5": "d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0",
    "Bart": "d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, "
    "decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, pad_token_id=0",
    "Llama": "hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", small)
def test_transformers_by_their_lists_alone(name, tmp_path, monkeypatch):
    """Capture copies elsewhere than they do, and has masks that they leave to the attention."""
    monkeypatch.setattr(outcome, "max_elements", 0)
    model = f"{name}For{'CausalLM' if name == 'Llama' else 'ConditionalGeneration'}"
    code = f"""
from transformers import {name}Config, {model}
def build():
    return {model}({name}Config(vocab_size=50, {small[name]}))
"""
    of_model = {"loss": "output", "inputs": {"input_ids": "input_ids", "labels": "labels"}}
    fields = {"input_ids": tokens, "labels": tokens}
    data = {"source": "random", "samples": 8, "fields": fields}
    assert compile(make_spec(tmp_path, code, model=of_model, data=data))


torchs = {
    "attention": ("nn.MultiheadAttention(8, 2, batch_first=True)", "self.m(h, h, h)[0]"),
    "encoder": ("nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)", "self.m(h)"),
    "transformer": ("nn.Transformer(8, 2, 1, 1, 16, batch_first=True)", "self.m(h, h.relu())"),
    "spectral norm": ("nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))", "self.m(h)"),
}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow) if name == "transformer" else name for name in torchs
])  # fmt: skip
def test_modules_by_their_lists_alone(name, tmp_path, monkeypatch):
    monkeypatch.setattr(outcome, "max_elements", 0)
    init, call = torchs[name]
    sequences = {"x": {"shape": [4, 5]}, "y": {"shape": [4, 1]}}
    data = {"source": "random", "samples": 8, "fields": sequences}
    code = net(f"h = self.a(x)\nreturn self.b({call})", f"self.m = {init}")
    assert compile(make_spec(tmp_path, code, data=data))


def test_a_model_that_is_another_during_export(tmp_path, monkeypatch):
    """What the user's own lines do then is not taken for the model, where they find out."""
    monkeypatch.setattr(outcome, "max_elements", 0)
    code = net(
        "x = x * 3 if is_exporting() else x\nreturn self.b(self.a(x))",
        before="from torch.compiler import is_exporting",
    )
    with pytest.raises(CaptureError, match="the captured graph is not the model"):
        compile(make_spec(tmp_path, code))


of_precision = {
    "a limit": "h = self.a(x)\nh = h.masked_fill(h < 0, torch.finfo(h.dtype).min / 1e30)\n"
    "return self.b(h.clamp(min=-1.0) + torch.finfo(x.dtype).eps)",
    "a dtype": "return self.b(self.a(x) + torch.zeros(8, dtype=x.dtype))",
    "a cast": "return self.b(self.a(x).to(torch.float64).to(x.dtype))",
}


@pytest.mark.dist
@pytest.mark.parametrize("name", of_precision)
def test_a_graph_that_is_another_in_float64(name, tmp_path, fork_server):
    prove(make_spec(tmp_path, net(of_precision[name])), fork_server, exact=True)


first_calls = {
    "a copy of a weight": (
        "self.start = None",
        (
            "if self.start is None:\n    self.start = self.a.weight.detach().clone()\n"
            "x = x + (self.a.weight - self.start).square().sum()"
        ),
        "self.start = self.a.weight.detach().clone()",
    ),
    "a flag": (
        'self.ready = False\nself.register_buffer("k", torch.zeros(8, 5))',
        (
            "if not self.ready:\n    self.k.copy_(self.a.weight.detach())\n    self.ready = True\n"
            "x = x + self.k.sum()"
        ),
        "self.ready = True",
    ),
    "an attribute that comes to be": (
        "",
        (
            'if not hasattr(self, "start"):\n    self.start = self.a.weight.detach().clone()\n'
            "x = x + self.start.sum()"
        ),
        "def forward(self, x):",
    ),
    "a list": (
        "self.seen = []",
        (
            "if not self.seen:\n    self.seen.append(self.a.weight.detach().clone())\n"
            "x = x + self.seen[0].sum()"
        ),
        "self.seen.append(self.a.weight.detach().clone())",
    ),
}


@pytest.mark.parametrize(("init", "step", "line"), first_calls.values(), ids=first_calls)
def test_what_the_first_call_alone_does(init, step, line, tmp_path):
    """A trace has the first call; in a script every step would do as that."""
    code = net(f"{step}\nreturn self.b(self.a(x))", init)
    with pytest.raises(CaptureError, match=r"from its first call on, and computes") as raised:
        compile(make_spec(tmp_path, code))
    error = raised.value
    text = Path(error.where.file).read_text().splitlines()[error.where.line - 1]
    assert text.strip() == line


def test_a_table_of_the_first_call_is_as_good_in_later_ones(tmp_path):
    step = "if self.k is None:\n    self.k = torch.arange(5.0).cos()\nx = x + self.k"
    assert compile(make_spec(tmp_path, net(f"{step}\nreturn self.b(self.a(x))", "self.k = None")))


def test_an_error_of_the_trace_that_forward_catches(tmp_path):
    """It takes the way out that no run takes."""
    step = "try:\n    k = float(x.mean())\nexcept Exception:\n    k = 1.0\nx = x * k"
    with pytest.raises(CaptureError, match="hangs on the values of its data") as raised:
        compile(make_spec(tmp_path, net(f"{step}\nreturn self.b(self.a(x))")))
    where = raised.value.where
    line = Path(where.file).read_text().splitlines()[where.line - 1]
    assert line.strip() == "k = float(x.mean())"
