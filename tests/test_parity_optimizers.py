"""The scripts update as torch's own classes do in one process: every class, parameter groups,
courses of the learning rate, clipping, and parameters that are frozen, unused or empty.

In float64, two stages, three steps; equal within 1e-10.
"""

import json
from pathlib import Path

import pytest
from jobs import make_spec, prove

from ppc.emit.write import write
from ppc.errors import Complaints, PlanError, PpcError
from ppc.frontend.optimizers import classes
from ppc.pipeline import compile, lower

pytestmark = pytest.mark.dist

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(5, 6), nn.LayerNorm(6)
        self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.second(self.norm(torch.tanh(self.first(x))))))

def build():
    return Net()
"""
MATRICES = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 6, bias=False), nn.Linear(6, 1, bias=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))

def build():
    return Net()
"""
TABLES = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Embedding(9, 5, sparse=True)
        self.bag = nn.EmbeddingBag(9, 5, sparse=True)

    def forward(self, i, j):
        return torch.sigmoid(self.one(i)) * self.bag(j)

def build():
    return Net()
"""
ROWS = {
    "i": {"shape": [], "dtype": "int64", "high": 9},
    "j": {"shape": [3], "dtype": "int64", "high": 9},
    "y": {"shape": [5]},
}


def job(folder: Path, code: str = NET, *, fields=None, stages=2, cuts="auto", **train):
    data = {"data": {"source": "random", "samples": 10, "fields": fields}} if fields else {}
    return make_spec(
        folder,
        code,
        train=train,
        cluster={"devices_per_node": stages},
        parallel={"pipeline": stages, "cuts": cuts},
        **data,
    )


def script(spec, rank: int) -> str:
    write(compile(spec, spec.folder / "out"), spec.folder / "out")
    return (spec.folder / "out" / f"rank{rank}.py").read_text()


SOME = {
    "adadelta": {"lr": 0.5, "rho": 0.8},
    "adafactor": {"lr": 0.1, "beta2_decay": -0.6, "eps": [1e-20, 1e-2], "d": 1.5},
    "adagrad": {"lr_decay": 0.1, "initial_accumulator_value": 0.1},
    "adam": {"lr": 0.1, "betas": [0.8, 0.9], "amsgrad": True, "decoupled_weight_decay": True},
    "adamax": {"lr": 0.1, "weight_decay": 0.1},
    "adamw": {"lr": 0.1, "maximize": True},
    "asgd": {"lambd": 0.01, "alpha": 0.5, "t0": 1.0},
    "muon": {"lr": 0.1, "momentum": 0.8, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
    "nadam": {"lr": 0.1, "momentum_decay": 0.1, "decoupled_weight_decay": True},
    "radam": {"lr": 0.1, "betas": [0.5, 0.6]},
    "rmsprop": {"momentum": 0.9, "centered": True, "alpha": 0.8},
    "rprop": {"lr": 0.1, "etas": [0.4, 1.3], "step_sizes": [1e-3, 1.0]},
    "sgd": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "sparseadam": {"lr": 0.1, "betas": [0.8, 0.9]},
}


@pytest.mark.parametrize("name", classes)
def test_a_class(tmp_path, fork_server, name):
    code, fields = {"muon": (MATRICES, None), "sparseadam": (TABLES, ROWS)}.get(name, (NET, None))
    spec = job(tmp_path, code, fields=fields, optimizer={"name": name, **SOME[name]})
    assert spec.train.optimizer.options.keys() == SOME[name].keys() - {"lr"}
    prove(spec, fork_server)


@pytest.mark.parametrize(("name", "stages"), [("sgd", 1), ("sgd", 2), ("adagrad", 2)])
def test_sparse_gradients(tmp_path, fork_server, name, stages):
    optimizer = {"name": name, "lr": 0.1}
    prove(job(tmp_path, TABLES, fields=ROWS, stages=stages, optimizer=optimizer), fork_server)


@pytest.mark.parametrize("name", ["sgd", "sparseadam"])
def test_sparse_gradients_in_float32(tmp_path, fork_server, name):
    """Where the reference follows the scripts."""
    prove(job(tmp_path, TABLES, fields=ROWS, optimizer=name), fork_server, exact=False)


@pytest.mark.parametrize(
    ("name", "how"),
    [("adamw", "foreach"), ("adagrad", "foreach"), ("adam", "fused"), ("adamw", "fused"),
     ("sgd", "fused"), ("adagrad", "fused")],
)  # fmt: skip
def test_ways_to_update(tmp_path, fork_server, name, how):
    spec = job(tmp_path, optimizer={"name": name, "lr": 0.1, "weight_decay": 0.1, how: True})
    prove(spec, fork_server)
    assert f", {how}=True)" in script(spec, 0)


DECAY = {
    "name": "adamw",
    "lr": 0.1,
    "weight_decay": 0.5,
    "groups": [{"params": ["*.bias", "*norm*"], "weight_decay": 0}],
}


def test_no_decay_of_norms_and_biases(tmp_path, fork_server):
    spec = job(tmp_path, optimizer=DECAY, lr_schedule={"name": "cosine", "warmup": 1})
    prove(spec, fork_server)
    text = script(spec, 0)
    assert (
        """
