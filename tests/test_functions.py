"""Autograd functions of the user's: one op each, their class in the script, their own backward."""

import ast
import sys

import pytest
from emitted import emit
from jobs import make_spec, plant, prove
from nets import net

from ppc.check.text import check_text
from ppc.errors import CaptureError, InternalError
from ppc.frontend.capture.capture import capture
from ppc.ir.function import users_class
from ppc.pipeline import compile
from ppc.run.verify import verify

pytestmark = pytest.mark.torch

SIGN = """
class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.ones_like(x).copysign(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * (x.abs() <= 1)
"""
STEPS = "h = Sign.apply(self.a(x))\nreturn self.b(h)"

# A module-level number, a helper that reads another, an import of torch's, and `math`.
MIXED = """
import math
from torch.autograd.function import once_differentiable
from torch.nn import functional as func

SLOPE, LEVELS = 2.0, (0.5, 1.0)
KIND = torch.float32

def bound(x):
    return math.pi * LEVELS[0] * torch.tanh(x)

class Base(torch.autograd.Function):
    factor = 0.5

class Mixed(Base):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight, scale, name, none=None):
        ctx.scale = scale[0] * Mixed.factor
        ctx.save_for_backward(x, weight)
        ctx.need = ctx.needs_input_grad
        with torch.no_grad():
            half = (x > 0).to(KIND)
        ctx.mark_non_differentiable(half)
        return bound(x) * weight * ctx.scale, half, None if none is None else 1

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _, __):
        x, weight = ctx.saved_tensors
        gain = SLOPE * func.relu(grad) * ctx.scale
        to_weight = (gain * x).sum(0) if ctx.need[1] else None
        return gain * weight, to_weight, None, None, None
"""
MIXED_STEPS = """
h, half, none = Mixed.apply(self.a(x), self.w, (0.5, 1), "plain", None)
assert none is None
h = h + half * h
return self.b(h)
"""

# Without ctx in forward, with a default, a tuple of one, and another function inside.
SETUP = (
    SIGN
    + """
class Setup(torch.autograd.Function):
    @staticmethod
    def forward(x, factor=2.0):
        return (Sign.apply(x) * factor,)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.factor = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * ctx.factor * torch.cos(x), None

apply = Setup.apply
"""
)

RANDOM = """
class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.floor(4 * x + torch.rand_like(x)) / 4

    @staticmethod
    def backward(ctx, grad):
        return grad
"""

models = {
    "straight through": net(STEPS, before=SIGN),
    "mixed": net(MIXED_STEPS, "self.w = nn.Parameter(torch.ones(8))", before=MIXED),
    "setup": net("(h,) = apply(self.a(x), factor=3.0)\nreturn self.b(h)", before=SETUP),
    "random": net("h = Round.apply(self.a(x))\nreturn self.b(h)", before=RANDOM),
    "no_grad": net(
        "h = self.a(x)\nwith torch.no_grad():\n    s = Sign.apply(h)\nreturn self.b(h * s)",
        before=SIGN,
    ),
    "view": net(
        "s = View.apply(x)\ns.mul_(2)\nreturn self.b(self.a(x))",
        before=RANDOM.replace("Round", "View").replace(
            "torch.floor(4 * x + torch.rand_like(x)) / 4", "x"
        ),
    ),
    "batch": net(
        "h = self.a(x)\nh = Scale.apply(h, 2 * len(h))\nreturn self.b(h)",
        before="""
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, size):
        ctx.size = size
        return x.reshape(size, -1).reshape(x.shape)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad.reshape(ctx.size, -1).reshape(grad.shape), None
""",
    ),
}  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize("code", models.values(), ids=models)
def test_parity_over_two_stages(tmp_path, fork_server, code):
    """The cut is behind the function, so its gradient comes from the other stage."""
    spec = make_spec(
        tmp_path, code, cluster={"devices_per_node": 2},
        parallel={"pipeline": 2, "cuts": ["b"]},
    )  # fmt: skip
    prove(spec, fork_server, steps=2)


@pytest.mark.dist
@pytest.mark.parametrize("more", [{"data": 2}, {"recompute": "stage"}])
def test_parity_otherwise(tmp_path, fork_server, more):
    devices = {"devices_per_node": 2 * more.get("data", 1)}
    parallel = {"pipeline": 2, "cuts": ["b"], "microbatches": 1} | more
    code = models["random" if "recompute" in more else "mixed"]
    prove(make_spec(tmp_path, code, cluster=devices, parallel=parallel), fork_server, steps=2)


@pytest.mark.dist
def test_another_backward_is_found(tmp_path, fork_server, monkeypatch):
    """The proof is of the backward, too."""
    spec = make_spec(tmp_path, models["straight through"])
    from ppc.run import verify as module

    write = module.write

    def spoil(files, folder):
        write(files, folder)
        plant(folder / "rank0.py", "return grad * 3 * (x", "return grad * 2 * (x")

    monkeypatch.setattr(module, "write", spoil)
    found = verify(spec.path, steps=1, exact=True, timeout_s=60, fork_server=fork_server)
    assert not found.ok


