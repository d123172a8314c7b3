"""What feeds what: the data's fields, the model's arguments, the loss."""

import pytest
import torch.nn.functional as F
from bindings import bound, random_data
from jobs import make_spec
from nets import net

from ppc.errors import CaptureError
from ppc.frontend import callables
from ppc.frontend.capture.capture import capture

pytestmark = pytest.mark.torch

named = random_data(y=[1], x=[5], z=[8])


@pytest.mark.parametrize(("args", "inputs", "arguments"), [
    ("x", None, {"x": "x"}),  # by name, whatever the order
    ("a", None, {"a": "x"}),  # left over
    ("*, w", None, {"w": "x"}),
    ("m=None, *, w", None, {"w": "x"}),
    ("a=None, m=None", None, {"a": "x"}),
    ("*args", None, {"args_0": "x"}),
    ("**named", None, {"x": "x"}),
    ("a, /", None, {"a": "x"}),
    ("*, x", None, {"x": "x"}),
    ("a", ["x"], {"a": "x"}),
    ("a", {"a": "x"}, {"a": "x"}),
    ("*args", ["x"], {"args_0": "x"}),
    ("**named", {"other": "x"}, {"other": "x"}),
    ("a, b=None", ["x"], {"a": "x"}),
    ("a, *, b=None", {"a": "x"}, {"a": "x"}),
])  # fmt: skip
def test_inputs(args, inputs, arguments, tmp_path):
    name = next(iter(arguments)).removesuffix("_0")
    value = {"args": "args[0]", "other": "named['other']"}.get(name, name)
    value = "named['x']" if args == "**named" and inputs is None else value
    code = net(f"return self.b(self.a({value}))", args=args)
    model = {"inputs": inputs} if inputs else {}
    found, fields = bound(tmp_path, code, model=model, data=random_data(x=[5], y=[1]))
    assert found == arguments
    assert fields == {"x": "f32[batch, 5]", "y": "f32[batch, 1]"}


def test_several_inputs(tmp_path):
    code = net("return self.b(self.a(x) + z)", args="x, z")
    found, fields = bound(tmp_path, code, data=named)
    assert found == {"x": "x", "z": "z"}
    assert list(fields) == ["x", "z", "y"]


def test_the_one_that_is_left_over(tmp_path):
    """Whatever stands where; the spec does not say it, so the compiler does."""
    code = net("return self.b(self.a(x) + w)", args="w, x")
    spec = make_spec(tmp_path, code, data=random_data(x=[5], q=[8], y=[1]))
    graph = capture(spec)
    assert {name: str(value) for name, value in graph.calls["", 0].arguments} == {
        "w": "q", "x": "x",
    }  # fmt: skip
    assert "the field q feeds forward's w" in graph.messages[0]
    assert "model: {inputs: {w: q, ...}}" in graph.messages[0]


@pytest.mark.parametrize("names", ["keys, q, y", "q, keys, y", "y, keys, q"])
def test_fields_are_not_bound_by_their_order(names, tmp_path):
    code = net("return self.b(self.a(query) * self.a(key))", args="query, key")
    shapes = {"keys": [5], "q": [5], "y": [1]}
    data = random_data(**{name: shapes[name] for name in names.split(", ")})
    with pytest.raises(CaptureError, match=f"needs query, key; the data's fields are {names}\n"):
        capture(make_spec(tmp_path, code, data=data))


def test_the_loss_takes_the_fields_that_its_arguments_name(tmp_path):
    (tmp_path / "losses.py").write_text("def f(out, y, w):\n    return (w * (out - y) ** 2).mean()")
    data = random_data(w=[1], y=[1], x=[5])
    found, _ = bound(tmp_path, net(args="a", forward="return self.b(self.a(a))"), data=data,
                     model={"loss": "losses.py:f"})  # fmt: skip
    assert found == {"a": "x"}
    graph = capture(make_spec(tmp_path, net(), data=data, model={"loss": "losses.py:f"}))
    assert [i.field for i in graph.inputs] == ["x", "y", "w"]