group_0 = {"params": [], "weight_decay": 0}  # *.bias, *norm*
rest = {"params": []}
for name, parameter in stage.named_parameters():
    if name.endswith(("bias", "norm.weight")):
        group = group_0
    else:
        group = rest
    group["params"].append((name, parameter))
optimizer = torch.optim.AdamW([group_0, rest], lr=LR, weight_decay=0.5)
"""
        in text
    )
    assert (
        """
    for group in optimizer.param_groups:
        group["lr"] = lr_at(step)
"""
        in text
    )


RATES = {
    "name": "sgd",
    "lr": 0.1,
    "momentum": 0.9,
    "groups": [
        {"params": "first.*", "lr": 0.01},
        {"params": "*.bias", "lr": 0.3, "momentum": 0},
        {"params": "norm.weight", "maximize": True},
    ],
}


def test_groups_with_their_own_rates(tmp_path, fork_server):
    """A parameter is in the first group that matches; all rates follow the course."""
    spec = job(tmp_path, cuts=["second"], optimizer=RATES, lr_schedule={"name": "linear"})
    prove(spec, fork_server)
    text = script(spec, 0)
    assert "\nLR, GROUP_LRS = 0.1, (0.01, 0.3)\n" in text
    assert (
        """
    for group, lr in zip(optimizer.param_groups, [GROUP_LRS[0], GROUP_LRS[1], LR]):
        group["lr"] = lr_at(step, lr)
"""
        in text
    )
    assert "def lr_at(step, lr=LR):\n    return lr * (1 - step / STEPS)\n" in text
    assert 'facts["constants"] = MICROBATCHES, STEPS, GLOBAL_BATCH, SEED, LR, GROUP_LRS\n' in text


def test_a_stage_of_one_group(tmp_path, fork_server):
    """It says no more than what holds there."""
    optimizer = {**RATES, "groups": [{"params": ["first.*", "norm.*"], "lr": 0.01, "momentum": 0}]}
    for course in ("constant", "linear"):
        spec = job(tmp_path, cuts=["second"], optimizer=optimizer, lr_schedule=course)
        prove(spec, fork_server)
        line = "optimizer = torch.optim.SGD(stage.named_parameters(), lr=GROUP_LRS[0], momentum=0)"
        assert f"\n{line}\n" in script(spec, 0)
        assert "lr=LR, momentum=0.9)\n" in script(spec, 1)


def test_a_tied_weight_is_in_one_group_on_all_ranks(tmp_path, fork_server):
    """Whatever the stage calls it."""
    code = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mid = nn.Embedding(9, 6), nn.Linear(6, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, i):
        return self.head(self.norm(torch.tanh(self.mid(self.embed(i)))))

def build():
    return Net()
"""
    fields = {"i": ROWS["i"], "y": {"shape": [9]}}
    groups = [{"params": "embed.*", "lr": 0.02}, {"params": "*.bias", "weight_decay": 0}]
    optimizer = {**DECAY, "groups": groups}
    spec = job(
        tmp_path, code, fields=fields, cuts=["norm"], optimizer=optimizer,
        lr_schedule="inverse_sqrt", clip_norm=0.05,
    )  # fmt: skip
    prove(spec, fork_server)
    text = script(spec, 1)
    assert 'if name == "head.weight":\n        group = group_0\n' in text


