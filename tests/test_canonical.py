"""One form for what is the same: identities and dead ops go, in-place becomes functional where it
may, buffers are written next to their new value, inputs stay as they came."""

import pytest
import torch
import torch.nn.functional as F
from jobs import make_spec, prove
from nets import net

from ppc.analysis.invariants.graph import verify_graph
from ppc.check.outcome import run_ops
from ppc.check.real import read_state
from ppc.errors import CaptureError
from ppc.frontend.capture.build import build_model, state_tensors
from ppc.frontend.capture.capture import capture

pytestmark = pytest.mark.torch


class Case:
    """A model with mean squared error, captured; `agrees` runs its graph beside it, twice."""

    def __init__(self, folder, forward, init="", loss="mse_loss"):
        args = "x, y" if loss == "output" else "x"
        model = {"loss": loss, "coupled": "accept"}
        spec = make_spec(folder, net(forward, init, args), model=model)
        self.graph, self.model = capture(spec), build_model(spec)
        self.loss = loss
        verify_graph(self.graph)

    def targets(self):
        named = [op.target.split(".")[1] for op in self.graph.ops]
        return [name for name in named if name != "mse_loss"]

    def agrees(self):
        graph, model = self.graph, self.model
        state = {name: t.detach().clone() for name, t in read_state(graph, model).items()}
        for seed in range(2):
            torch.manual_seed(seed)
            x, y = torch.randn(3, 5), torch.randn(3, 1)
            with torch.no_grad():
                values = run_ops(graph.ops, graph.canonical, state, {"x": x, "y": y}, 3)
                torch.manual_seed(seed)
                x, y = torch.randn(3, 5), torch.randn(3, 1)
                out = model(x, y) if self.loss == "output" else F.mse_loss(model(x), y)
            assert torch.equal(values[graph.outputs[0][1]], out)
        for name, tensor in state_tensors(model):
            assert torch.equal(state[name], tensor), name
        return True


identities = {
    "to the same dtype": "self.a(x).to(torch.float32).float()",
    "times one": "1 * self.a(x) / 1.0",
    "all of a slice": "self.a(x)[:, :]",
    "a view of the same shape": "self.a(x).view(-1, 8).reshape(-1, 8)",
    "expand to the same shape": "self.a(x).expand(-1, -1)",
    "dropout of nothing": "nn.functional.dropout(self.a(x), 0.0)",
    "dropout in evaluation": "nn.functional.dropout(self.a(x), 0.5, False)",
    "a piece without elements": "torch.cat([torch.zeros(0), self.a(x)], 1)",
    "an assertion": "(torch._assert(len(x) > 0, 'empty'), self.a(x))[1]",
}


@pytest.mark.parametrize("forward", identities.values(), ids=identities)
def test_identities(forward, tmp_path):
    case = Case(tmp_path, f"return self.b({forward})")
    assert case.targets() == ["linear", "linear"]
    assert case.agrees()


kept = {
    "to another dtype": ("self.a(x).double().float()", ["to", "to"]),
    "a part": ("nn.functional.pad(self.a(x)[:, 1:], (0, 1))", ["slice", "pad"]),
    "plus zero": ("self.a(x) + 0.0", ["add"]),  # -0.0 becomes 0.0
    "times one, of whole numbers": ("self.a(x.long() * 1.0)", ["to", "mul"]),
    "clone": ("self.a(x).clone()", ["clone"]),
    "pieces with elements": ("torch.cat([self.a(x), x[:, :0]], 1)", ["slice", "cat"]),
}


@pytest.mark.parametrize(("forward", "targets"), kept.values(), ids=kept)
def test_no_identities(forward, targets, tmp_path):
    case = Case(tmp_path, f"return self.b({forward})")
    assert sorted(case.targets()) == sorted([*targets, "linear", "linear"])
    assert case.agrees()


def test_integers_plus_zero(tmp_path):
    case = Case(tmp_path, "return self.b(self.a(x)) * (torch.arange(1) + 0 + 1)")
    assert case.targets().count("add") == 1
    assert case.agrees()


def test_an_identity_that_stops_the_gradient_stays(tmp_path):
    """A view made under no_grad has no gradient, and neither has what is computed from it."""
    case = Case(
        tmp_path, "h = self.a(x)\nwith torch.no_grad():\n    h = h.view(-1, 8)\nreturn self.b(h)"
    )
    assert "view" in case.targets()
    assert not case.graph.values["view"].requires_grad


def test_an_identity_on_frozen_values_goes(tmp_path):
    case = Case(tmp_path, "with torch.no_grad():\n    h = self.a(x).view(-1, 8)\nreturn self.b(h)")
    assert "view" not in case.targets()


