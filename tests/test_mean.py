"""Losses that mean what they say: over samples, tokens or a user's weight; metrics beside them."""

import json
from pathlib import Path

import pytest
from jobs import failed, make_spec, plant, prove

from ppc.emit.write import write
from ppc.errors import CaptureError
from ppc.pipeline import compile, lower
from ppc.run.launch import run_forked
from ppc.run.verify import verify

pytestmark = pytest.mark.dist

LM = """
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 11)

    def forward(self, x):
        x = self.emb(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def build():
    return Net()


def loss(logits, labels):
    nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=3)
    right = (logits.argmax(-1) == labels) & (labels != 3)
    return {"accuracy": right.sum() / (labels != 3).sum(), "loss": nll, "root {x}": nll.sqrt()}


def weight(labels):
    return (labels != 3).sum()


def by_hand(logits, labels):
    counts = labels != 3
    nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (nll * counts.flatten()).sum() / counts.sum()
"""
TOKENS = {"kind": "tokens", "ignore_index": 3}


def job(folder: Path, weight: object = TOKENS, loss: str = "loss", batch: int = 12, **parallel):
    ranks = parallel.get("pipeline", 1) * parallel.get("data", 1)
    whole = {"shape": [2], "dtype": "int64", "high": 11}
    few = {"shape": [2], "dtype": "int64", "low": 2, "high": 5}
    return make_spec(
        folder,
        LM,
        model={"loss": f"net.py:{loss}", "weight": weight},
        data={"source": "random", "samples": 40, "fields": {"x": whole, "labels": few}},
        train={"global_batch": batch, "steps": 4, "optimizer": {"name": "sgd", "lr": 0.1}},
        cluster={"devices_per_node": ranks},
        parallel=parallel,
    )


@pytest.mark.parametrize(
    ("weight", "parallel"),
    [
        (TOKENS, {"microbatches": 6}),
        (TOKENS, {"pipeline": 2, "data": 2, "microbatches": 6}),
        ("net.py:weight", {"pipeline": 2, "data": 2, "microbatches": 5}),
        (
            "net.py:weight",
            {"pipeline": 3, "microbatches": 4, "schedule": "gpipe", "recompute": "stage"},
        ),
        ("samples", {"data": 2, "microbatches": 2}),
    ],
)
def test_the_mean_and_the_metrics(
    tmp_path: Path, fork_server, weight: object, parallel: dict
) -> None:
    found = prove(job(tmp_path, weight, **parallel), fork_server)
    kinds = {row.kind for row in found.rows}
    assert "metric" in kinds
    assert ("whole" in kinds) == (weight != "samples")  # samples: ignored tokens make it differ


def test_a_microbatch_in_which_nothing_counts(tmp_path: Path, fork_server) -> None:
    """0 / 0 in loss and gradient stays out of the step: with one sample in each microbatch, and two
    labels of which a third is ignored, some have nothing that counts (checked below)."""
    spec = job(tmp_path, TOKENS, "by_hand", pipeline=2, data=2, microbatches=6)
    prove(spec, fork_server)
    spec = job(tmp_path, "samples", "by_hand", pipeline=2, data=2, microbatches=6)
    write(compile(spec, tmp_path / "out"), tmp_path / "out")
    run_forked(tmp_path / "out", 4, timeout_s=60, server=fork_server).check()
    rows = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert any(json.loads(row)["loss"] != json.loads(row)["loss"] for row in rows)


def test_c48_short_rows_weigh_no_more(tmp_path: Path, fork_server) -> None:
    """One valid token in microbatch 0, five in the others, two replicas: the mean of the
    microbatches' means is another number, and verify sees it."""
    spec = job(tmp_path, TOKENS, data=2, microbatches=3)
    write(compile(spec, tmp_path / "out"), tmp_path / "out")
    for rank in (0, 1):
        script = tmp_path / "out" / f"rank{rank}.py"
        plant(script, "return (weights / total).tolist()", "return [1 / 6] * 3")
    found = verify(tmp_path / "out", timeout_s=60, fork_server=fork_server)
    assert {kind for kind, _ in failed(found)} >= {"loss", "gradient"}


def test_it_is_said_where_samples_are_the_wrong_weight(tmp_path: Path) -> None:
    forms: dict = {}
    lower(job(tmp_path, "samples", microbatches=6), tmp_path, forms.__setitem__)
    assert "model: {weight: tokens}" in forms["check"].messages[-1]
    lower(job(tmp_path, TOKENS, microbatches=6), tmp_path, forms.__setitem__)
    assert not forms["check"].messages


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ({"kind": "tokens", "field": "mask"}, "the weight reads mask, a field that neither"),
        ("net.py:by_hand", "the weight reads logits, a field that neither"),
    ],
)
def test_a_weight_of_fields_that_are_not_there(
    tmp_path: Path, weight: object, message: str
) -> None:
    with pytest.raises(CaptureError, match=message):
        lower(job(tmp_path, weight, microbatches=2), tmp_path)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ('{"loss": nll, "lr": nll}', "a metric called lr, which means something else in the log"),
        (
            '{"loss": nll, "size": logits}',
            r"size is a tensor of shape \[\d+, 2, 11\], not a tensor of one",
        ),
        ('{"loss": nll, "one": 1.0}', "one is float, not a tensor of one number"),
        ('{"nll": nll}', "none of which is `loss`"),
    ],
)
def test_metrics_that_cannot_be(tmp_path: Path, returned: str, message: str) -> None:
    spec = job(tmp_path, microbatches=2)
    text = (tmp_path / "net.py").read_text()
    start = text.index('return {"accuracy"')
    end = text.index("\n", start)
    (tmp_path / "net.py").write_text(f"{text[:start]}return {returned}{text[end:]}")
    with pytest.raises(CaptureError, match=message):
        lower(spec, tmp_path)


def test_a_batch_in_which_nothing_counts_is_an_error(tmp_path: Path, fork_server) -> None:
    spec = job(tmp_path, {"kind": "tokens", "ignore_index": 3}, microbatches=2)
    write(compile(spec, tmp_path / "out"), tmp_path / "out")
    plant(tmp_path / "out" / "rank0.py", "(labels != 3).sum() if", "(labels != labels).sum() if")
    result = run_forked(tmp_path / "out", 1, timeout_s=60, server=fork_server)
    assert "rank 0, stage 0, step 1: the weights of the batch sum to 0" in result.ranks[0].stderr


TIED = LM.replace(
    "self.head = nn.Linear(6, 11)",
    "self.head = nn.Linear(6, 11, bias=False)\n        self.head.weight = self.emb.weight",
)


def test_a_replica_in_which_nothing_counts_and_a_tied_weight(tmp_path: Path, fork_server) -> None:
    """One sample for each replica: in some steps one of them has no label that counts."""
    labels = {"shape": [1], "dtype": "int64", "low": 2, "high": 4}
    tokens = {"shape": [1], "dtype": "int64", "high": 11}
    spec = make_spec(
        tmp_path,
        TIED,
        model={"loss": "net.py:by_hand", "weight": TOKENS},
        data={"source": "random", "samples": 8, "fields": {"x": tokens, "labels": labels}},
        train={"global_batch": 4, "steps": 6, "optimizer": {"name": "sgd", "lr": 0.1}},
        cluster={"devices_per_node": 4},
        parallel={"pipeline": 2, "data": 2, "microbatches": 2},
    )
    prove(spec, fork_server)
    assert "tied.grad = torch.zeros_like(tied)" in str(compile(spec, tmp_path / "out")[3].text)