def test_it_is_one_op_and_its_class_is_in_the_script(tmp_path):
    emitted = emit(make_spec(tmp_path, models["straight through"]))
    ops = [op for op in emitted.job.graph.ops if users_class(op.target)]
    assert [users_class(op.target) for op in ops] == ["Sign"]
    script = emitted.script()
    first, *rest = SIGN.strip().splitlines()
    assert "\n".join([f"{first}  # net.py:6", *rest]) in script
    assert "h = Sign.apply(self.a(x))" in script
    assert "Needs PyTorch alone." in " ".join(script.split())


def test_what_a_class_reads_comes_with_it(tmp_path):
    script = emit(make_spec(tmp_path, models["mixed"])).script()
    for text in (
        "\nimport math\n",
        "\nimport torch.nn.functional as func\n",
        "\nfrom torch.autograd.function import once_differentiable\n",
        "\nKIND = torch.float32\n",
        "\nSLOPE = 2.0\n",
        "\nLEVELS = (0.5, 1.0)\n",
        "\ndef bound(x):\n",
    ):
        assert script.count(text) == 1, text
    assert script.index("class Base(") < script.index("class Mixed(Base):")
    assert 'Mixed.apply(self.a(x), self.w, (0.5, 1), "plain", None)' in script
    assert "h, half, _ = " in script


def test_a_stage_without_it_has_none_of_it(tmp_path):
    spec = make_spec(
        tmp_path, models["straight through"], cluster={"devices_per_node": 2},
        parallel={"pipeline": 2, "cuts": ["b"]},
    )  # fmt: skip
    first, second = emit(spec).scripts
    assert "class Sign" in first
    assert "Sign" not in second


NUMPY = "import numpy as np\nimport torch\n" + SIGN.replace("grad * 3", "grad * float(np.cos(0))")


@pytest.mark.dist
def test_a_class_that_needs_more_is_imported(tmp_path, fork_server):
    """From a file beside the model, as operations of one's own are."""
    (tmp_path / "signs.py").write_text(NUMPY)
    spec = make_spec(
        tmp_path, net(STEPS, before="from signs import Sign"), cluster={"devices_per_node": 2},
        parallel={"pipeline": 2, "cuts": ["b"]},
    )  # fmt: skip
    prove(spec, fork_server, steps=2)
    files = {file.path: file.text for file in compile(spec)}
    assert files["signs.py"] == NUMPY
    assert "\nfrom signs import Sign\n" in files["rank0.py"]
    assert "Needs PyTorch and signs.py, beside it." in " ".join(files["rank0.py"].split())
    assert "signs" not in files["rank1.py"]
    nodes = [n for n in ast.walk(ast.parse(files["rank1.py"])) if isinstance(n, ast.Import)]
    modules = {alias.name.partition(".")[0] for node in nodes for alias in node.names}
    assert modules - sys.stdlib_module_names == {"torch"}


def test_large_models_are_compared_by_operations(tmp_path, monkeypatch):
    for module in ("capture", "text"):
        monkeypatch.setattr(f"ppc.check.{module}.is_comparable", lambda *_: False)
    emitted = emit(make_spec(tmp_path, models["mixed"]))
    wrong = emitted.script().replace("math.pi * LEVELS[0]", "math.pi * LEVELS[1]")
    assert wrong != emitted.script()
    with pytest.raises(InternalError, match="operation"):
        check_text(emitted.spec, emitted.job.graph, emitted.job.units, [wrong], 2)


def test_it_costs_what_torch_keeps(tmp_path):
    code = net(STEPS, before=SIGN.replace("copysign(x)", "copysign(x) @ torch.ones(8, 8)"))
    (op,) = [op for op in capture(make_spec(tmp_path, code)).ops if users_class(op.target)]
    assert op.saved_bytes.per_sample == 4 * 8
    assert op.flops.per_sample == 2 * 8 * 8


def test_bf16(tmp_path):
    """Forward runs under autocast, whose dtypes the graph has."""
    code = net(STEPS, before=SIGN.replace("torch.ones_like(x).copysign(x)", "x @ torch.ones(8, 8)"))
    emitted = emit(make_spec(tmp_path, code, train={"precision": "bf16"}))
    (op,) = [op for op in emitted.job.graph.ops if users_class(op.target)]
    assert emitted.job.graph.values[op.outputs[0]].dtype == "bfloat16"


def refusal(folder, before, forward=STEPS, **sections):
    """Message, hint and the user's line."""
    with pytest.raises(CaptureError) as raised:
        compile(make_spec(folder, net(forward, before=before), **sections), folder / "out")
    error = raised.value
    lines = (folder / error.where.file).read_text().splitlines()
    return error.message, error.hint, lines[error.where.line - 1].strip()


