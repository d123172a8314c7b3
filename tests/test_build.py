"""The factory runs without values and really: both models agree, and what cannot be repeated is
saved."""

import random

import numpy as np
import pytest
import torch
from inits import Init, distance
from jobs import make_spec
from nets import net
from safetensors.torch import load

from ppc.errors import CaptureError
from ppc.frontend.capture.build import build_fake, build_model, state_tensors
from ppc.frontend.capture.capture import capture
from ppc.frontend.capture.private import is_fake

pytestmark = pytest.mark.torch

not_recorded = {
    "a random number shapes it": "self.w = nn.Parameter(torch.ones(2) * torch.rand(1).item())",
    "a random number decides": "self.k = 1 if torch.rand(()) > 0.5 else 2",
    "a file is read": "self.w = nn.Parameter(torch.load('{folder}/w.pt'))",
    "a dry run": "self.l = nn.LazyLinear(3); self.l(torch.zeros(1, 4))",
    "a check of values": "self.l = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))",
    "built on meta": """
self.l = nn.utils.skip_init(nn.Linear, 2, 2, bias=False)
nn.init.normal_(self.l.weight)
""",
}


@pytest.mark.parametrize("code", not_recorded.values(), ids=not_recorded)
def test_saved_as_a_whole(code, tmp_path):
    torch.save(torch.ones(3), tmp_path / "w.pt")
    spec = make_spec(tmp_path, net(init=code.format(folder=tmp_path)))
    graph = capture(spec)
    saved = load(graph.saved)
    assert saved.keys() == dict(state_tensors(build_model(spec))).keys()
    assert all(torch.equal(saved[n], t) for n, t in state_tensors(build_model(spec)))
    assert "the factory cannot be recorded, " in graph.messages[0]


def test_a_broken_factory(tmp_path):
    with pytest.raises(CaptureError, match=r"net.py:11: net.py:build failed: ZeroDivisionError: "):
        build_fake(make_spec(tmp_path, net(init="self.k = 1 / 0")))


def test_lazy_without_size(tmp_path):
    with pytest.raises(CaptureError, match=r"l.weight has no size yet\nhint: call lazy modules"):
        build_fake(make_spec(tmp_path, net(init="self.l = nn.LazyLinear(3)")))


unrepeatable = {
    "own generator": "torch.randn(20, generator=torch.Generator().manual_seed(3))",
    "own generator, in place": "torch.empty(20).normal_(generator=torch.Generator())",
    "own generator, truncated": (
        "nn.init.trunc_normal_(torch.empty(20), generator=torch.Generator().manual_seed(3))"
    ),
    "numpy": "torch.from_numpy(numpy.random.randn(20))",
    "numpy, copied in": "torch.zeros(20).copy_(torch.from_numpy(numpy.random.randn(20)))",
    "permutation": "torch.randperm(20).float()",
    "integers": "torch.randint(9, (20,))",
    "complex": "torch.randn(20, dtype=torch.complex64)",
}


@pytest.mark.parametrize("code", unrepeatable.values(), ids=unrepeatable)
def test_saved(code, tmp_path):
    init = f"import numpy\nself.w = {code}\nself.register_buffer('c', self.w.clone())\ndel self.w"
    spec = make_spec(tmp_path, net(init=init))
    graph = capture(spec)
    assert graph.parameters["c"].recipe.saved
    assert torch.equal(load(graph.saved)["c"], build_model(spec).c)
    assert "the first values of c " in graph.messages[0]
    assert "weights.safetensors" in graph.messages[0]


def test_saved_tensors_may_share_memory(tmp_path):
    code = "w = torch.randperm(9); self.register_buffer('v', w); self.register_buffer('w', w[2:4])"
    saved = load(capture(make_spec(tmp_path, net(init=code))).saved)
    assert torch.equal(saved["v"][2:4], saved["w"])


def test_small_arrays_are_written_out(tmp_path):
    init = Init(tmp_path, "import numpy\nself.w = nn.Parameter(torch.from_numpy(numpy.eye(3)))")
    assert init.targets("w") == ["tensor"]
    assert torch.equal(init.drawn("w"), torch.eye(3, dtype=torch.float64))


