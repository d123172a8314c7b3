"""What ended in "a limit of ppc" is refused at the user's own line, with a remedy that works."""

import json
from pathlib import Path

import pytest
import torch
from jobs import make_spec
from nets import net

from ppc.errors import CaptureError, PlanError
from ppc.frontend.capture.user import location
from ppc.frontend.load import load
from ppc.pipeline import plan as check

pytestmark = pytest.mark.torch

LOSS = {"model": {"loss": "net.py:loss"}}


@pytest.fixture(autouse=True)
def no_hooks_stay():
    yield
    hooks = vars(torch.nn.modules.module)
    for kind in ("forward", "forward_pre", "backward", "backward_pre"):
        hooks[f"_global_{kind}_hooks"].clear()


def refusal(folder, code, kind=CaptureError, **sections):
    """The complaint, and the user's text in the line that it names."""
    with pytest.raises(kind) as raised:
        check(make_spec(folder, code, **sections))
    error = raised.value
    assert error.where.line, str(error)
    line = Path(error.where.file).read_text().splitlines()[error.where.line - 1]
    return error, line.strip()


def test_branches_on_the_number_of_samples(tmp_path):
    """Microbatches have 2 samples here, and no trace has."""
    forward = "h = self.a(x)\nif len(x) == 2:\n    h = h * 2\nreturn self.b(h)"
    error, line = refusal(tmp_path, net(forward))
    assert error.message == (
        "the model does not compute the same for 2 and for 3 samples: aten.mul.Tensor runs for 2 "
        "alone"
    )
    assert line == "h = h * 2"


def test_branches_of_a_trace(tmp_path):
    forward = "h = self.a(x)\nif len(x) > 3:\n    h = h * 2\nreturn self.b(h)"
    error, line = refusal(tmp_path, net(forward))
    assert error.message.endswith("aten.mul.Tensor runs for 7 alone")
    assert line == "h = h * 2"


def test_branches_of_a_loss(tmp_path):
    loss = (
        "def loss(o, y):\n    d = (o - y).square()\n    return d.mean() * (2 if len(o) == 2 else 1)"
    )
    error, line = refusal(tmp_path, net(before=loss), **LOSS)
    assert error.message.startswith("the model does not compute the same for 2 and for 3 samples")
    assert line == "def loss(o, y):"


FUNCTION = """
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 2
"""
THROUGH = net("return self.b(Twice.apply(self.a(x)))", before=FUNCTION)
registered = {
    "tensor": "h.register_hook(lambda grad: grad * 2)",
    "weight": "self.a.weight.register_hook(lambda grad: grad * 2)",
    "after": "self.a.weight.register_post_accumulate_grad_hook(lambda p: None)",
    "module": "self.a.register_full_backward_hook(lambda *_: None)",
    "several": "torch.autograd.graph.register_multi_grad_hook([h], lambda grads: None)",
    "kept": "with torch.autograd.graph.saved_tensors_hooks(abs, abs): h = h * h",
}


@pytest.mark.parametrize("step", registered.values(), ids=registered)
def test_hooks_that_forward_registers(step, tmp_path):
    error, line = refusal(tmp_path, net(f"h = self.a(x)\n{step}\nreturn self.b(h)"))
    assert error.message == "capture would lose this hook on a gradient"
    assert error.hint == "a torch.autograd.Function whose backward has its effect"
    assert line == step


def test_a_function_in_place_of_a_hook(tmp_path):
    check(make_spec(tmp_path, THROUGH))


hooks = {
    "post": ("lambda p: None", "register_post_accumulate_grad_hook", None),
    "partial": ("partial(double, k=2)", "register_hook", "def double(grad, k):"),
    "object": ("Double()", "register_hook", "def __call__(self, grad):"),
}