CALL = "h = Sign.apply(self.a(x))"
GLOBAL = SIGN.replace(
    "return torch.ones", "global TIMES\n        TIMES = 1\n        return torch.ones"
)
refused = {
    "closure": (
        "def make(slope):"
        + SIGN.replace("\n", "\n    ").replace("grad * 3", "grad * slope")
        + "\n    return Sign\n\nSign = make(2.0)\n",
        "no script can hold Sign (net.py:6): Sign reads slope of the function around it",
        "Sign at the top level of its file, slope as argument of apply",
    ),
    "library": (
        NUMPY,
        "no script can hold Sign (net.py:8): it reads np, the module numpy",
        "a file of its own beside the model's for it, which the scripts then import",
    ),
    "tensor": (
        f"W = torch.ones(8)\n{SIGN.replace('grad * 3', 'grad * W')}",
        "no script can hold Sign (net.py:7): it reads W, a tensor",
        "a file of its own beside the model's for it, which the scripts then import",
    ),
    "changed": (
        SIGN.replace("    @static", "    gain = 2\n\n    @static", 1).replace(" 3 ", " Sign.gain ")
        + "\nSign.gain = 3\n",
        "no script can hold Sign (net.py:6): Sign.gain is not what its source says",
        "hand what is chosen later over as an argument of apply",
    ),
    "replaced": (
        SIGN + "\nSign.backward = staticmethod(lambda ctx, grad: grad)\n",
        "no script can hold Sign (net.py:6): Sign.backward is not what its source says",
        "hand what is chosen later over as an argument of apply",
    ),
    "global": (
        GLOBAL,
        "no script can hold Sign (net.py:6): it changes the global TIMES",
        "ctx, which keeps values",
    ),
    "in place": (
        SIGN.replace("return torch.ones_like(x).copysign(x)", "return x.neg_()"),
        "Sign writes over what it is given",
        "a new tensor as its result, without ctx.mark_dirty",
    ),
    "results": (
        SIGN.replace("return torch.ones_like(x).copysign(x)", "return [[x + 1]]"),
        "forward of Sign gives something else than tensors",
        "a tensor, or a tuple of tensors, numbers and None",
    ),
    "random backward": (
        SIGN.replace("grad * 3", "grad * torch.rand_like(grad)"),
        "the backward of Sign draws random numbers, which would differ in every layout",
        "draw them in forward, where the layer is seeded, and keep them by ctx",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("before", "message", "hint"), refused.values(), ids=refused)
def test_refusals(tmp_path, before, message, hint):
    found = refusal(tmp_path, before)
    assert found == (message, hint, CALL)


def test_values_in_backward(tmp_path):
    before = SIGN.replace(
        "return grad * 3", "if grad.sum() > 0:\n            grad = -grad\n        return grad"
    )
    message, hint, line = refusal(tmp_path, before)
    assert message == "what the backward of Sign computes hangs on values, not just on shapes"
    assert hint == "torch.where instead of `if`, no .item()"
    assert line == "if grad.sum() > 0:"


def test_values_in_forward(tmp_path):
    before = SIGN.replace(
        "return torch.ones", "if x.sum() > 0:\n            x = -x\n        return torch.ones"
    )
    message, _, line = refusal(tmp_path, before)
    assert message.startswith("what forward computes hangs on the values of its data")
    assert line == "if x.sum() > 0:"


def test_a_backward_that_fails(tmp_path):
    message, _, _ = refusal(
        tmp_path, SIGN.replace("return grad * 3 * (x.abs() <= 1)", "return grad, grad")
    )
    assert message.startswith("the backward of Sign failed: RuntimeError: function SignBackward")


@pytest.mark.parametrize(("value", "kind"), [("self.b", "Linear"), ("{'a': 1}", "dict")])
def test_arguments_that_no_script_can_write(tmp_path, value, kind):
    call = f"h = Sign.apply(self.a(x), {value})"
    message, hint, line = refusal(tmp_path, SIGN, f"{call}\nreturn self.b(h)")
    assert message == f"Sign.apply is given a {kind}, which cannot be written in a script"
    assert hint == "tensors, numbers, text, None and tuples of them as arguments"
    assert line == call


def test_a_name_that_the_script_has(tmp_path):
    before = "def step(x):\n    return x\n" + SIGN.replace("grad * 3", "step(grad)")
    message, hint, _ = refusal(tmp_path, before)
    assert message == "step means something else in the script that Sign goes into"
    assert hint == "give it another name"


def test_a_module_of_the_same_name(tmp_path):
    """Two files of the user's may each have a Sign."""
    (tmp_path / "signs.py").write_text("import torch\n" + SIGN)
    before = (
        "import signs\n\nclass Sign(nn.Module):\n    def forward(self, x):\n"
        "        return signs.Sign.apply(x) + 1"
    )
    code = net("return self.b(self.s(self.a(x)))", "self.s = Sign()", before=before)
    script = emit(make_spec(tmp_path, code)).script()
    assert "class Sign(torch.autograd.Function):  # signs.py:3" in script
    assert "class SignS(nn.Module):" in script
