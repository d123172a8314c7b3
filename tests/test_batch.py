"""Sizes that grow with the batch are found by two captures; what else depends on the number of
samples is refused, or fixes the size of microbatches."""

from pathlib import Path

import pytest
from jobs import make_spec
from nets import net

from ppc.errors import CaptureError
from ppc.frontend.capture.batch import batch_sizes
from ppc.frontend.capture.capture import capture
from ppc.ir.graph import Dim, TensorMeta

pytestmark = pytest.mark.torch


def graph_of(folder, forward, init="", **sections):
    return capture(make_spec(folder, net(forward, init), **sections))


def random_data(**sections):
    fields = {"x": {"shape": [5]}, "y": {"shape": [1]}}
    return {"source": "random", "samples": 12, "fields": fields} | sections


def test_sizes_are_unlike_those_of_the_data():
    """A size of 3 or 7 in the data would be taken for the batch."""
    assert batch_sizes({"x": TensorMeta((5, 4), "float32")}) == (3, 7)
    assert batch_sizes({"x": TensorMeta((3, 11), "float32")}) == (5, 7)


def test_values(tmp_path):
    forward = "h = self.a(x)\nreturn self.b(h) + h.T.sum()"
    graph = graph_of(tmp_path, forward, model={"coupled": "accept"})
    assert {name: str(meta) for name, meta in graph.values.items()} == {
        "x": "f32[batch, 5]",
        "y": "f32[batch, 1]",
        "linear": "f32[batch, 8]",
        "linear_1": "f32[batch, 1]",
        "numpy_t": "f32[8, batch]",
        "sum_1": "f32[]",
        "add": "f32[batch, 1]",
        "mse_loss": "f32[]",
    }


multiples = {
    "repeat": ("self.b(self.a(x).repeat(3, 1)).view(3, -1).mean(0)[:, None]", {0: 3}),
    "flatten": ("self.b(self.a(x).view(-1)[: 8 * len(x)].view(len(x), 8))", {0: 8}),
    "product": ("self.b(self.a(x[:, None].expand(-1, 4, -1).reshape(-1, 5)))[::4]", {0: 4}),
    "a number": ("self.b(self.a(x)) * len(x) / (2 * len(x))", {}),
}


@pytest.mark.parametrize(("forward", "sizes"), multiples.values(), ids=multiples)
def test_multiples(forward, sizes, tmp_path):
    graph = graph_of(tmp_path, f"return {forward}")
    dims = [meta.shape for meta in graph.values.values()]
    assert all(any(Dim(k) in shape[i : i + 1] for shape in dims) for i, k in sizes.items())


def test_numbers_that_are_the_batch(tmp_path):
    graph = graph_of(tmp_path, "return self.b(self.a(x)) * len(x) / (2 * len(x))")
    assert [op.args[1] for op in graph.ops if op.target[5:8] in ("mul", "div")] == [Dim(), Dim(2)]


def test_floats_that_are_the_batch(tmp_path):
    """As a library counts rows: `total = 0.0; total += x.shape[0]`."""
    graph = graph_of(tmp_path, "return self.b(self.a(x)) / (0.0 + 2 * len(x))")
    assert [op.args[1] for op in graph.ops if op.target.startswith("aten.div")] == [Dim(2)]


different = {
    "a size": (
        "return self.b(torch.cat([self.a(x), self.a(x)[:1]]))[:-1]",
        "f32[4, 8] becomes f32[8, 8], whose size is no multiple of the batch",
    ),
    "a number": ("return self.b(self.a(x)) / (len(x) + 1)", "aten.div.Tensor gets other arguments"),
    "a float": ("return self.b(self.a(x)) * (1 / len(x))", "aten.mul.Tensor gets other arguments"),
    "a float beside whole numbers": (
        "return self.b(self.a(x)) + (x > 0).sum() * float(len(x))",
        "aten.mul.Tensor gets other arguments",
    ),
    "a branch": ("return self.b(self.a(x) if len(x) < 4 else -self.a(x))", " becomes "),
    "a loop": (
        "return self.b(sum(self.a(r)[None] for r in x) + 0 * x[:, :1])",
        "gives 3 and 7 results",
    ),
    "a list": (
        "return self.b(torch.stack([self.a(row) for row in x.unbind()]))",
        "gives 3 and 7 results",
    ),
    "a longer loop": ("return self.b(sum(self.a(x) for _ in range(len(x))))", " becomes "),
    "a literal": (
        "return self.b(self.a(x)) * torch.tensor([float(len(x))])",
        "ppc.tensor.default gets other arguments",
    ),
    "a long literal": (
        "return self.b(self.a(x)) * torch.tensor([float(len(x))] * 20).mean()",
        "a tensor is made of other numbers",
    ),
}


@pytest.mark.parametrize(("forward", "how"), different.values(), ids=different)
def test_others_are_refused(forward, how, tmp_path):
    with pytest.raises(CaptureError) as raised:
        graph_of(tmp_path, forward)
    assert raised.value.message.startswith("the model does not compute the same for 3 and for 7")
    assert how in raised.value.message
    line = Path(raised.value.where.file).read_text().splitlines()[raised.value.where.line - 1]
    assert line.strip() == forward


def test_ops_after_the_loss_count(tmp_path):
    forward = """
loss = ((self.b(self.a(x)) - y) ** 2).mean()
for _ in range(len(x)): self.n.add_(1)
return loss
"""
    code = net(forward, "self.register_buffer('n', torch.zeros(()))", "x, y")
    with pytest.raises(CaptureError, match=r"\d+ operations become \d+"):
        capture(make_spec(tmp_path, code, model={"loss": "output"}))


def test_others_fix_the_size_if_all_microbatches_have_it(tmp_path):
    forward = "return self.b(self.a(x)) / (len(x) + 1)"
    graph = graph_of(tmp_path, forward, data=random_data(last_batch="drop"))
    assert graph.values["x"].shape == (2, 5)
    (message,) = graph.messages
    assert message.startswith("compiled for microbatches of just 2 samples: the model does not ")


@pytest.mark.parametrize("sections", [
    {"data": random_data(last_batch="keep")},
    {"data": random_data(last_batch="drop"), "parallel": {"microbatches": 3}},
])  # fmt: skip
def test_others_are_refused_if_microbatches_differ_in_size(sections, tmp_path):
    with pytest.raises(CaptureError, match="does not compute the same"):
        graph_of(tmp_path, "return self.b(self.a(x)) / (len(x) + 1)", **sections)


def test_a_size_that_is_the_batch_by_chance(tmp_path):
    """8 features at a batch of 3 or 7 are no multiple, and a weight of 21 is one only once."""
    init = "self.c = nn.Linear(8, 21)\nself.d = nn.Linear(21, 8)"
    graph = graph_of(tmp_path, "return self.b(self.d(self.c(self.a(x))))", init)
    assert graph.values["linear_1"].shape == (Dim(), 21)
