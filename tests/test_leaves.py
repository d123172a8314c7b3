"""Modules that a spec keeps whole: one op in the graph, the user's own class in the scripts, and
refused where that would not be the same."""

import ast

import pytest
from emitted import emit
from jobs import make_spec, prove

from ppc.check.text import check_text
from ppc.errors import CaptureError, Complaints, InternalError, PlanError
from ppc.frontend.capture.capture import capture
from ppc.pipeline import compile, lower

pytestmark = pytest.mark.torch

PICK = """
import random

import torch
from factors import half
from torch import nn


class Pick(nn.Module):
    def __init__(self, width, *, hidden=4, act="relu", dropout=0.0, names=()):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(hidden, width)
        self.register_buffer("scale", torch.full((), 2.0))
        self.act = getattr(torch, act)

    def forward(self, x, above, *, both=False):
        rows = (x[:, 0] > above).nonzero().squeeze(1)
        made = half(self.down(self.drop(self.act(self.up(x[rows])))))
        out = x.index_add(0, rows, made) * self.scale
        return (out, rows.new_full((len(x),), 3)) if both else out
"""
FACTORS = "def half(x):\n    return x / 2\n"
NET = """
from pick import Pick

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(5, 4)
        self.picks = nn.ModuleList(Pick(4, hidden=hidden) for hidden in (4, 6))
        self.leave = nn.Linear(4, 1)

    def forward(self, x):
        x = self.enter(x)
        for pick in self.picks:
            x = pick(x, 0.1)
        return self.leave(x)

def build():
    return Net()
"""
LOCAL = """
from pick import Pick as P

def local():
    class Pick(P):
        pass
    return Pick

Pick = local()
"""


def job(folder, code=NET, pick=PICK, leaf=("Pick",), stages=1, **sections):
    (folder / "pick.py").write_text(pick)
    (folder / "factors.py").write_text(FACTORS)
    parallel = {"pipeline": stages, "microbatches": 2} | sections.pop("parallel", {})
    return make_spec(
        folder,
        code,
        model={"leaf": [*leaf]},
        cluster={"devices_per_node": stages * parallel.get("data", 1)},
        parallel=parallel,
        **sections,
    )


def refusal(spec, kind=CaptureError):
    with pytest.raises(kind) as raised:
        lower(spec, spec.folder / "out")
    return raised.value


def test_it_is_one_op_with_its_tensors(tmp_path):
    graph = capture(job(tmp_path))
    assert [op.target for op in graph.ops].count("ppc.leaf.default") == 2
    op = graph.ops[1]
    assert [str(state) for state in op.args[2]] == [
        *(f"picks.0.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")),
        "picks.0.scale",
    ]
    assert op.args[1] == (op.operands[0], 0.1)
    assert op.flops.per_sample > 0
    assert op.saved_bytes.per_sample > 0
    assert str(graph.values[op.outputs[0]]) == "f32[batch, 4]"
    assert graph.leaves == {"picks.0": "pick", "picks.1": "pick"}


def test_a_script_imports_the_users_class(tmp_path):
    spec = job(tmp_path, stages=2, parallel={"cuts": ["picks.1"]})
    files = {file.path: file.text for file in compile(spec)}
    assert files["pick.py"] == PICK
    assert files["factors.py"] == FACTORS
    for rank, hidden in ((0, ""), (1, ", hidden=6")):
        script = files[f"rank{rank}.py"]
        assert "\nfrom pick import Pick\n" in script
        assert f"Pick(4{hidden})" in script
        assert f'["{rank}"](x, 0.1)' in script or f"[{rank}](x, 0.1)" in script
        assert "Needs PyTorch and pick.py, beside it." in " ".join(script.split())
        assert "class Pick" not in script


def test_a_stage_without_leaves_imports_nothing(tmp_path):
    spec = job(tmp_path, stages=2, parallel={"cuts": ["leave"]})
    scripts = [file.text for file in compile(spec) if file.path.startswith("rank")]
    assert ["import Pick" in script for script in scripts] == [True, False]


@pytest.mark.dist
def test_parity_with_dropout_on_replicated_stages(tmp_path, fork_server):
    """Draws inside a leaf follow from its layer, arguments and several results from the user."""
    code = NET.replace("hidden=hidden)", "hidden=hidden, dropout=0.3)")
    code = code.replace("x = pick(x, 0.1)", "x, three = pick(x, above=0.1, both=True)")
    code = code.replace("self.leave(x)", "self.leave(x) * three[:, None]")
    spec = job(tmp_path, code, stages=2, parallel={"data": 2}, train={"global_batch": 8})
    prove(spec, fork_server, steps=2)


@pytest.mark.dist
def test_parity_of_one_called_twice_under_autocast(tmp_path, fork_server):
    code = NET.replace("for pick in self.picks:", "for pick in (*self.picks, self.picks[0]):")
    spec = job(tmp_path, code, train={"precision": "bf16"}, parallel={"recompute": ["picks.1"]})
    prove(spec, fork_server, steps=2, exact=False)


COUNTS = """
        self.n += 1
        above = above if self.n < 3 else 0.2
        rows = (x"""


