"""Recompute: the same training with less kept; batch norms count once, masks are the same twice."""

from pathlib import Path

import pytest
from jobs import failed, make_spec, plant, prove
from nets import net

from ppc.analysis.memory import measure_memory
from ppc.emit.write import write
from ppc.errors import CaptureError, Complaints, PlanError
from ppc.pipeline import compile, lower
from ppc.run.verify import verify

pytestmark = pytest.mark.dist

NET = """
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.lin, self.bn, self.drop = nn.Linear(n, n), nn.BatchNorm1d(n), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.bn(self.lin(x))))


class Net(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(Block(6) for _ in range(6))
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            if self.reentrant is None or i % 2:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def build(reentrant=None):
    return Net(reentrant)
"""


def job(folder: Path, code: str = NET, args: dict | None = None, **parallel):
    ranks = parallel.get("pipeline", 1) * parallel.get("data", 1)
    return make_spec(
        folder,
        code,
        model={"args": args or {}},
        data={
            "source": "random",
            "samples": 60,
            "fields": {"x": {"shape": [6]}, "y": {"shape": [1]}},
        },
        train={
            "global_batch": 24,
            "steps": 3,
            "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        },
        cluster={"devices_per_node": ranks},
        parallel=parallel,
    )


@pytest.mark.parametrize(
    ("args", "parallel"),
    [
        ({}, {"pipeline": 3, "microbatches": 4, "recompute": "stage"}),
        ({}, {"pipeline": 1, "microbatches": 3, "schedule": "gpipe", "recompute": "stage"}),
        (
            {},
            {
                "pipeline": 2,
                "data": 2,
                "microbatches": 3,
                "schedule": "gpipe",
                "recompute": "stage",
            },
        ),
        ({}, {"pipeline": 2, "microbatches": 4, "recompute": ["blocks"]}),
        (
            {},
            {
                "pipeline": 2,
                "data": 2,
                "microbatches": 3,
                "recompute": ["blocks.1", "blocks.4.lin"],
            },
        ),
        ({"reentrant": False}, {"pipeline": 2, "microbatches": 4}),
        ({"reentrant": True}, {"pipeline": 2, "microbatches": 4, "recompute": "stage"}),
    ],
)
def test_the_training_is_the_same(tmp_path: Path, fork_server, args: dict, parallel: dict) -> None:
    prove(job(tmp_path, args=args, **parallel), fork_server)


def test_a_backward_that_follows_at_once_needs_none(tmp_path: Path) -> None:
    spec = job(tmp_path, pipeline=2, microbatches=4, recompute="stage")
    first, last = (str(f.text) for f in compile(spec, tmp_path / "out")[:2])
    assert "torch.no_grad():  # nothing else is kept" in first
    assert "torch.no_grad():  # nothing else" not in last
    assert "statistics_kept" not in last


def test_the_users_checkpoint_becomes_recompute_of_the_module(tmp_path: Path) -> None:
    spec = job(tmp_path, args={"reentrant": False}, pipeline=2, microbatches=4)
    forms: dict = {}
    lower(spec, tmp_path, forms.__setitem__)
    assert forms["recompute"].recompute == ("blocks.0", "blocks.2", "blocks.4")
    script = str(compile(spec, tmp_path / "out")[0].text)
    assert "recompute(stage.get_submodule(path))" in script


CALLS = {
    "function": ("torch.utils.checkpoint.checkpoint(self.a, x, use_reentrant=False)", ("a",)),
    "by name": ("checkpoint(self.a, x, use_reentrant=False)", ("a",)),
    "by another name": ("again(self.a, x, use_reentrant=False)", ("a",)),
    "reentrant": ("again(self.a, x, use_reentrant=True)", ("a",)),
    "sequential": ("in_pieces(self.s, 2, x, use_reentrant=False)", ("s.0",)),
    "the last piece, which torch keeps": ("in_pieces(self.s, 1, x, use_reentrant=False)", ()),
}
"""How a model may call its checkpoint, and the modules that run again."""


@pytest.mark.parametrize("call", CALLS)
def test_every_spelling_of_a_checkpoint(tmp_path: Path, fork_server, call: str) -> None:
    text, expected = CALLS[call]
    before = """
import torch.utils.checkpoint
from torch.utils.checkpoint import checkpoint, checkpoint as again
from torch.utils.checkpoint import checkpoint_sequential as in_pieces
"""
    init = "self.s = nn.Sequential(nn.Linear(5, 5), self.a)"
    spec = make_spec(tmp_path, net(f"h = {text}\nreturn self.b(h)", init, before=before))
    forms: dict = {}
    lower(spec, tmp_path, forms.__setitem__)
    assert forms["recompute"].recompute == expected
    prove(spec, fork_server)


def test_a_checkpoint_without_a_module_is_said(tmp_path: Path) -> None:
    code = """
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        return self.b(checkpoint(torch.tanh, self.a(x), use_reentrant=False))


def build():
    return Net()
"""
    forms: dict = {}
    lower(job(tmp_path, code, microbatches=2), tmp_path, forms.__setitem__)
    (message,) = forms["check"].messages
    assert message.endswith(
        "this checkpoint calls no module: what it computes is kept for the backward"
    )
    assert "net.py:14" in message


def test_less_is_kept(tmp_path: Path) -> None:
    found = {}
    for recompute in ("none", "stage", ["blocks"]):
        forms: dict = {}
        spec = job(tmp_path, pipeline=2, microbatches=4, schedule="gpipe", recompute=recompute)
        lower(spec, tmp_path, forms.__setitem__)
        memory = measure_memory(forms["check"], forms["place"], spec)
        found[str(recompute)] = memory[0].activations
    assert found["stage"] < found["none"] / 2
    assert found["['blocks']"] < found["none"] / 2


def test_unknown_paths_are_named_at_once(tmp_path: Path) -> None:
    spec = job(tmp_path, pipeline=2, microbatches=2, recompute=["block.0", "blocks.9"])
    with pytest.raises(Complaints) as caught:
        lower(spec, tmp_path)
    assert "the model has no module block.0" in str(caught.value)
    assert "the model has no module blocks.9" in str(caught.value)
    assert "blocks.0" in str(caught.value)


def test_a_module_that_is_never_called_is_refused(tmp_path: Path) -> None:
    code = NET.replace(
        "self.head = nn.Linear(6, 1)", "self.head, self.idle = nn.Linear(6, 1), nn.Tanh()"
    )
    with pytest.raises(PlanError, match="no call of idle could run again by itself"):
        lower(job(tmp_path, code, pipeline=2, microbatches=2, recompute=["idle"]), tmp_path)


COUNTING = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 1)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return self.b(torch.tanh(self.a(x)))


