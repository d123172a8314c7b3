"""What a trace would get wrong without a word is refused, at the user's own line."""

import logging
import sys
from pathlib import Path

import pytest
import torch
from jobs import make_spec
from nets import net

from ppc.errors import CaptureError, Complaints
from ppc.frontend.capture.capture import capture
from ppc.pipeline import plan as check

pytestmark = pytest.mark.torch


def refusal(folder, code, **sections):
    """The complaint, and the user's text in the line that it names."""
    with pytest.raises(CaptureError) as raised:
        capture(make_spec(folder, code, **sections))
    error = raised.value
    line = Path(error.where.file).read_text().splitlines()[error.where.line - 1]
    return str(error).split(": ", 1)[1], line.strip()


def test_hooks_on_gradients(tmp_path):
    step = "h.register_hook(lambda grad: -grad)"
    message, line = refusal(tmp_path, net(f"h = self.a(x)\n{step}\nreturn self.b(h)"))
    assert message.startswith("capture would lose this hook on a gradient")
    assert line == step


@pytest.mark.parametrize(("init", "owner"), [
    ("self.a.register_full_backward_hook(lambda *_: None)", "a"),
    ("self.a.weight.register_hook(lambda grad: -grad)", "a"),
    ("self.register_full_backward_pre_hook(lambda *_: None)", "the model"),
])  # fmt: skip
def test_hooks_of_the_factory(init, owner, tmp_path):
    message, line = refusal(tmp_path, net(init=init))
    assert message.startswith(f"capture would lose the hooks on gradients of {owner}\nhint: ")
    assert line == init


def test_a_buffer_of_another_shape(tmp_path):
    code = net("self.k = self.a(x).detach()\nreturn self.b(self.k)", REGISTERED)
    message, line = refusal(tmp_path, code)
    assert message.startswith(
        "forward gives the buffer k another shape or dtype, float32[3, 8] instead of float32[8]\n"
        "hint: self.k.copy_(...) keeps both"
    )
    assert line == "def forward(self, x):"


REGISTERED = 'self.register_buffer("k", torch.zeros(8))'


def test_what_was_patched_is_as_before(tmp_path):
    before = (
        "apply" in vars(torch.autograd.function._SingleLevelFunction),
        torch.utils.checkpoint._checkpoint_without_reentrant_generator,
        torch.nn.init._no_grad_trunc_normal_,
        torch.utils.swap_tensors,
        torch.Tensor.register_hook,
        torch.get_default_dtype(),
        logging.root.manager.disable,
    )
    capture(make_spec(tmp_path, net(), train={"precision": "fp64"}))
    refusal(tmp_path, net("return self.b(self.a(x)) * x.sum().item()"))
    assert before == (
        "apply" in vars(torch.autograd.function._SingleLevelFunction),
        torch.utils.checkpoint._checkpoint_without_reentrant_generator,
        torch.nn.init._no_grad_trunc_normal_,
        torch.utils.swap_tensors,
        torch.Tensor.register_hook,
        torch.get_default_dtype(),
        logging.root.manager.disable,
    )


values = {
    "if": "if h.sum() > 0:\n    h = -h",
    "item": "h = h * x.sum().item()",
    "int": "h = h * int(x.sum())",
    "float, used": "h = h * float(x[0, 0])",
    "tolist": "h = h * x[0].tolist()[1]",
    "mask": "h = h + h[h[:, 0] > 0].sum()",
    "nonzero": "h = h + h.nonzero().sum()",
    "unique": "h = h + h.unique().sum()",
    "loop": "for _ in range(int(x[0, 0])):\n    h = h * 2",
}


@pytest.mark.parametrize("step", values.values(), ids=values)
def test_values_of_the_data(step, tmp_path, capsys):
    message, line = refusal(tmp_path, net(f"h = self.a(x)\n{step}\nreturn self.b(h)"))
    assert message.splitlines() == [
        "what forward computes hangs on the values of its data, not just on their shapes",
        "hint: torch.where instead of `if`, all elements instead of x[mask], no .item()",
    ]
    assert line == step.splitlines()[0]
    assert capsys.readouterr().err == ""  # torch has a lot to print


def test_autocast_in_float16(tmp_path):
    step = "with torch.autocast('cpu', torch.float16):\n    h = self.a(x)"
    message, line = refusal(tmp_path, net(f"{step}\nreturn self.b(h.float())"))
    assert message.startswith("an autocast region in float16: small gradients vanish in it")
    assert line == "with torch.autocast('cpu', torch.float16):"


@pytest.mark.parametrize("call", ["torch.autograd.grad(h.sum(), x)", "h.sum().backward()"])
def test_a_backward_inside_forward(call, tmp_path):
    step = f"x = x.requires_grad_()\nh = self.a(x)\n{call}"
    message, line = refusal(tmp_path, net(f"{step}\nreturn self.b(h)"))
    assert message.startswith("forward goes back by torch.autograd, which no trace follows")
    assert "a module of its own for it, and model: {leaf: [its path]}" in message
    assert line == call