def test_dead_ops_go(tmp_path):
    case = Case(tmp_path, "x.sin().cos()\nreturn self.b(self.a(x))")
    assert case.targets() == ["linear", "linear"]


def test_random_ops_stay(tmp_path):
    """Dropped, they would shift what is drawn after them."""
    case = Case(tmp_path, "torch.randn(3)\nreturn self.b(nn.functional.dropout(self.a(x), 0.3))")
    assert "randn" in case.targets()


functional = {
    "method": "h = self.a(x)\nh.relu_().mul_(2)\nreturn self.b(h)",
    "function": "h = self.a(x)\nnn.functional.silu(h, inplace=True)\nreturn self.b(h)",
    "operator": "h = self.a(x)\nk = h\nh += 1\nreturn self.b(k)",
    "module": "return self.b(self.m(self.a(x)))",
    "inputs": "x.mul_(2)\nreturn self.b(self.a(x))",
    "inputs that the loss reads": "y.mul_(2)\nreturn ((self.b(self.a(x)) - y) ** 2).mean()",
    "in no_grad": "with torch.no_grad():\n    h = self.a(x)\n    h.mul_(2)\nreturn self.b(h)",
}


@pytest.mark.parametrize("forward", functional.values(), ids=functional)
def test_functional(forward, tmp_path):
    loss = "output" if "mean" in forward else "mse_loss"
    case = Case(tmp_path, forward, "self.m = nn.ReLU(inplace=True)", loss)
    assert not any(name.endswith("_") for name in case.targets())
    assert case.agrees()


in_place = {
    "a view, later read whole": "h = self.a(x)\nh[:, 1:3] = 0\nreturn self.b(h)",
    "a view of a view": "h = self.a(x)\nh.view(-1, 2, 4)[:, 0].mul_(2)\nreturn self.b(h)",
    "whole, a view read": "h = self.a(x)\nv = h[:, 2:]\nh.add_(1)\nreturn self.b(h) + v.sum()",
    "both": "h = self.a(x)\nv = h[:, 2:]\nh.add_(1)\nv.mul_(3)\nreturn self.b(h) + v.sum()",
    "fill": "h = self.a(x)\nv = h.t()\nv.fill_(2.0)\nreturn self.b(h)",
    "an input's view": "x[:, 0] = 1\nreturn self.b(self.a(x))",
    "an input's view, twice": "x[:, 0] = 1\nx[:, 1] += x[:, 0]\nreturn self.b(self.a(x))",
    "what times one gave": "h = self.a(x)\nk = h * 1\nk[:, 0] = 5\nreturn self.b(h) + self.b(k)",
    "what times one got": "h = self.a(x)\nk = h * 1\nh[:, 0] = 5\nreturn self.b(h) + self.b(k)",
    "what a cast to the same dtype gave": "h = self.a(x)\nh.float()[:, 0] = 5\nreturn self.b(h)",
    "a wider operand": "h = self.a(x)\nh += x.double()[:, :1]\nreturn self.b(h)",
    "another dtype": "h = (x[:, :1] * 0).long()\nh += 2\nreturn self.b(self.a(x)) * h",
    "a literal": "k = torch.tensor([1.0, 2.0])\nk[0] = 3\nreturn self.b(self.a(x)) * k.sum()",
    "a long literal": "k = torch.tensor([1.0] * 20)\nk[0] = 3\nreturn self.b(x[:, :1] * k[:8])",
}  # fmt: skip


@pytest.mark.parametrize("forward", in_place.values(), ids=in_place)
def test_in_place(forward, tmp_path):
    assert Case(tmp_path, forward).agrees()


def test_inputs_are_copied_before_they_are_written(tmp_path):
    case = Case(tmp_path, "x[:, 0] = 1\nreturn self.b(self.a(x))")
    assert case.targets()[0] == "clone"
    assert all("x" not in op.mutates for op in case.graph.ops)


buffers = {
    "assigned": "self.n = 0.9 * self.n + 0.1 * h.mean(0).detach()",
    "assigned, then read": "self.n = 0.9 * self.n + 0.1 * h.mean(0).detach()\nh = h - self.n",
    "read, then assigned": "h = h - self.n\nself.n = self.n + h.mean(0).detach()",
    "computed, read, then assigned": "n = self.n + h.mean(0).detach()\nh -= self.n\nself.n = n",
    "assigned, never read": "self.n = h.mean(0).detach()",
    "assigned with a gradient, never read": "self.n = h.mean(0)",
    "added to": "self.n += h.mean(0).detach()",
    "copied to": "with torch.no_grad():\n    self.n.copy_(h.mean(0))",
    "lerp": "with torch.no_grad():\n    self.n.lerp_(h.mean(0), 0.1)",
    "out": "with torch.no_grad():\n    torch.div(h.mean(0), 2, out=self.n)",
    "a part": "with torch.no_grad():\n    self.n[1:3] = h.mean(0)[1:3]",
    "by a norm": "h = self.norm(h)",
}