def build():
    return Net()
"""


def test_state_that_would_be_written_twice_is_refused(tmp_path: Path) -> None:
    spec = job(tmp_path, COUNTING, microbatches=2, schedule="gpipe", recompute="stage")
    with pytest.raises(CaptureError, match="writes count, and would write it again") as caught:
        lower(spec, tmp_path)
    assert caught.value.where.line == 12


WRITING = """
class First(nn.Module):
    def forward(self, x):
        x[:, :2] += 1
        return x * 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.a, self.b = First(), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        return self.b(torch.tanh(self.a(self.first(x))))


def build():
    return Net()
"""


def test_a_module_that_writes_over_what_it_is_given_is_refused(tmp_path: Path) -> None:
    spec = job(tmp_path, WRITING, microbatches=2, recompute=["first"])
    with pytest.raises(CaptureError, match="first writes over what it is given") as caught:
        lower(spec, tmp_path)
    assert caught.value.where.line == 7


def test_data_that_a_stage_writes_over_is_the_same_the_second_time(
    tmp_path: Path, fork_server
) -> None:
    spec = job(tmp_path, WRITING, microbatches=3, schedule="gpipe", recompute="stage")
    prove(spec, fork_server)


@pytest.mark.parametrize(
    ("right", "wrong", "kinds"),
    [
        ("norm.momentum, norm.num_batches_tracked = 0.0, None", "pass", {"buffer"}),
        ('{mb}"', '"', {"loss", "gradient"}),
    ],
    ids=["statistics counted twice", "masks without the microbatch"],
)
def test_a_planted_fault_is_found(
    tmp_path: Path, fork_server, right: str, wrong: str, kinds: set
) -> None:
    spec = job(tmp_path, pipeline=2, microbatches=4, schedule="gpipe", recompute="stage")
    write(compile(spec, tmp_path / "out"), tmp_path / "out")
    for rank in (0, 1):
        plant(tmp_path / "out" / f"rank{rank}.py", right, wrong)
    found = verify(tmp_path / "out", timeout_s=60, fork_server=fork_server)
    assert kinds <= {kind for kind, _ in failed(found)}