@pytest.mark.parametrize(("hook", "register", "expected"), hooks.values(), ids=hooks)
def test_hooks_that_the_factory_registers(hook, register, expected, tmp_path):
    before = """
from functools import partial

def double(grad, k):
    return grad * k

class Double:
    def __call__(self, grad):
        return grad * 2
"""
    init = f"self.a.weight.{register}({hook})"
    error, line = refusal(tmp_path, net(init=init, before=before))
    assert error.message == "capture would lose the hooks on gradients of a"
    assert line == (expected or init)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_all_modules(kind, tmp_path):
    step = f"torch.nn.modules.module.register_module_{kind}_hook(lambda *_: None)"
    error, line = refusal(tmp_path, net(before=step))
    assert error.message == "capture would lose this hook of every module, which no script has"
    assert line == step


def test_a_hook_of_one_module(tmp_path):
    check(make_spec(tmp_path, net(init="self.a.register_forward_hook(lambda m, i, o: o * 2)")))


@pytest.mark.parametrize("step", [
    "self.a.requires_grad_(False)",
    "self.a.weight.requires_grad_(False)",
    "self.a.weight.requires_grad = False",
])  # fmt: skip
def test_parameters_that_forward_freezes(step, tmp_path):
    error, line = refusal(tmp_path, net(f"{step}\nreturn self.b(self.a(x))"))
    assert error.message.startswith("forward changes requires_grad of a.weight: what is trained is")
    assert line == ("def forward(self, x):" if " = " in step else step)


@pytest.mark.parametrize("code", [
    net(init="self.a.requires_grad_(False)"),
    net("return self.b(nn.functional.linear(x, self.a.weight.detach(), self.a.bias))"),
    net("x.requires_grad_()\nreturn self.b(self.a(x).requires_grad_())"),
])  # fmt: skip
def test_parameters_that_are_frozen_in_other_ways(code, tmp_path):
    check(make_spec(tmp_path, code))


def test_parameters_that_forward_makes(tmp_path):
    made = "if not hasattr(self, 'c'):\n    self.c = nn.Linear(8, 8)"
    error, line = refusal(tmp_path, net(f"{made}\nreturn self.b(self.c(self.a(x)))"))
    assert error.message == "forward makes the parameter c.weight, which no optimizer knows"
    assert line == "def forward(self, x):"
    code = net("return self.b(self.c(self.a(x)))", "self.c = nn.Linear(8, 8)")
    check(make_spec(tmp_path, code))


def test_a_forward_that_fails_when_it_runs_again(tmp_path):
    error, line = refusal(tmp_path, net("del self.k\nreturn self.b(self.a(x))", "self.k = 3"))
    assert "AttributeError: 'Net' object has no attribute 'k'" in error.message
    assert line == "del self.k"


@pytest.mark.parametrize(
    "region", ["with torch.inference_mode():", "with torch.inference_mode(True):"]
)
def test_inference_mode_is_no_grad(region, tmp_path):
    """Gradients are compared with those of the model as it really runs."""
    code = net(
        f"{region}\n    k = self.c(x)\nreturn self.b(self.a(x) + k)", "self.c = nn.Linear(5, 8)"
    )
    check(make_spec(tmp_path, code))


def test_inference_tensors_that_a_backward_needs(tmp_path):
    code = net("with {}:\n    k = x * 2\nreturn self.b(self.a(k))")
    error, line = refusal(tmp_path, code.replace("{}", "torch.inference_mode()"))
    assert "Inference tensors cannot be saved for backward" in error.message
    assert error.hint == "torch.no_grad() in place of torch.inference_mode()"
    assert line == "return self.b(self.a(k))"
    check(make_spec(tmp_path, code.replace("{}", "torch.no_grad()")))


@pytest.mark.parametrize("made", ["nn.Parameter(torch.ones(1))", "nn.Linear(1, 1)"])
def test_parameters_beside_the_model(made, tmp_path):
    use = "(extra(o) if isinstance(extra, nn.Module) else o * extra)"
    loss = f"extra = {made}\n\ndef loss(o, y):\n    return ({use} - y).square().mean()\n"
    error, line = refusal(tmp_path, net(before=loss), **LOSS)
    assert error.message.startswith("extra is trained by nothing: a gradient comes to it")
    assert line == f"extra = {made}"
    forward = f"o, extra = self.b(self.a(x)), self.extra\nreturn ({use} - y).square().mean()"
    code = net(forward, f"self.extra = {made}", "x, y")
    check(make_spec(tmp_path, code, model={"loss": "output"}))