@pytest.mark.parametrize("step", buffers.values(), ids=buffers)
def test_buffers(step, tmp_path):
    init = "self.register_buffer('n', torch.ones(8))\nself.norm = nn.BatchNorm1d(8)"
    case = Case(tmp_path, f"h = self.a(x)\n{step}\nreturn self.b(h)", init)
    assert case.agrees()
    assert any(op.mutates for op in case.graph.ops)


def test_norms_write_their_statistics(tmp_path):
    """The schema of batch_norm keeps quiet about it."""
    forward = "return self.b(self.m(self.a(x)))"
    case = Case(tmp_path, forward, "self.m = nn.BatchNorm1d(8)")
    (op,) = [op for op in case.graph.ops if "batch_norm" in op.target]
    assert op.mutates == ("m.running_mean", "m.running_var")
    case = Case(tmp_path, forward, "self.m = nn.BatchNorm1d(8, track_running_stats=False)")
    assert not any(op.mutates for op in case.graph.ops)


@pytest.mark.parametrize("value", ["h.mean(1)", "h.mean(0).double()"])
def test_buffers_keep_shape_and_dtype(value, tmp_path):
    init = "self.register_buffer('n', torch.ones(8))"
    with pytest.raises(CaptureError, match=r"forward gives the buffer n another shape or dtype"):
        Case(tmp_path, f"h = self.a(x)\nself.n = {value}.detach()\nreturn self.b(h)", init)


def test_an_update_stands_next_to_its_value(tmp_path):
    """In the module that owns the buffer, not at the end, where a cut would put it elsewhere."""
    step = "self.n = self.n + h.mean(0).detach()"
    init = "self.register_buffer('n', torch.ones(8))"
    case = Case(tmp_path, f"h = self.a(x)\n{step}\nreturn self.b(h.sin())", init)
    assert case.targets() == ["linear", "mean", "detach", "add", "copy_", "sin", "linear"]


def test_buffers_of_a_module_called_twice(tmp_path):
    assert Case(
        tmp_path, "return self.b(self.m(self.m(self.a(x))))", "self.m = nn.BatchNorm1d(8)"
    ).agrees()


def test_the_count_of_a_norm_called_twice_is_read_by_its_name(tmp_path):
    """In its second call too: the value that the first call made is not to be seen there."""
    init = "self.m = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))"
    case = Case(tmp_path, "return self.b(self.m(self.m(self.a(x))))", init)
    counts = [op for op in case.graph.ops if op.target == "aten.add_.Tensor"]
    assert [str(op.args[0]) for op in counts] == ["m.1.num_batches_tracked"] * 2
    assert case.agrees()


def test_literals_are_written_out_when_small(tmp_path):
    forward = "return self.b(self.a(x)) * torch.tensor({}).sum()"
    small = Case(tmp_path, forward.format("[1.0, float('inf')]"))
    assert "tensor" in small.targets()
    assert not small.graph.saved
    large = Case(tmp_path, forward.format("[0.5] * 17"))
    assert "tensor" not in large.targets()
    assert large.graph.saved


fills = {
    "exponential_": "torch.empty_like(h).exponential_()",
    "uniform_": "torch.empty_like(h).uniform_(-0.1, 0.1)",
    "bernoulli_": "h.new_empty((len(h), 1)).bernoulli_(0.9)",
    "copy_": "torch.empty(len(h), 8).copy_(h)",
    "fill_": "(h * 2).fill_(x.mean())",
    "zero_": "(h * 2).zero_()",
}


@pytest.mark.parametrize(("name", "fill"), fills.items(), ids=fills)
def test_fills_stay_in_place(name, fill, tmp_path):
    """Python has no method that fills and is not in place."""
    case = Case(tmp_path, f"h = self.a(x)\nreturn self.b(h + {fill})")
    assert name in case.targets()
    assert case.agrees()


@pytest.mark.dist
@pytest.mark.parametrize("call", ["nn.functional.gumbel_softmax(h)", fills["fill_"]])
def test_fills_in_scripts(call, fork_server, tmp_path):
    code, model = net(f"h = self.a(x)\nreturn self.b({call} + h)"), {"coupled": "accept"}
    prove(make_spec(tmp_path, code, model=model), fork_server)


def test_powers_in_place(tmp_path):
    """Of the overloads of pow, the one whose arguments have the same types."""
    case = Case(tmp_path, "h = 1 + self.a(x)\nh.pow_(2)\nreturn self.b(h)")
    assert "pow" in case.targets()
    assert case.agrees()
