"""The quickstart on one GPU: in float64 as on the CPU, in bf16, and compiled (`make gpu`).

Where there is no GPU the same runs are made on the CPU, of the scripts for GPUs.
"""

import json
import math
import shutil

import pytest
import torch
from jobs import vary

from ppc.emit.write import write
from ppc.pipeline import compile
from ppc.run.launch import run_torchrun

HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
SMALL = {"layers": 2, "width": 64, "heads": 2, "context": 32}
without_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
without_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")

pytestmark = pytest.mark.dist


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, without_gpu])])
def kind(request):
    """Where the scripts run."""
    return request.param


def train(folder, kind, *, device="h100", args=SMALL, steps=10, **train):
    """Losses of the quickstart, of one stage, and its weights; the scripts are for `device`."""
    folder.mkdir()
    spec = vary(
        folder,
        "quickstart",
        args,
        data={"sequence": args["context"]},
        train={"global_batch": 8, "steps": steps, "lr_schedule": "constant", **train},
        cluster={"device": device},
        parallel={"pipeline": 1, "microbatches": 2},
    )
    write(compile(spec, folder / "out"), folder / "out")
    environment = HIDDEN if kind == "cpu" else {}
    run_torchrun(folder / "out", 1, timeout_s=500, environment=environment).check()
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    weights = torch.load(folder / "out" / "weights-rank0.pt", map_location="cpu", weights_only=True)
    return [json.loads(line)["loss"] for line in lines], weights


@pytest.mark.slow
def test_float64_is_as_on_the_cpu(tmp_path, kind):
    losses, weights = train(tmp_path / "a", kind, precision="fp64")
    expected, others = train(tmp_path / "b", "cpu", device="cpu", precision="fp64")
    assert losses == pytest.approx(expected, rel=1e-10)
    assert len(losses) == 10
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=1e-7, atol=1e-10)


def test_bf16_learns(tmp_path, kind):
    losses, weights = train(tmp_path / "a", kind, steps=30, precision="bf16")
    assert all(map(math.isfinite, losses))
    assert sum(losses[-5:]) / 5 < losses[0] - 0.5
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


@without_compiler
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_it_trains_alike(tmp_path, kind, precision):
    eager, _ = train(tmp_path / "a", kind, steps=5, precision=precision)
    compiled, _ = train(tmp_path / "b", kind, steps=5, precision=precision, compile=True)
    assert compiled == pytest.approx(eager, rel=1e-5 if precision == "fp32" else 1e-2)
    assert len(compiled) == 5