def test_numpy(tmp_path):
    step = "k = torch.from_numpy(x.numpy() * 2)"
    error, line = refusal(tmp_path, net(f"{step}\nreturn self.b(self.a(k))"))
    assert error.hint == "torch's own operations in place of numpy's"
    assert line == step
    check(make_spec(tmp_path, net("return self.b(self.a(x * 2))")))


@pytest.mark.parametrize("given", ["self.b(self.a(x)), x", "{'y': self.b(self.a(x))}", "None"])
def test_outputs_that_are_no_tensors(given, tmp_path):
    with pytest.raises(CaptureError, match=r"returned a \w+, and mse_loss takes a tensor"):
        check(make_spec(tmp_path, net(f"return {given}")))
    if given != "None":
        key = "0" if given.startswith("self") else "'y'"
        loss = f"def loss(o, y):\n    return nn.functional.mse_loss(o[{key}], y)"
        check(make_spec(tmp_path, net(f"return {given}", before=loss), **LOSS))


losses = {
    "l.backward()": ("forward goes back by torch.autograd", "leave it out: scripts go back from"),
    "l = l * l.item()": ("what forward computes hangs on the values", "torch.where instead of"),
}


@pytest.mark.parametrize("step", losses)
def test_lines_of_a_loss(step, tmp_path):
    """Torch notes none of what is called in no module: then it is the loss's first."""
    loss = f"def loss(o, y):\n    l = (o - y).square().mean()\n    {step}\n    return l"
    error, line = refusal(tmp_path, net(before=loss), **LOSS)
    message, hint = losses[step]
    assert error.message.startswith(message)
    assert error.hint.startswith(hint)
    assert line in (step, "def loss(o, y):")


def test_sparse_tensors(tmp_path):
    step = "h = torch.sparse.mm(torch.eye(8).to_sparse(), self.a(x).t()).t()"
    error, line = refusal(tmp_path, net(f"{step}\nreturn self.b(h)"))
    assert error.message.startswith("forward makes a tensor of layout sparse_coo")
    assert line == step
    check(make_spec(tmp_path, net("return self.b((torch.eye(8) @ self.a(x).t()).t())")))


def fields(**described):
    return {"source": "random", "samples": 16, "fields": {"x": {"shape": [5]}, **described}}


CLASSES = net("return self.c(self.a(x))", "self.c = nn.Linear(8, 3)")
TOKENS = net("return self.b(self.e(t).mean(1))", "self.e = nn.Embedding(3, 8)", "t")
wrong = {
    "labels of floats": (CLASSES, "y", {"shape": []}, "float32", "y: {dtype: int64, high: 3}"),
    "labels below": (
        CLASSES, "y", {"shape": [], "dtype": "int64", "low": -9, "high": 0},
        "and there are 3 classes", "low: 0",
    ),
    "tokens of floats": (TOKENS, "t", {"shape": [4]}, "float32", "t: {dtype: int64, high: 3}"),
}  # fmt: skip


def described(name, field):
    """Data and loss of a job whose labels or tokens are so."""
    others = {"y": {"shape": [1]}} if name == "t" else {}
    loss = "cross_entropy" if name == "y" else "mse_loss"
    return {"data": fields(**others, **{name: field}), "model": {"loss": loss}}


@pytest.mark.parametrize(("code", "name", "field", "told", "hint"), wrong.values(), ids=wrong)
def test_fields_that_do_not_fit(code, name, field, told, hint, tmp_path):
    error, line = refusal(tmp_path, code, **described(name, field))
    assert f"it is given the field {name}" in error.message
    assert error.message.endswith(told)
    assert error.hint == hint
    assert error.where.file.endswith("job.yaml" if name == "y" else "net.py")
    assert name == "y" or line.startswith("return self.b(self.e(t)")
    right = {"shape": field["shape"], "dtype": "int64", "high": 3}
    check(make_spec(tmp_path, code, **described(name, right)))