def test_what_shares_a_draw_with_something_saved_is_saved(tmp_path):
    init = Init(tmp_path, """
r = torch.randn(8)
self.v = nn.Parameter(r)
self.w = nn.Parameter(r[torch.randperm(8)])
""")  # fmt: skip
    assert init.recipes["v"].saved
    assert not init.recipes["a.weight"].saved


def test_tied_arrays_stay_tied(tmp_path):
    init = Init(tmp_path, """
self.w = nn.Parameter(torch.frombuffer(bytearray(80), dtype=torch.float32))
self.v = self.w
""")  # fmt: skip
    assert init.built.model.w is init.built.model.v
    assert is_fake(init.built.model.w)


def test_two_builds_draw_the_same_from_python_and_numpy(tmp_path):
    spec = make_spec(
        tmp_path, net(init="import random, numpy\nself.k = random.random() + numpy.random.rand()")
    )
    first = build_model(spec).k
    random.random(), np.random.rand()  # noqa: NPY002  # the generator that factories use
    assert build_fake(spec).model.k == first


def test_building_leaves_the_generators_alone(tmp_path):
    spec = make_spec(tmp_path, net(init="import random; self.k = random.random(), torch.rand(1)"))
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    build_model(spec)
    build_fake(spec)
    assert torch.equal(torch.rand(1), expected)


conversions = (
    "self.double()",
    "self.to(torch.float64)",
    "self.a.half()",
    "self.float()",
    "self.to('cpu')",
    "self.bfloat16()",
)


@pytest.mark.parametrize("code", conversions)
def test_converted(code, tmp_path):
    init = Init(tmp_path, f"self.tied = self.a.weight\n{code}")
    weight = init.built.model.a.weight
    assert weight.dtype == init.real["tied"].dtype
    assert weight is init.built.model.tied
    assert not init.recipes["tied"].saved
    assert init.drawn("tied").dtype == weight.dtype


def test_float64(tmp_path):
    init = Init(tmp_path, """
self.w = nn.Parameter(torch.randn(64, 64, dtype=torch.float32))
self.tied = self.w
self.l = nn.LSTM(3, 4, dtype=torch.float32)
self.register_buffer("n", torch.tensor(3))
""", train={"precision": "fp64"})  # fmt: skip
    model = init.built.model
    assert model.w.dtype == torch.float64
    assert model.w is model.tied
    assert model.n.dtype == torch.int64
    assert model.l._flat_weights[0] is model.l.weight_ih_l0
    assert distance(init.drawn("w"), init.real["w"]) < 0.05


def test_no_values(tmp_path):
    init = Init(tmp_path, "self.k = torch.ones(3)")
    assert all(is_fake(tensor) for _, tensor in state_tensors(init.built.model))


def test_the_largest_models_are_recorded(tmp_path):
    spec = make_spec(tmp_path, net(init="self.big = nn.Linear(2**18, 2**18)"))  # 256 GiB
    assert build_fake(spec).recipes["big.weight"].ops[0].target == "aten.uniform_.default"


def test_never_initialised(tmp_path):
    with pytest.raises(CaptureError, match=r"job.yaml:.* w is never initialised"):
        build_fake(make_spec(tmp_path, net(init="self.w = nn.Parameter(torch.empty(3))")))


def test_a_buffer_that_is_never_initialised_is_zero(tmp_path):
    init = Init(tmp_path, "self.register_buffer('cache', torch.empty(3))")
    assert torch.equal(init.drawn("cache"), torch.zeros(3))


def test_other_devices(tmp_path):
    code = net().replace("return Net()", "with torch.device('meta'):\n        return Net()")
    with pytest.raises(CaptureError, match=r"net.py:build puts a.weight on meta"):
        build_fake(make_spec(tmp_path, code))


def test_no_module(tmp_path):
    with pytest.raises(CaptureError, match=r"net.py:build returned list, not a torch.nn.Module"):
        build_fake(make_spec(tmp_path, "def build():\n    return [nn.Linear(5, 1)]"))