def test_a_leaf_that_counts(tmp_path):
    """At its own line, whether or not its first calls show it."""
    counting = PICK.replace("self.act =", "self.n = 0\n        self.act =")
    error = refusal(job(tmp_path, pick=counting.replace("\n        rows = (x", COUNTS)))
    assert error.message.startswith("the leaf picks.0 changes n of picks.0, a Python value: ")
    assert (tmp_path / "pick.py").read_text().splitlines()[error.where.line - 1] == COUNTS.split(
        "\n"
    )[1]
    assert error.hint.startswith('an argument of the leaf: self.register_buffer("n", ')


@pytest.mark.dist
def test_parity_where_it_is_given_the_count(tmp_path, fork_server):
    """The remedy."""
    own = 'self.register_buffer("n", torch.tensor(0))\n        self.leave ='
    given = "self.n += 1\n        for pick in self.picks:"
    code = NET.replace("self.leave =", own).replace("for pick in self.picks:", given)
    code = code.replace("pick(x, 0.1)", "pick(x, torch.where(self.n < 3, 0.1, 0.2))")
    prove(job(tmp_path, code, stages=2, parallel={"cuts": ["leave"]}), fork_server, steps=3)


def test_without_it_the_error_names_it(tmp_path):
    error = refusal(job(tmp_path, leaf=()))
    assert error.message.startswith("what forward computes hangs on the values of its data")
    assert error.where.file.endswith("pick.py")
    assert error.hint.endswith("; or keep the module whole: model: {leaf: [picks.0]}")


def test_names_that_are_none(tmp_path):
    error = refusal(job(tmp_path, leaf=("pick.0", "Pack", "picks.1")), Complaints)
    assert [(e.message, e.hint) for e in error.errors] == [
        ("the model has no module pick.0", "picks.0 or picks.1 or picks.0.up"),
        ("the model has no module Pack", "Pick"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("self.act =", "self.norm = nn.BatchNorm1d(4)\n        self.act =",
         "the leaf picks.0 has a batch norm, norm: inside a leaf nobody sees how many samples"),
        ("made = half", "self.scale += 1\n        made = half",
         "the leaf picks.0 writes to what it is given, or to its buffers"),
        ("return (out, rows.new_full((len(x),), 3)) if both else out", "return x",
         "the leaf picks.0 returns the memory that it was given"),
        ("return (out, rows.new_full((len(x),), 3)) if both else out", "return {'x': out}",
         "the leaf picks.0 returns a dict"),
        ("rows = (x", "x = x.detach()\n        rows = (x",
         "the leaf picks.0 is given a tensor to which no gradient comes back"),
        ("self.act =", "self.table = torch.ones(4)\n        self.act =",
         "the leaf picks.0 is not what Pick(...) builds: it has a tensor that is neither"),
        ("rows = (x", "half.n = getattr(half, 'n', 0) + 1\n        rows = (x",
         "the leaf picks.0 changes n of the function half, a Python value: every rank has its own"),
        ("rows = (x", "x = x * random.random()\n        rows = (x",
         "forward of Pick draws from Python's random: no script seeds it"),
        ("super().__init__()", "hidden = hidden + 1\n        super().__init__()",
         "the leaf picks.0: Pick.__init__ changes hidden before it calls super().__init__()"),
    ],
)  # fmt: skip
def test_what_a_leaf_must_not_do(tmp_path, old, new, message):
    error = refusal(job(tmp_path, pick=PICK.replace(old, new), leaf=("picks.0",)))
    assert error.message.startswith(message)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("self.leave =", "self.picks[0].k = 1\n        self.leave =",
         "the leaf picks.0 is not what Pick(...) builds: it has other attributes or tensors"),
        ("self.leave =", "self.picks[0].up = nn.Linear(4, 4, bias=False)\n        self.leave =",
         "the leaf picks.0 is not what Pick(...) builds: up has other attributes or tensors"),
        ("Pick(4, hidden=hidden)", "Pick(4, hidden=hidden, names={print})",
         "Pick of the leaf picks.0 is given names, a set, which no script can write"),
        ("from pick import Pick", LOCAL,
         "the class of the leaf picks.0, local.<locals>.Pick, is defined inside another"),
    ],
)  # fmt: skip
def test_what_no_script_builds(tmp_path, old, new, message):
    error = refusal(job(tmp_path, NET.replace(old, new), leaf=("picks.0",)))
    assert error.message.startswith(message)


def test_the_whole_model(tmp_path):
    """One stage can be it; several cannot share it."""
    script = emit(job(tmp_path, leaf=("Net",))).script()
    assert "\nfrom net import Net\n" in script
    assert "class Stage(Net):" in script
    assert "= super().forward(x=x)\n" in script
    error = refusal(job(tmp_path, leaf=("Net",), stages=2), PlanError)
    assert error.message == (
        "the whole model is a leaf, and a leaf is never cut: 2 stages cannot share it"
    )
    assert error.hint == "pipeline: 1, data: 2"


def test_a_wrong_argument_is_found(tmp_path):
    """In a model that is compared by numbers, and in one that is compared by operations."""
    for precision in ("fp32", "bf16"):
        emitted = emit(job(tmp_path, train={"precision": precision}))
        wrong = emitted.script().replace("Pick(4, hidden=6)", "Pick(4)")
        assert wrong != emitted.script()
        ast.parse(wrong)
        with pytest.raises(InternalError, match=r"should|makes|operation"):
            check_text(emitted.spec, emitted.job.graph, emitted.job.units, [wrong], 2)
