"""Initialisation is recorded without values: its replay has the distribution that the user's
factory draws from."""

import pytest
import torch
from inits import Init, distance
from jobs import make_spec, prove
from nets import net

pytestmark = pytest.mark.torch

fills = {
    "normal": "w = torch.empty(64, 64); nn.init.normal_(w, 1.0, 0.02)",
    "uniform": "w = torch.empty(64, 64); nn.init.uniform_(w, -2, 3)",
    "randn": "w = torch.randn(64, 64) * 0.02",
    "rand": "w = torch.rand(64, 64)",
    "randn_like": "w = torch.randn_like(torch.empty(64, 64))",
    "trunc_normal": "w = torch.empty(64, 64); nn.init.trunc_normal_(w, std=0.7, a=-1, b=1)",
    "trunc_normal by another name": """
from torch.nn.init import trunc_normal_ as draw
w = torch.empty(64, 64); draw(w, std=0.7, a=-1, b=1)
""",
    "kaiming": "w = torch.empty(64, 64); nn.init.kaiming_normal_(w)",
    "xavier": "w = torch.empty(64, 64); nn.init.xavier_uniform_(w)",
    "exponential": "w = torch.empty(64, 64).exponential_(2.0)",
    "log_normal": "w = torch.empty(64, 64).log_normal_(0.1, 0.2)",
    "a part": "w = torch.zeros(64, 64); w[:, :32].normal_()",
    "pieces": "w = torch.cat([torch.randn(32, 64), torch.zeros(32, 64)])",
    "orthogonal": "w = torch.empty(64, 64); nn.init.orthogonal_(w)",
    "dropout": "w = torch.nn.functional.dropout(torch.ones(64, 64), 0.3)",
    "half, drawn in float": "w = torch.randn(64, 64).half()",
}


@pytest.mark.parametrize("code", fills.values(), ids=fills)
def test_distribution(code, tmp_path):
    init = Init(tmp_path, f"{code}\nself.w = nn.Parameter(w)")
    assert distance(init.drawn("w"), init.real["w"]) < 0.05
    assert not torch.equal(init.drawn("w"), init.drawn("w", seed=1))


modules = {
    "Linear": "nn.Linear(64, 64)",
    "Conv2d": "nn.Conv2d(16, 32, 3)",
    "Embedding": "nn.Embedding(64, 64)",
    "LSTM": "nn.LSTM(32, 32)",
    "MultiheadAttention": "nn.MultiheadAttention(64, 4)",
    "Bilinear": "nn.Bilinear(16, 16, 16)",
    "TransformerEncoderLayer": "nn.TransformerEncoderLayer(64, 4, 64)",
}


@pytest.mark.parametrize("code", modules.values(), ids=modules)
def test_modules(code, tmp_path):
    init = Init(tmp_path, f"self.m = {code}")
    for name in init.real:
        limit = 2.0 / init.real[name].numel() ** 0.5
        assert distance(init.drawn(name), init.real[name]) < limit, name
        assert not init.recipes[name].saved


exact = {
    "constant": "torch.full((3, 4), 2.5)",
    "ones_like": "torch.ones_like(self.a.weight)",
    "full_like": "torch.full_like(self.a.weight, 0.5)",
    "new_zeros": "self.a.weight.new_zeros(3).cos()",
    "arange": "1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))",
    "literal": "torch.tensor([0.5, 0.25])",
    "scalar": "torch.tensor(2.659)",
    "integer": "torch.arange(6).flip(0)",
    "mask": "torch.ones(4, 4, dtype=torch.bool).tril()",
    "complex": "torch.polar(torch.ones(4), torch.arange(4.0))",
    "log of arange": "torch.log(torch.arange(1, 5).repeat(3, 1).float())",
    "no element": "torch.zeros(0, 3)",
    "set element by element": "torch.zeros(3, 3).index_fill(0, torch.tensor([1]), 2.0)",
    "set through a view": "torch.zeros(3, 3).t()",
}


@pytest.mark.parametrize("code", exact.values(), ids=exact)
def test_exact_values(code, tmp_path):
    init = Init(tmp_path, f"self.register_buffer('w', {code})")
    assert torch.equal(init.drawn("w"), init.real["w"])
    assert not any(op.random for op in init.recipes["w"].ops)  # what shapes it is not drawn


overwritten = {
    "eye": ("nn.init.eye_(self.w)", ["eye", "copy_"]),
    "dirac": ("nn.init.dirac_(self.w.view(4, 4, 1))", None),
    "twice": ("nn.init.normal_(self.w); nn.init.zeros_(self.w)", ["fill_"]),
    "data": ("self.w.data = torch.full((4, 4), 3.0)", ["fill_"]),
    "copy": ("self.w.data.copy_(torch.arange(16.0).view(4, 4))", None),
    "state dict": ("self.load_state_dict({'w': torch.ones(4, 4)}, strict=False)", None),
    "parts": ("self.w.data.zero_(); self.w.data[1] = 2.0; self.w.data[:, 2] = 3.0", None),
    "scaled": ("self.w.data.fill_(1.0).mul_(0.3)", None),
}