COURSES = [
    {"name": "one_cycle"},
    {"name": "one_cycle", "pct_start": 0.6, "div_factor": 4, "final_div_factor": 10},
    {"name": "step", "every": 2, "gamma": 0.5},
    {"name": "step", "every": 1, "warmup": 2},
    {"name": "inverse_sqrt"},
    {"name": "inverse_sqrt", "warmup": 2},
]


@pytest.mark.parametrize("course", COURSES, ids=json.dumps)
def test_a_course(tmp_path, fork_server, course):
    prove(job(tmp_path, optimizer=RATES, steps=5, lr_schedule=course), fork_server)


@pytest.mark.parametrize("warmup", [0, 2])
def test_a_callable(tmp_path, fork_server, warmup):
    """In a file that imports another beside it; both go with the scripts."""
    folder = tmp_path / "rates"
    folder.mkdir()
    (folder / "base.py").write_text("BASE = 0.9\n")
    (folder / "course.py").write_text(
        "from base import BASE\n\n\ndef rate(step):\n    return BASE**step\n"
    )
    course = {"name": "rates/course.py:rate", "warmup": warmup}
    spec = job(tmp_path, steps=5, lr_schedule=course)
    prove(spec, fork_server)
    assert "\nfrom course import rate as lr_factor\n" in script(spec, 0)
    assert (tmp_path / "out" / "base.py").exists()


def test_a_callable_of_a_package(tmp_path, fork_server):
    spec = job(tmp_path, lr_schedule="math:exp")
    prove(spec, fork_server)
    assert "\nfrom math import exp as lr_factor\n" in script(spec, 0)


@pytest.mark.parametrize("value", [0.01, 1e9])
@pytest.mark.parametrize("stages", [1, 2])
def test_clipping_by_value(tmp_path, fork_server, value, stages):
    spec = job(tmp_path, stages=stages, optimizer=DECAY, clip_value=value)
    prove(spec, fork_server)
    assert "            parameter.grad.clamp_(-MAX_VALUE, MAX_VALUE)\n" in script(spec, 0)


ODD = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 6)
        self.third, self.head = nn.Linear(6, 6), nn.Linear(6, 1)
        self.first.bias.requires_grad_(False)
        self.third.weight.requires_grad_(False)
        self.unused = nn.Linear(3, 2)
        self.none = nn.Parameter(torch.empty(0))
        self.nothing = nn.Parameter(torch.zeros(0, 6))

    def forward(self, x):
        x = torch.tanh(self.first(x)) + self.none.sum()
        x = self.third(torch.tanh(self.second(x)) + self.nothing.sum(0))
        return self.head(x)

def build():
    return Net()
"""


@pytest.mark.parametrize(
    ("optimizer", "clip"),
    [
        ({"name": "adamw", "lr": 0.1}, {"clip_norm": 0.05}),
        ({"name": "adagrad", "lr": 0.1, "foreach": True}, {"clip_value": 0.01}),
        ({"name": "sgd", "lr": 0.1, "momentum": 0.9, "fused": True}, {"clip_value": 0.01}),
        ({"name": "rprop", "groups": [{"params": ["none", "*.bias"], "lr": 0.05}]}, {}),
        ({"name": "adam", "groups": [{"params": "unused.*", "lr": 0.05}]}, {"clip_norm": 0.05}),
    ],
    ids=str,
)
def test_frozen_unused_and_empty_parameters(tmp_path, fork_server, optimizer, clip):
    prove(job(tmp_path, ODD, cuts=["third"], optimizer=optimizer, **clip), fork_server)


def test_a_rank_without_any_gradient(tmp_path, fork_server):
    """Of a stage that is frozen, and of one with parameters that no loss reaches."""
    for touch in ("requires_grad_(False)", "requires_grad_(True)"):
        code = f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.first.{touch}

    def forward(self, x):
        with torch.no_grad():
            h = torch.tanh(self.first(x))
        return self.head(self.second(h))

def build():
    return Net()
"""
        for clip in ({"clip_norm": 0.05}, {"clip_value": 0.01}):
            spec = job(tmp_path, code, cuts=["second"], optimizer=DECAY_OF_BIASES, **clip)
            prove(spec, fork_server)


