"""The bytes that autograd keeps on each rank, counted in a run, are those that the plan counts."""

from pathlib import Path

import kept
import pytest
from jobs import vary
from thin import half_slow

from ppc.analysis.cost import microbatch_size
from ppc.analysis.memory import kept_bytes, live_microbatches, measure_runs, reruns
from ppc.emit.write import write
from ppc.pipeline import compile
from ppc.run.launch import run_forked

pytestmark = pytest.mark.dist

TOKENS = {"shape": [8], "dtype": "int64", "high": 32}
GPT = {"layers": 3, "width": 16, "heads": 2, "context": 8, "vocab": 32, "dropout": 0.1}
IMAGES = {"images": {"shape": [3, 16, 16]}, "labels": {"shape": [], "dtype": "int64", "high": 10}}
MODELS = {
    "gpt_tied": (GPT, {"tokens": TOKENS, "labels": TOKENS}, ["blocks"]),
    "resnet18": ({"width": 4}, IMAGES, ["layer1", "layer2"]),
}
"""Spec -> arguments, fields, and modules to compute again."""
CHECKPOINTS = {
    "gpt_tied": ("gpt.py", "block(x)"),
    "resnet18": ("resnet.py", "self.layer2(x)"),
}
"""Spec -> a call in its model that the user's checkpoint goes around."""


def make_spec(folder, name, recompute, schedule, replicas=1):
    args, fields, modules = MODELS[name]
    parallel = {
        "pipeline": 3,
        "schedule": schedule,
        "microbatches": 4,
        "data": replicas,
        "recompute": {"modules": modules, "user": "none"}.get(recompute, recompute),
    }
    train = {"global_batch": 8 * replicas, "steps": 2, "lr_schedule": "constant"}
    data = {"samples": 24 * replicas, "fields": fields, "last_batch": "drop"}
    spec = vary(folder, name, args, data=data, train=train, parallel=parallel)
    if recompute == "user":
        file, call = CHECKPOINTS[name]
        path = folder / "models" / file
        text = path.read_text()
        assert call in text
        module = call.removesuffix("(x)")
        around = f"torch.utils.checkpoint.checkpoint({module}, x, use_reentrant=False)"
        path.write_text(f"import torch.utils.checkpoint\n{text.replace(call, around)}")
    return spec


def compiled(spec, folder):
    """The scripts in the folder; by stage the bytes that the plan counts."""
    forms = {}
    write(compile(spec, folder, forms.__setitem__), folder)
    starts = [stage.layers[0] for stage in forms["place"].stages]
    footprint = measure_runs(forms["recompute"], microbatch_size(spec), starts)
    found = []
    for stage in range(len(starts)):
        count = 1 if reruns(spec, stage) else live_microbatches(spec, stage)
        found.append(int(kept_bytes(footprint, spec, count, (stage, stage + 1))))
    return found


def counted(folder, server, world_size):
    wrapper = (str(Path(kept.__file__).absolute()), str(folder))
    run_forked(folder / "out", world_size, timeout_s=60, server=server, wrapper=wrapper).check()
    return [int((folder / f"{rank}.kept").read_text()) for rank in range(world_size)]


@pytest.mark.parametrize(
    ("name", "recompute", "schedule"),
    half_slow(MODELS, ["none", "stage", "modules", "user"], ["gpipe", "1f1b"]),
)
def test_the_plan_counts_what_is_kept(tmp_path, fork_server, name, recompute, schedule):
    """On the first, the middle and the last of three stages."""
    spec = make_spec(tmp_path, name, recompute, schedule)
    expected = compiled(spec, tmp_path / "out")
    assert counted(tmp_path, fork_server, 3) == expected


@pytest.mark.parametrize("recompute", ["none", "modules"])
def test_of_replicas_each_counts_so(tmp_path, fork_server, recompute):
    spec = make_spec(tmp_path, "gpt_tied", recompute, "1f1b", replicas=2)
    expected = [peak for peak in compiled(spec, tmp_path / "out") for _ in range(2)]
    assert counted(tmp_path, fork_server, 6) == expected


def test_whole_fields_count_once(tmp_path, fork_server):
    """A graph's, of which every microbatch takes all."""
    spec = vary(tmp_path, "gcn", {"dropout": 0.0}, train={"steps": 2})
    expected = compiled(spec, tmp_path / "out")
    assert counted(tmp_path, fork_server, 2) == expected