def test_all_fields_by_position_where_the_model_returns_its_loss(tmp_path):
    code = net("x, y = fields\nreturn ((self.b(self.a(x)) - y) ** 2).mean()", args="*fields")
    found, _ = bound(tmp_path, code, model={"loss": "output"})
    assert found == {"fields_0": "x", "fields_1": "y"}


def test_one_field_for_two_arguments(tmp_path):
    model = {"inputs": {"p": "x", "q": "x"}}
    found, _ = bound(tmp_path, net("return self.b(self.a(p + q))", args="p, q"), model=model)
    assert found == {"p": "x", "q": "x"}


def test_names_of_fields_that_are_names_of_values(tmp_path):
    code = net("return self.b(self.a(linear))", args="linear")
    bound(tmp_path, code, data=random_data(linear=[5], y=[1]))


wrong = {
    "a missing argument": ("x, w", {}, "forward needs w; the data's fields are x, y"),
    "a missing keyword": ("x, *, w", {}, "forward needs w; the data's fields are x, y"),
    "an argument that is none": (
        "x=0", {"inputs": {"w": "x"}}, "forward does not take 'w'; it takes x",
    ),
    "too many": (
        "x", {"inputs": ["x", "y"]}, "forward does not take 2 inputs by position; it takes x",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("args", "model", "message"), wrong.values(), ids=wrong)
def test_wrong_inputs(args, model, message, tmp_path):
    with pytest.raises(CaptureError) as raised:
        capture(make_spec(tmp_path, net(args=args), model=model))
    assert message in raised.value.message
    assert raised.value.where.file.endswith("job.yaml")


returned = {
    "scalar": "return loss",
    "tuple": "return loss, out",
    "dict": "return {'loss': loss, 'out': out}",
    "object": "return types.SimpleNamespace(loss=loss, out=out)",
    "transformers": "return SequenceClassifierOutput(loss=loss, logits=out)",
}


@pytest.mark.parametrize("end", returned.values(), ids=returned)
def test_the_model_returns_its_loss(end, tmp_path):
    before = "import types"
    if "Classifier" in end:
        before = "from transformers.modeling_outputs import SequenceClassifierOutput"
    code = net(
        f"out = self.b(self.a(x))\nloss = ((out - y) ** 2).mean()\n{end}", "", "x, y", before
    )
    bound(tmp_path, code, model={"loss": "output"})


def test_the_model_returns_no_loss(tmp_path):
    with pytest.raises(
        CaptureError, match=r"job.yaml.*returned a tensor of shape \[3, 1\], not a loss"
    ):
        capture(make_spec(tmp_path, net(), model={"loss": "output"}))


losses = """
import torch.nn.functional as F

def squares(prediction, y, z):
    return ((prediction - y - z.mean(1, True)) ** 2).mean()

class Sum:
    def __call__(self, prediction, y, z):
        return (prediction - y).abs().sum()

total = Sum()
"""


@pytest.mark.parametrize(("loss", "shapes", "forward"), [
    ("mse_loss", {"x": [5], "y": [1]}, "self.b(self.a(x))"),
    ("l1_loss", {"x": [5], "y": [1]}, "self.b(self.a(x))"),
    ("binary_cross_entropy_with_logits", {"x": [5], "y": [1]}, "self.b(self.a(x))"),
    ("losses.py:squares", {"x": [5], "y": [1], "z": [4]}, "self.b(self.a(x))"),
    ("losses.py:total", {"x": [5], "y": [1], "z": [4]}, "self.b(self.a(x))"),
])  # fmt: skip
def test_losses(loss, shapes, forward, tmp_path):
    (tmp_path / "losses.py").write_text(losses)
    data = random_data(**shapes)
    if loss == "losses.py:total":
        data |= {"samples": 2}
    bound(tmp_path, net(f"return {forward}"), model={"loss": loss}, data=data)


@pytest.mark.parametrize(("logits", "labels"), [
    ("h", []),  # (batch, classes)
    ("h.view(-1, 2, 4)", [2]),  # classes last, as language models have them
    ("h.view(-1, 4, 2)", [2]),  # classes second, as torch has them
])  # fmt: skip
def test_cross_entropy(logits, labels, tmp_path):
    fields = {
        "x": {"shape": [5]},
        "y": {"shape": labels, "dtype": "int64", "low": 0, "high": 4},
    }
    data = {"source": "random", "samples": 9, "fields": fields}
    code = net(f"h = self.a(x)\nreturn {logits}")
    bound(tmp_path, code, model={"loss": "cross_entropy"}, data=data)


def test_ambiguous_cross_entropy(tmp_path):
    fields = {"x": {"shape": [5]}, "y": {"shape": [4], "dtype": "int64", "low": 0, "high": 4}}
    data = {"source": "random", "samples": 9, "fields": fields}
    code = net("return self.c(self.a(x)).view(-1, 4, 4)", "self.c = nn.Linear(8, 16)")
    with pytest.raises(
        CaptureError, match="could take its classes from the second or from the last"
    ):
        capture(make_spec(tmp_path, code, model={"loss": "cross_entropy"}, data=data))


@pytest.mark.parametrize(("loss", "message"), [
    ("nope.nope:loss", "cannot import nope.nope:loss: ModuleNotFoundError: No module named 'nope'"),
    ("json:nope", "json has no 'nope'\nhint: it has dump, "),
    ("json:__version__", "json:__version__ is not callable"),
    ("nll_loss", "the model cannot be captured: "),
])  # fmt: skip
def test_wrong_losses(loss, message, tmp_path):
    with pytest.raises(CaptureError) as raised:
        capture(make_spec(tmp_path, net("return self.b(self.a(x)).T"), model={"loss": loss}))
    assert message in str(raised.value)
    assert raised.value.where


def test_losses_that_torch_has():
    """Those that are known to `ppc check`, which loads no torch; one more is for the next torch."""
    found = {n for n in dir(F) if n.endswith(("_loss", "kl_div")) or "cross_entropy" in n}
    assert found - {"linear_cross_entropy"} == set(callables.losses) - {"linear_cross_entropy"}


def test_a_loss_that_this_torch_lacks(tmp_path, monkeypatch):
    monkeypatch.delattr(F, "huber_loss")
    with pytest.raises(CaptureError, match=r"'huber_loss' is not in torch\.nn\.functional"):
        capture(make_spec(tmp_path, net(), model={"loss": "huber_loss"}))


def test_float64(tmp_path):
    _, found = bound(tmp_path, net(), train={"precision": "fp64"})
    assert found == {"x": "f64[batch, 5]", "y": "f64[batch, 1]"}


def test_a_loss_past_a_default_and_a_field_that_nobody_reads(tmp_path):
    text = "def f(out, y, power=2, w=1):\n    return (w * (out - y).abs() ** power).mean()"
    (tmp_path / "losses.py").write_text(text)
    data = random_data(w=[1], unread=[3], y=[1], x=[5])
    spec = make_spec(tmp_path, net(), data=data, model={"loss": "losses.py:f"})
    assert [i.field for i in capture(spec).inputs] == ["x", "y", "w"]


def test_a_field_that_torchs_loss_does_not_take(tmp_path):
    data = random_data(x=[5], y=[1], unread=[1])
    assert [i.field for i in capture(make_spec(tmp_path, net(), data=data)).inputs] == ["x", "y"]


def test_two_fields_for_one_argument_of_the_loss(tmp_path):
    data = random_data(x=[5], p=[1], q=[1])
    what = r"the loss mse_loss takes target; which field is that\? the model leaves p, q\n"
    with pytest.raises(CaptureError, match=f"{what}hint: a function whose arguments have the"):
        capture(make_spec(tmp_path, net(), data=data))