DECAY_OF_BIASES = {**DECAY, "groups": [{"params": "*.bias", "weight_decay": 0}]}


@pytest.mark.parametrize("name", ["muon", "adagrad"])
def test_frozen_parameters_of_another_shape(tmp_path, fork_server, name):
    """Classes that look at every parameter are given none that is frozen."""
    shift = "self.shift = nn.Parameter(torch.ones(6), requires_grad=False)"
    code = MATRICES.replace("\n\n    def", f"\n        {shift}\n\n    def")
    code = code.replace("self.first(x))", "self.first(x) + self.shift)")
    groups = [{"params": "first.*", "lr": 0.02}]
    for more in ({}, {"groups": groups}):
        spec = job(tmp_path, code, stages=1, cuts=[], optimizer={"name": name, "lr": 0.1, **more})
        prove(spec, fork_server)
        assert "for n, p in stage.named_parameters() if p.requires_grad]" in script(spec, 0)


# -------------------------------------------------------------------------- what is refused


def refusal(spec) -> str:
    """The complaint, which names the spec's file."""
    with pytest.raises((PlanError, Complaints)) as caught:
        lower(spec, spec.folder / "out")
    lines = str(caught.value).splitlines()
    assert all(line.startswith(("hint: ", str(spec.path))) for line in lines)
    return "\n".join(line.removeprefix(f"{spec.path}:1:") for line in lines)


