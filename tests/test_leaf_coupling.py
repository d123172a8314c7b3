"""A leaf that looks at several samples at once is found by running it on halves of a batch."""

from pathlib import Path

import pytest
from jobs import make_spec, prove

from ppc.errors import CaptureError
from ppc.frontend.capture.capture import capture
from ppc.pipeline import compile

pytestmark = pytest.mark.torch

PART = """
import torch
from torch import nn


class Part(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        {body}
"""
NET = """
from part import Part

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(5, 4), nn.Linear(4, 1)
        self.part = Part()

    def forward(self, x):
        x = self.enter(x){enter}
        x = self.part(x){leave}
        return self.leave(x)

def build():
    return Net()
"""
coupled = {
    "normalises": "return (x - x.mean(0)) / (x.var(0) + 1e-6).sqrt()",
    "normalises and drops": "return self.drop(x - x.mean(0))",
    "by a choice": "return x * 2 if x.sum() > 1e6 or len(x) > 2 else x",
    "running sum": "return self.inner(x).cumsum(0)",
    "a little": "return x + 1e-4 * x.mean(0)",
    "wants float32": "return x.float() + 0.1 * x.mean(0)",
}
alone = {
    "a layer": "return self.inner(x)",
    "drops": "return self.drop(self.inner(x))",
    "of each sample": "return x - x.mean(1, keepdim=True)",
    "wants float32": "return torch.tanh(x.float() @ torch.ones(4, 4, dtype=torch.float32))",
}


def job(folder: Path, body: str, enter: str = "", leave: str = "", **sections):
    (folder / "part.py").write_text(PART.replace("{body}", body))
    model = {"leaf": ["Part"]} | sections.pop("model", {})
    code = NET.replace("{enter}", enter).replace("{leave}", leave)
    return make_spec(folder, code, model=model, **sections)


@pytest.mark.parametrize("body", coupled.values(), ids=coupled)
def test_it_is_refused_where_forward_calls_it(tmp_path, body):
    with pytest.raises(CaptureError) as raised:
        capture(job(tmp_path, body))
    error = raised.value
    assert error.message.startswith("the leaf part gives a sample another result beside other")
    assert error.hint.startswith("parallel: {microbatches: 1}; or model: {coupled: accept}")
    line = Path(error.where.file).read_text().splitlines()[error.where.line - 1]
    assert line.strip() == "x = self.part(x)"
    assert not capture(job(tmp_path, body, parallel={"microbatches": 1})).coupled


@pytest.mark.parametrize("body", alone.values(), ids=alone)
def test_others_are_not(tmp_path, body):
    graph = capture(job(tmp_path, body))
    assert not graph.coupled
    assert not graph.messages


def test_samples_need_not_come_first(tmp_path):
    """(features, samples) in and out, and rows of two for each sample."""
    graph = capture(job(tmp_path, "return self.inner(x.T).T", ".T", ".T"))
    assert not graph.coupled
    rows = ".repeat_interleave(2, 0)", ".unflatten(0, (-1, 2)).mean(1)"
    assert not capture(job(tmp_path, "return self.inner(x)", *rows)).coupled
    with pytest.raises(CaptureError, match="the leaf part gives"):
        capture(job(tmp_path, "return x - x.mean(1, keepdim=True)", ".T", ".T"))


def test_what_cannot_be_tried_is_told(tmp_path):
    graph = capture(job(tmp_path, "return x + torch.rand_like(x)"))
    (message,) = graph.messages
    assert message.endswith("looks at several samples was not tried: part draws random numbers")


@pytest.mark.dist
def test_accepted_it_trains_and_is_told(tmp_path, fork_server):
    spec = job(
        tmp_path, coupled["running sum"], model={"coupled": "accept"},
        cluster={"devices_per_node": 2}, parallel={"pipeline": 2},
    )  # fmt: skip
    found = prove(spec, fork_server, steps=2)
    assert "whole" not in {row.kind for row in found.rows}
    text = " ".join(str(compile(spec)[0].text).split())
    assert "net.py:15 couples samples, as the spec accepts" in text