@pytest.mark.parametrize(("code", "name", "shape", "things"), [
    (CLASSES, "y", [], "classes"), (TOKENS, "t", [4], "rows of the embedding"),
])  # fmt: skip
def test_numbers_that_may_be_too_large(code, name, shape, things, tmp_path):
    """Whatever the samples hold that are tried."""
    field = {"shape": shape, "dtype": "int64", "high": 1000}
    sections = described(name, field)
    error, _ = refusal(tmp_path, code, **sections)
    assert error.message.endswith(f"holds numbers below 1000, and there are 3 {things}")
    assert error.hint == f"high: 3, or 1000 {things}"
    check(make_spec(tmp_path, code, **described(name, field | {"high": 3})))


def test_whole_numbers_where_floats_belong(tmp_path):
    data = fields(y={"shape": [1]}) | {}
    data["fields"]["x"] = {"shape": [5], "dtype": "int64", "high": 3}
    error, line = refusal(tmp_path, net(), data=data)
    assert "it is given the field x (" in error.message
    assert error.hint == "x: {dtype: float32}"
    assert line == "return self.b(self.a(x))"


def test_the_names_of_files(tmp_path):
    code = net("raise TypeError(f'{type(self)} is odd')")
    error, _ = refusal(tmp_path, code)
    assert error.message == "the model cannot be captured: TypeError: <class 'net.py.Net'> is odd"


def test_places_are_seen_from_where_one_stands(tmp_path, monkeypatch):
    """A graph has them relative to the spec, which may be elsewhere."""
    (tmp_path / "net.py").write_text("")
    monkeypatch.chdir(tmp_path.parent)
    assert str(location("net.py:3", tmp_path)) == f"{tmp_path.name}/net.py:3"


def test_cuts_that_part_readers_without_gradient(tmp_path, recwarn):
    """The user's own are refused; the planner takes none such."""
    forward = """
h = self.d(self.c(self.a(x)).relu())
with torch.no_grad():
    w = self.a.weight.mean()
return self.b(h) * w
"""
    code = net(forward, "self.c = nn.Linear(8, 8)\nself.d = nn.Linear(8, 8)")
    sections = {"cluster": {"devices_per_node": 2}, "parallel": {"pipeline": 2, "cuts": ["c"]}}
    with pytest.raises(PlanError, match=r"stage 1 reads a\.weight without gradient") as raised:
        check(make_spec(tmp_path, code, **sections))
    assert raised.value.hint.startswith("cuts: auto")
    check(make_spec(tmp_path, code, **sections | {"parallel": {"pipeline": 2}}))
    assert not [str(warning.message) for warning in recwarn.list]


def test_forward_may_ask_for_gradients(tmp_path, recwarn):
    """Where losses of batches and microbatches are compared, too."""
    forward = "h = self.a(x)\nh.retain_grad()\nreturn self.b(h)"
    check(make_spec(tmp_path, net(forward)))
    forward = "with torch.enable_grad():\n    h = self.a(x)\nreturn self.b(h)"
    check(make_spec(tmp_path, net(forward)))
    assert not [str(warning.message) for warning in recwarn.list]


def test_a_pipeline_that_would_part_them(tmp_path):
    code = net("h = self.a(x)\nreturn self.b(h) * self.a.weight.detach().mean()")
    cluster, parallel = {"devices_per_node": 2}, {"pipeline": 2}
    with pytest.raises(PlanError, match="no 2 stages can be cut") as raised:
        check(make_spec(tmp_path, code, cluster=cluster, parallel=parallel))
    assert raised.value.hint == "pipeline: 1"
    assert raised.value.where.file.endswith("job.yaml")
    tree = json.loads((tmp_path / "job.yaml").read_text())
    tree["cluster"]["devices_per_node"], tree["parallel"]["pipeline"] = 1, 1
    (tmp_path / "job.yaml").write_text(json.dumps(tree))
    check(load(tmp_path / "job.yaml"))