def test_operations_of_others(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text("""
import torch

@torch.library.custom_op("theirs::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@twice.register_fake
def _(x):
    return torch.empty_like(x)
""")
    before = """
import theirs

class Inner(nn.Module):
    def forward(self, x):
        return torch.ops.theirs.twice(x)
"""
    code = net("return self.b(self.m(self.a(x)))", "self.m = Inner()", before=before)
    message, line = refusal(tmp_path, code)
    assert "theirs.twice.default in m is an operation of theirs's own" in message
    assert line == "return torch.ops.theirs.twice(x)"


def test_plain_tensors_that_forward_changes(tmp_path):
    code = net("self.k = self.k + 1\nreturn self.b(self.a(x)) * self.k", "self.k = torch.ones(())")
    message, line = refusal(tmp_path, code)
    assert message.startswith("forward assigns k, which it also reads, and which is no buffer")
    assert 'self.register_buffer("k", ...)' in message
    assert line == "self.k = self.k + 1"


def test_plain_tensors_that_forward_only_writes(tmp_path):
    code = net("self.k = self.a(x)\nreturn self.b(self.k)", "self.k = torch.ones(())")
    capture(make_spec(tmp_path, code))


@pytest.mark.parametrize("hidden", ["[nn.Linear(8, 8)]", "[lambda h: h * torch.randn(8)]"])
def test_random_tensors_that_the_model_does_not_own(hidden, tmp_path):
    init = f"self.m = {hidden}\nself.r = [torch.randn(8)]"
    message, line = refusal(tmp_path, net("return self.b(self.a(x) * self.r[0])", init))
    assert message.startswith("forward reads a tensor that the factory drew")
    assert line == "return self.b(self.a(x) * self.r[0])"


wrong = {
    "attribute": ("return self.b(self.a(x)) + self.nope", "AttributeError: "),
    "shape": ("return self.b(x)", "RuntimeError: a and b must have same reduction dim"),
    "own error": ("raise NotImplementedError('on\\ntwo lines')", "NotImplementedError: on"),
}


@pytest.mark.parametrize(("forward", "text"), wrong.values(), ids=wrong)
def test_errors_of_forward(forward, text, tmp_path, caplog):
    message, line = refusal(tmp_path, net(forward))
    assert message.startswith(f"the model cannot be captured: {text}")
    assert len(message.splitlines()) == 1
    assert line == forward
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_the_line_is_in_the_module_that_failed(tmp_path):
    """Even if that is installed, and not the user's."""
    package = tmp_path / "site-packages" / "their_layers"
    package.mkdir(parents=True)
    text = "class L(torch.nn.Module):\n    def forward(self, x):\n        return x.no\n"
    (package / "__init__.py").write_text(f"import torch\n\n{text}")
    sys.path.insert(0, str(package.parent))
    try:
        code = net(
            "return self.b(self.m(self.a(x)))",
            "self.m = their_layers.L()",
            before="import their_layers",
        )
        message, line = refusal(tmp_path, code)
    finally:
        sys.path.remove(str(package.parent))
        del sys.modules["their_layers"]
    assert "has no attribute 'no'" in message
    assert line == "return x.no"


def test_the_line_is_the_users_where_torch_fails(tmp_path):
    message, line = refusal(
        tmp_path, net("return self.b(self.m(self.a(x)))", "self.m = nn.Linear(3, 3)")
    )
    assert "same reduction dim" in message
    assert line == "return self.b(self.m(self.a(x)))"


def test_nothing_to_train(tmp_path):
    with pytest.raises(CaptureError, match=r"job\.yaml:.*there is nothing to train"):
        capture(make_spec(tmp_path, net(init="self.requires_grad_(False)")))


def test_a_parameter_that_forward_writes(tmp_path):
    forward = "with torch.no_grad():\n    self.a.weight.clamp_(-1, 1)\nreturn self.b(self.a(x))"
    with pytest.raises(CaptureError, match=r"net.py:15: forward writes to the parameter a.weight"):
        capture(make_spec(tmp_path, net(forward)))


def test_parameters_by_data(tmp_path):
    step = "self.a.weight.data.clamp_(-0.1, 0.1)"
    message, line = refusal(tmp_path, net(f"{step}\nreturn self.b(self.a(x))"))
    assert message.startswith("forward, or what it calls, reads a tensor past the trace")
    assert line == step


def test_transforms(tmp_path):
    step = "h = torch.vmap(lambda row: row * row.sum())(self.a(x))"
    message, line = refusal(tmp_path, net(f"{step}\nreturn self.b(h)"))
    assert message.startswith("torch.vmap, or its like, has no form in a script")
    assert line == step


def test_lengths_of_ctc(tmp_path):
    step = "loss = nn.functional.ctc_loss(h, y.long(), torch.full((n,), 5), torch.full((n,), 1))"
    forward = f"n = len(x)\nh = self.a(x).expand(5, n, 8).log_softmax(2)\n{step}\nreturn loss"
    message, line = refusal(tmp_path, net(forward, args="x, y"), model={"loss": "output"})
    assert message == (
        "ctc_loss reads the lengths that it is given\nhint: tuples of numbers where lengths are "
        "fixed: (9,) * len(x); where they are data, a module of your own that calls it, in the "
        "spec's model.leaf"
    )
    assert line == step


def test_packed_sequences(tmp_path):
    call = "self.g(pack(x.view(-1, 1, 5), torch.full((len(x),), 1), batch_first=True))"
    code = net(
        f"h = {call}[1][0]\nreturn self.b(h)",
        "self.g = nn.GRU(5, 8)",
        before="from torch.nn.utils.rnn import pack_padded_sequence as pack",
    )
    message, line = refusal(tmp_path, code)
    assert message.startswith("a packed sequence is as long as the values of its data say")
    assert line == f"h = {call}[1][0]"


@pytest.mark.parametrize("owner", ["self.g", "self.g[0]"])
def test_generators_of_the_users(owner, tmp_path):
    made = "torch.Generator().manual_seed(0)"
    init = f"self.g = {made if owner == 'self.g' else f'[{made}]'}"
    step = f"h = self.a(x) + torch.randn(8, generator={owner})"
    message, line = refusal(tmp_path, net(f"{step}\nreturn self.b(h)", init))
    assert "an object that no script has, like a torch.Generator" in message
    assert line == step


modules = {
    "TorchScript": ("self.c = torch.jit.script(nn.Linear(8, 8))", "c is TorchScript"),
    "spectral_norm": ("nn.utils.spectral_norm(self.a)", "a has a tensor that a hook of torch."),
    "prune": (
        "import torch.nn.utils.prune as p\np.l1_unstructured(self.a, 'weight', 2)",
        "a has a tensor that a hook of torch.nn.utils.prune",
    ),
    "momentum=None": ("self.n = nn.BatchNorm1d(8, momentum=None)", "n averages over all steps"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # some of these are deprecated
@pytest.mark.parametrize(("init", "text"), modules.values(), ids=modules)
def test_modules(init, text, tmp_path):
    with pytest.raises(CaptureError) as raised:
        capture(make_spec(tmp_path, net(init=init)))
    assert raised.value.message.startswith(text)
    assert raised.value.where.file.endswith("job.yaml")
    assert raised.value.hint


def test_a_factory_that_exits(tmp_path):
    with pytest.raises(CaptureError, match=r"net.py:build failed: SystemExit: 3") as raised:
        capture(make_spec(tmp_path, "import sys\ndef build():\n    sys.exit(3)\n"))
    assert raised.value.where.line == 6


def test_a_dtype_that_the_precision_changes(tmp_path):
    code = net("return self.b(self.a(x)) + self.c(torch.ones(5, dtype=torch.float32))",
               "self.c = nn.Linear(5, 1)")  # fmt: skip
    with pytest.raises(CaptureError, match="precision fp64 made parameters and data float64"):
        check(make_spec(tmp_path, code, train={"precision": "fp64"}))


def test_a_complex_parameter_under_fp64(tmp_path):
    init = "self.w = nn.Parameter(torch.ones(8, 8, dtype=torch.cfloat))"
    code = net("return self.b((torch.fft.fft(self.a(x)) @ self.w).real)", init)
    with pytest.raises(CaptureError, match="precision fp64 made parameters and data float64"):
        check(make_spec(tmp_path, code, train={"precision": "fp64"}))


def test_a_norm_of_one_sample(tmp_path):
    code = net("return self.b(self.n(self.a(x)))", "self.n = nn.BatchNorm1d(8)")
    with pytest.raises(Complaints) as raised:
        check(make_spec(tmp_path, code, parallel={"pipeline": 1, "microbatches": 4}))
    first, last = map(str, raised.value.errors)
    what = "the batch norm n (net.py:14) would have one value for each channel: "
    assert f"{what}the global batch of 4 makes 4 microbatches, some of 1 sample" in first
    assert first.endswith("hint: microbatches: 2")
    assert f"{what}a last batch of 2 makes 4 microbatches, some of 1 sample" in last
    assert last.endswith("hint: last_batch: drop")


@pytest.mark.parametrize("made", ["self.a.weight.t()", "2 * self.a.weight.t()"])
def test_what_the_factory_computes_from_parameters(made, tmp_path):
    message, line = refusal(
        tmp_path, net("return self.b(self.a(x) + x @ self.w)", f"self.w = {made}")
    )
    assert message.startswith("forward reads w, which the factory computed from parameters, once")
    assert line == "return self.b(self.a(x) + x @ self.w)"


@pytest.mark.parametrize("step", ["self.k.mul_(2)", "self.k[0] = 1.0", "self.k += x.mean(0)[:1]"])
def test_plain_tensors_that_forward_writes_in_place(tmp_path, step):
    """Torch refuses some in words of its own, and takes a write as lost by others."""
    code = net(f"{step}\nreturn self.b(self.a(x)) * self.k", "self.k = torch.ones(1)")
    message, line = refusal(tmp_path, code, parallel={"microbatches": 1})
    assert message.startswith("forward writes to k, which is no buffer")
    assert 'self.register_buffer("k", ...)' in message
    assert line == step
    kept = code.replace("self.k = torch.ones(1)", 'self.register_buffer("k", torch.ones(1))')
    capture(make_spec(tmp_path, kept, parallel={"microbatches": 1}))