@pytest.mark.parametrize(("code", "targets"), overwritten.values(), ids=overwritten)
def test_last_overwrite_counts(code, targets, tmp_path):
    init = Init(tmp_path, f"self.w = nn.Parameter(torch.randn(4, 4))\n{code}")
    assert torch.equal(init.drawn("w"), init.real["w"])
    assert targets is None or init.targets("w") == targets


def test_most_are_one_line(tmp_path):
    init = Init(tmp_path, "self.norm = nn.BatchNorm1d(3)\nself.e = nn.Embedding(4, 2)")
    assert {name: init.targets(name) for name in init.recipes} == {
        "a.weight": ["uniform_"],
        "a.bias": ["uniform_"],
        "b.weight": ["uniform_"],
        "b.bias": ["uniform_"],
        "norm.weight": ["fill_"],
        "norm.bias": ["fill_"],
        "e.weight": ["normal_"],
        "norm.running_mean": ["fill_"],
        "norm.running_var": ["fill_"],
        "norm.num_batches_tracked": ["fill_"],
    }


def test_padding_row(tmp_path):
    init = Init(tmp_path, "self.e = nn.Embedding(50, 64, padding_idx=3)")
    drawn = init.drawn("e.weight")
    assert not drawn[3].any()
    assert distance(drawn, init.real["e.weight"]) < 0.05


def test_trunc_normal_keeps_its_bounds(tmp_path):
    init = Init(tmp_path, "self.w = nn.Parameter(torch.empty(999))\nnn.init.trunc_normal_(self.w)")
    assert init.targets("w") == ["trunc_normal_"]
    assert init.drawn("w").abs().max() <= 2


def test_a_deep_copy_starts_as_what_it_copies(tmp_path):
    """In one step, as layers of nn.TransformerEncoder do."""
    init = Init(tmp_path, "import copy\nself.c = copy.deepcopy(self.a)")
    assert init.targets("c.weight") == init.targets("a.weight") == ["uniform_"]
    assert torch.equal(init.drawn("c.weight"), init.drawn("a.weight"))


def test_tied(tmp_path):
    init = Init(tmp_path, """
self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
self.b.weight = self.a.weight
self.b.weight.data.fill_(2.0)
""")  # fmt: skip
    assert "b.weight" not in init.recipes
    assert torch.equal(init.drawn("a.weight"), torch.full((3, 3), 2.0))
    assert init.built.model.a.weight is init.built.model.b.weight


def test_what_shares_a_draw_agrees(tmp_path):
    init = Init(tmp_path, """
r = torch.randn(8)
self.v = nn.Parameter(r.clone())
self.w = nn.Parameter(2 * r)
self.u = nn.Parameter(torch.randn(8))
""")  # fmt: skip
    assert torch.equal(2 * init.drawn("v"), init.drawn("w"))
    assert not torch.equal(init.drawn("v"), init.drawn("u"))


@pytest.mark.parametrize("how", ["parametrizations.weight_norm", "weight_norm"])
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_weight_norm(how, tmp_path):
    init = Init(tmp_path, f"self.m = torch.nn.utils.{how}(nn.Linear(5, 7))")
    g, v = (n for n, t in init.real.items() if t.shape in ((7, 1), (7, 5)) and n != "m.weight")
    norm = torch.linalg.vector_norm(init.drawn(v), dim=1, keepdim=True)
    torch.testing.assert_close(init.drawn(g), norm)


@pytest.mark.dist
@pytest.mark.parametrize("init", ["", "torch.ones(1).numpy()"])  # which no recorder can follow
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_weight_norm_by_a_hook(init, fork_server, tmp_path):
    """It leaves a plain tensor that is computed anew in each call: no state."""
    code = net(init=f"{init}\nself.a = nn.utils.weight_norm(self.a)")
    prove(make_spec(tmp_path, code), fork_server, steps=2)


def test_one_owner_several_draws(tmp_path):
    init = Init(tmp_path, "self.w = nn.Parameter(torch.randn(4096) + torch.randn(4096))")
    assert [key for _, key in init.recipes["w"].seeds] == ["w", "w#1"]
    assert distance(init.drawn("w"), init.real["w"]) < 0.05


def test_a_number_that_the_factory_asks_for(tmp_path):
    init = Init(tmp_path, """
rates = torch.linspace(0, 0.3, 4).tolist()
self.w = nn.Parameter(torch.ones(4) * rates[2] + torch.arange(4)[1].item())
""")  # fmt: skip
    torch.testing.assert_close(init.drawn("w"), torch.full((4,), 1.2))