REFUSED = {
    "dense in SparseAdam": (
        NET, None, {"optimizer": "sparseadam"},
        (
            "SparseAdam takes sparse gradients alone; dense are those of first.weight [6, 5], "
            "first.bias [6], norm.weight [6] and 5 more"
        ),
    ),
    "sparse in AdamW": (
        TABLES, ROWS, {"optimizer": "adamw"},
        "AdamW takes no sparse gradients, as one.weight [9, 5], bag.weight [9, 5] has",
    ),
    "sparse with weight decay": (
        TABLES, ROWS, {"optimizer": {"name": "sgd", "weight_decay": 0.1}},
        "weight_decay takes no sparse gradients, as one.weight [9, 5], bag.weight [9, 5] has",
    ),
    "sparse and fused": (
        TABLES, ROWS, {"optimizer": {"name": "sgd", "fused": True}},
        "fused takes no sparse gradients, as one.weight [9, 5], bag.weight [9, 5] has",
    ),
    "sparse and clipped by the norm": (
        TABLES, ROWS, {"optimizer": "sgd", "clip_norm": 1.0},
        "torch clips no sparse gradients, as one.weight [9, 5], bag.weight [9, 5] has",
    ),
    "sparse and clipped by value": (
        TABLES, ROWS, {"optimizer": "sgd", "clip_value": 1.0},
        "torch clips no sparse gradients, as one.weight [9, 5], bag.weight [9, 5] has",
    ),
    "vectors in Muon": (
        NET, None, {"optimizer": "muon"},
        "Muon takes matrices alone, not first.bias [6], norm.weight [6], norm.bias [6] and 2 more",
    ),
    "nothing in Adafactor": (
        ODD, None, {"optimizer": "adafactor"},
        "Adafactor takes no parameter without elements, as none [0], nothing [0, 6]",
    ),
    "a pattern of nothing": (
        NET, None, {"optimizer": {"name": "sgd", "groups": [{"params": ["*.bias", "firts.*"]}]}},
        (
            "'firts.*' matches no trainable parameter\nhint: the names are first.weight, "
            "first.bias, norm.weight, ..."
        ),
    ),
    "a pattern of frozen ones": (
        ODD, None, {"optimizer": {"name": "sgd", "groups": [{"params": "third.weight"}]}},
        "'third.weight' matches no trainable parameter\nhint: third.weight is frozen",
    ),
    "a group after one that has all": (
        NET, None,
        {"optimizer": {"name": "sgd", "groups": [{"params": "*"}, {"params": "*.bias"}]}},
        (
            "all that this group's params match is in groups before it\nhint: put this group "
            "before them"
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusal(tmp_path, case):
    code, fields, train, message = REFUSED[case]
    assert message in refusal(job(tmp_path, code, fields=fields, **train))


def test_refusals_come_all_at_once(tmp_path):
    groups = [{"params": "no.*"}, {"params": "*.wight"}]
    found = refusal(job(tmp_path, optimizer={"name": "muon", "groups": groups}))
    assert found.count("matches no trainable parameter") == 2
    assert "Muon takes matrices alone" in found


def test_a_tied_table_whose_gradient_is_sparse(tmp_path):
    code = TABLES.replace("\n\n    def forward", "\n        self.bag.weight = self.one.weight\n\n"
                          "    def forward")  # fmt: skip
    optimizer = {"name": "sgd", "groups": [{"params": "bag.*", "lr": 0.1}]}
    found = refusal(job(tmp_path, code, fields=ROWS, optimizer=optimizer))
    assert "a sparse gradient cannot be summed over ranks, as that of one.weight" in found
    assert "hint: a tied parameter has its first name: one.weight" in found


def test_sparse_gradients_of_replicas(tmp_path):
    spec = make_spec(
        tmp_path,
        TABLES,
        data={"source": "random", "samples": 10, "fields": ROWS},
        cluster={"devices_per_node": 2},
        parallel={"data": 2},
    )
    assert refusal(spec).endswith(
        "a sparse gradient cannot be summed over ranks, as that of one.weight [9, 5], "
        "bag.weight [9, 5]\nhint: sparse=False in the embedding, or data: 1"
    )


def test_complex_parameters(tmp_path):
    code = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 1)
        self.turn = nn.Parameter(torch.ones(6, 6, dtype=torch.complex64))

    def forward(self, x):
        return self.b((self.a(x).to(torch.complex64) @ self.turn).real)

def build():
    return Net()
"""
    train = {"optimizer": {"name": "adamw", "fused": True}, "clip_value": 1.0}
    found = refusal(job(tmp_path, code, **train))
    assert "complex numbers have no order to clip by: turn [6, 6]" in found
    assert "a fused update takes real numbers alone, not turn [6, 6]" in found
    assert "Adafactor takes real numbers alone, not turn [6, 6]" in refusal(
        job(tmp_path, code, optimizer="adafactor")
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 'fast'", "rates.py:rate gives 'fast' for step 0, not a number"),
        ("return float('nan')", "rates.py:rate gives nan for step 0, not a number"),
        ("return 1 / step", "rates.py:2: rates.py:rate failed for step 0: ZeroDivisionError"),
    ],
)
def test_a_callable_that_makes_no_number(tmp_path, monkeypatch, body, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rates.py").write_text(f"def rate(step):\n    {body}\n")
    with pytest.raises(PpcError) as caught:
        lower(job(tmp_path, lr_schedule="rates.py:rate"), tmp_path / "out")
    assert message in str(caught.value)


def test_two_modules_of_one_name(tmp_path):
    for name, text in (("a", "class Points: ..."), ("b", "def rate(step): return 1.0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(text)
    (tmp_path / "a" / "mine.py").write_text("""
import torch

class Points:
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.ones(5), torch.ones(1)
""")
    spec = make_spec(
        tmp_path,
        data={"source": "a/mine.py:Points", "fields": ["x", "y"]},
        train={"lr_schedule": "b/mine.py:rate"},
    )
    with pytest.raises(PpcError, match=r"bring a module mine\.py, b/mine\.py one of"):
        compile(spec, tmp_path / "out")
