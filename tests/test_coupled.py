"""A model that looks at several samples at once is refused under microbatches and replicas, unless
the spec accepts it; then each microbatch is a batch of its own, and the scripts say so."""

from pathlib import Path

import pytest
from jobs import make_spec, prove, vary
from nets import net

from ppc.errors import CaptureError
from ppc.frontend.capture.capture import capture
from ppc.ir.graph import Dim
from ppc.pipeline import compile

pytestmark = pytest.mark.dist

pairs = "pairs the samples of a microbatch with each other"
mixed = "mixes the samples of a microbatch"
of_all = "uses for each sample what was made of all samples of a microbatch"
LSTM = "self.l = nn.LSTM(8, 8)"
coupled = {
    "all pairs": ("h = h @ h.T @ h", "", pairs),
    "all triples": ("h = h + torch.einsum('ia,ja,ka->ijk', h, h, h).sum()", "", pairs),
    "a mean": ("h = h - h.mean(0)", "", of_all),
    "a batch norm by hand": ("h = (h - h.mean(0)) / (h.var(0) + 1).sqrt()", "", of_all),
    "a norm": ("h = nn.functional.normalize(h, dim=0)", "", of_all),
    "a largest": ("h = h / h.abs().max().detach()", "", of_all),
    "the data's mean": ("h = h * (x - x.mean(0)).sum(1, keepdim=True)", "", of_all),
    "a covariance": ("h = h @ (h.T @ h)", "", of_all),
    "the first": ("h = h - h[0]", "", of_all),
    "a softmax": ("h = h.softmax(0)", "", mixed),
    "a running sum": ("h = h.cumsum(0)", "", mixed),
    "the sample before": ("h = h + h.roll(1, 0)", "", mixed),
    "another sample": ("h = h + h[torch.randperm(len(h))]", "", mixed),
    "a sort": ("h = h.sort(0).values", "", mixed),
    "a layer norm": ("h = nn.functional.layer_norm(h.T, h.T.shape[1:]).T", "", mixed),
    "an LSTM with batch_first forgotten": ("h = self.l(h[:, None])[0][:, 0]", LSTM, mixed),
    "an attention": (
        "h = nn.functional.scaled_dot_product_attention(h[None], h[None], h[None])[0]",
        "",
        mixed,
    ),
}
alone = {
    "a mean of one sample": ("h = h - h.mean(1, keepdim=True)", ""),
    "a batch norm": ("h = self.n(h)", "self.n = nn.BatchNorm1d(8)"),
    "a choice by sample": ("h = h + h[torch.arange(len(h)), x.argmax(1)][:, None]", ""),
    "a softmax of one sample": ("h = h.softmax(-1).cumsum(1).flip(1).sort().values", ""),
    "samples in the second place": ("h = h.T.softmax(0).T", ""),
    "an LSTM": ("h = self.l(h[None])[0][0]", LSTM),
    "parts of a sample": ("h = (h[..., None] @ h[:, None]).softmax(-1).sum(-1)", ""),
    "zeros": ("h = h + h.new_zeros(8) + torch.zeros_like(h[0])", ""),
    "a weight's mean": ("h = h - self.a.weight.mean()", ""),
    "noise": ("h = h + torch.randn(8)", ""),
    "a count": ("h = h * (torch.ones(len(h)) / torch.ones(len(h)).sum())[:, None]", ""),
    "what truths count": ("m = x > 9.0\nh = h * m[:, :1] / m.sum().clamp(min=1)", ""),
}


def spec_of(folder: Path, step: str, init: str = "", **sections):
    return make_spec(folder, net(f"h = self.a(x)\n{step}\nreturn self.b(h)", init), **sections)


@pytest.mark.parametrize(("step", "init", "how"), coupled.values(), ids=coupled)
def test_it_is_refused(tmp_path, step, init, how):
    with pytest.raises(CaptureError) as raised:
        capture(spec_of(tmp_path, step, init))
    error = raised.value
    assert how in error.message
    assert error.message.endswith(", so several microbatches do not add up to their global batch")
    assert error.hint.startswith("parallel: {microbatches: 1}; or model: {coupled: accept}")
    line = Path(error.where.file).read_text().splitlines()[error.where.line - 1]
    assert line.strip() == step


@pytest.mark.parametrize(("step", "init"), alone.values(), ids=alone)
def test_others_are_not(tmp_path, step, init):
    assert not capture(spec_of(tmp_path, step, init)).coupled


def test_one_microbatch_is_the_batch(tmp_path):
    step, init, _ = coupled["all pairs"]
    graph = capture(spec_of(tmp_path, step, init, parallel={"microbatches": 1}))
    assert any(meta.shape[:2] == (Dim(), Dim()) for meta in graph.values.values())
    assert not graph.coupled


def test_a_replica_is_a_microbatch(tmp_path):
    with pytest.raises(CaptureError) as raised:
        capture(
            spec_of(
                tmp_path,
                "h = h - h.mean(0)",
                parallel={"data": 2, "microbatches": 1},
                cluster={"devices_per_node": 2},
            )
        )
    assert raised.value.hint.startswith("parallel: {data: 1, microbatches: 1}; or model: ")


def test_what_the_spec_accepts_is_said_and_equal(tmp_path, fork_server):
    """The reference takes the user's loss of each microbatch."""
    spec = spec_of(
        tmp_path,
        "h = h - h.mean(0)",
        model={"coupled": "accept"},
        parallel={"pipeline": 2, "microbatches": 2},
        cluster={"devices_per_node": 2},
    )
    lines = (tmp_path / "net.py").read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if "h.mean(0)" in line)
    said = f"net.py:{number} couples samples, as the spec accepts: the loss of each microbatch is"
    for file in compile(spec):
        if file.path.startswith("rank"):
            assert said in " ".join(str(file.text).split())
    found = prove(spec, fork_server)
    assert {row.kind for row in found.rows} >= {"loss", "gradient"}
    assert "whole" not in {row.kind for row in found.rows}


SAMPLES = {"samples": 24}


@pytest.mark.parametrize(
    "parallel",
    [
        {"data": 2, "microbatches": 1},
        {"pipeline": 2, "data": 2, "microbatches": 2, "schedule": "1f1b"},
        pytest.param({"pipeline": 3, "data": 1, "microbatches": 4}, marks=pytest.mark.slow),
    ],
)
def test_two_towers_with_random_patches(tmp_path, fork_server, parallel):
    parallel = {"pipeline": 1} | parallel
    prove(vary(tmp_path, "flip", data=SAMPLES, parallel=parallel), fork_server, steps=2)


def test_two_towers_are_refused_unless_the_spec_accepts_them(tmp_path):
    spec = vary(
        tmp_path,
        "flip",
        model={"coupled": None},
        parallel={"pipeline": 2, "data": 1, "microbatches": 4},
    )
    with pytest.raises(CaptureError, match=r"flip\.py:\d+: f32\[batch, batch\] pairs the samples"):
        capture(spec)


def test_labels_without_the_last_dimension(tmp_path):
    """A loss of [batch, 1] beside [batch] pairs every score with every label."""
    code = "def build():\n    return nn.Linear(5, 1)\n"
    fields = {"x": {"shape": [5]}, "y": {"shape": []}}
    data = {"source": "random", "samples": 8, "fields": fields}
    with pytest.raises(CaptureError) as raised:
        capture(make_spec(tmp_path, code, data=data))
    message = f"f32[batch, 1] with f32[batch], spread to f32[batch, batch], {pairs}"
    assert raised.value.message.startswith(message)
    assert raised.value.hint.startswith("one shape for both, as squeeze(1) or unsqueeze(1)")
