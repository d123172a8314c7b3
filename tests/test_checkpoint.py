"""Checkpoints: a run that is ended at any moment goes on as if it had not been, in this layout or
another; what is damaged is named, and never taken up in part."""

import json
import random
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from jobs import make_spec, plant, prove

from ppc import pipeline
from ppc.emit.write import write
from ppc.frontend.load import load
from ppc.run.launch import run_forked
from ppc.run.verify import verify

pytestmark = pytest.mark.dist

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.first = nn.Linear(8, 8, bias=False)  # the norm takes it away
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.second, self.third, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 11)
        self.head.weight = self.embed.weight
        self.third.requires_grad_(False)

    def forward(self, tokens):
        x = torch.tanh(self.norm(self.first(self.embed(tokens))))
        return self.head(self.drop(torch.tanh(self.third(torch.tanh(self.second(x))))))

def build():
    return Net()
"""
TOKENS = {"dtype": "int64", "high": 11}
ADAMW = {"name": "adamw", "lr": 0.05}
CUTS = {1: [], 2: ["second"], 3: ["second", "head"], 4: ["first", "second", "head"]}


def compile_job(folder, name, stages=2, replicas=2, optimizer=ADAMW, every=2, keep=9, steps=7):
    """Global batches of 16 in 8 microbatches, however the model is cut."""
    spec = make_spec(
        folder,
        NET,
        model={"loss": "cross_entropy"},
        data={"source": "random", "samples": 48, "fields": {"tokens": TOKENS, "labels": TOKENS}},
        train={
            "global_batch": 16,
            "steps": steps,
            "precision": "fp64",
            "optimizer": optimizer,
            "lr_schedule": {"name": "cosine", "warmup": 2},
            "clip_norm": 1.0,
        },
        cluster={"devices_per_node": stages * replicas},
        parallel={
            "pipeline": stages,
            "data": replicas,
            "microbatches": 8 // replicas,
            "cuts": CUTS[stages],
        },
        checkpoint={"dir": "checkpoints", "every": every, "keep": keep},
    )
    write(pipeline.compile(spec, folder / name), folder / name)
    return folder / name


def run(folder, ranks, server=None):
    return run_forked(folder, ranks, timeout_s=60, server=server)


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").open()]


def weights(folder):
    parts = [torch.load(path) for path in sorted(folder.glob("weights-rank*.pt"))]
    return {name: tensor for part in parts for name, tensor in part.items()}


def saved(folder):
    return sorted(
        int(p.name.removeprefix("step-")) for p in (folder.parent / "checkpoints").iterdir()
    )


def forget(folder, steps):
    """As if the run had ended before these checkpoints."""
    for step in steps:
        shutil.rmtree(folder.parent / "checkpoints" / f"step-{step}")


def equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory, fork_server):
    """A run without an end in between: folder, losses, weights."""
    folder = compile_job(tmp_path_factory.mktemp("whole"), "out")
    run(folder, 4, fork_server).check()
    return folder, losses(folder), weights(folder)


@pytest.fixture
def again(whole, tmp_path):
    """A copy of it to spoil."""
    shutil.copytree(whole[0].parent, tmp_path / "copy")
    return tmp_path / "copy" / "out"


def test_it_goes_on_bit_by_bit(again, whole, fork_server):
    _, expected, tensors = whole
    assert saved(again) == [2, 4, 6]
    forget(again, [4, 6])
    (again / "metrics.jsonl").write_text((again / "metrics.jsonl").read_text()[:-5])
    for path in again.glob("weights*"):
        path.unlink()
    run(again, 4, fork_server).check()
    assert losses(again) == expected
    equal(weights(again), tensors)
    assert saved(again) == [2, 4, 6]


@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        {"name": "nadam", "lr": 0.01, "groups": [{"params": ["*.bias"], "lr": 0.1}]},
        {"name": "adafactor", "lr": 0.01},
    ],
    ids=lambda optimizer: optimizer["name"],
)
def test_other_optimizers(tmp_path, fork_server, optimizer):
    folder = compile_job(tmp_path, "out", replicas=1, optimizer=optimizer, steps=5)
    run(folder, 2, fork_server).check()
    expected, tensors = losses(folder), weights(folder)
    forget(folder, [4])
    run(folder, 2, fork_server).check()
    assert losses(folder) == expected
    equal(weights(folder), tensors)


@pytest.mark.parametrize(("stages", "replicas"), [(3, 1), (1, 2), (4, 1), (1, 1), (2, 2)])
def test_another_layout(tmp_path, fork_server, stages, replicas):
    """From two stages: the same samples, losses and moments, up to the order of sums."""
    first = compile_job(tmp_path, "first", replicas=1, steps=6)
    run(first, 2, fork_server).check()
    expected = losses(first)
    forget(first, [4, 6])
    other = compile_job(tmp_path, "other", stages, replicas, steps=6)
    run(other, stages * replicas, fork_server).check()
    assert saved(other) == [2, 4, 6]
    np.testing.assert_allclose(losses(other), expected[2:], rtol=0, atol=1e-10)
    for name, tensor in weights(first).items():
        if (
            name.startswith("norm.") and replicas > 1 and name.count("_") > 0
        ):  # each replica has seen a part
            continue
        torch.testing.assert_close(weights(other)[name], tensor, rtol=0, atol=1e-10)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "spoil"),
    [
        ("__0_0.distcp", flip),
        ("__2_0.distcp", lambda path: path.write_bytes(path.read_bytes()[:-9])),
        (".metadata", flip),
        ("__2_0.distcp", Path.unlink),
        ("facts.json", lambda path: path.write_text("{")),
        ("facts.json", Path.unlink),
    ],
)
def test_a_damaged_one_is_named_and_the_one_before_it_taken(again, whole, fork_server, file, spoil):
    spoil(again.parent / "checkpoints/step-6" / file)
    forget(again, [4])
    result = run(again, 4, fork_server)
    result.check()
    place = rf"step-6(/{re.escape(file)})? is damaged"
    assert re.search(place, result.ranks[0].stdout)
    assert losses(again) == whole[1]
    equal(weights(again), whole[2])


def test_a_batch_cut_otherwise_is_refused(again, fork_server):
    for script in again.glob("rank*.py"):
        plant(script, 'GLOBAL_BATCH, "seed": SEED', 'GLOBAL_BATCH, "seed": 9')
    result = run(again, 4, fork_server)
    assert "step-6 is of a run with {'global_batch': 16, 'seed': 0" in result.ranks[0].stderr


def test_a_full_disk_keeps_the_last(again, fork_server):
    forget(again, [4, 6])
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
    plant(again / "rank2.py", "first = resume()\n", f"first = resume()\n{limit}")
    result = run(again, 4, fork_server)
    assert re.search(r"step 4: .*step-4 was not written: .*File too large", result.ranks[2].stderr)
    assert {p.name for p in (again.parent / "checkpoints").iterdir()} == {"step-2", "partial"}


def test_old_ones_go(tmp_path, fork_server):
    folder = compile_job(tmp_path, "out", 1, 1, every=1, keep=3)
    run(folder, 1, fork_server).check()
    assert saved(folder) == [5, 6, 7]


def test_sigterm_saves_and_ends(again, whole, fork_server):
    forget(again, [2, 4, 6])
    kill = (
        f"    os.kill(os.getpid(), {int(signal.SIGTERM)}) if step == 1 else None\n    norm = clip"
    )
    plant(again / "rank2.py", "    norm = clip", kill)
    result = run(again, 4, fork_server)
    assert "rank 0, stage 0, replica 0: SIGTERM: step 4 is saved" in result.ranks[0].stderr
    assert saved(again) == [2, 4]
    assert losses(again) == whole[1][:4]
    plant(again / "rank2.py", kill, "    norm = clip")
    run(again, 4, fork_server).check()
    assert losses(again) == whole[1]


def test_killed_at_random_moments(again, whole, fork_server):
    """Twenty times, during writes too: every run that is left to end has the same losses."""
    forget(again, [2, 4, 6])
    chance = random.Random(0)
    scripts = sorted(again.glob("rank*.py"))
    texts = {script: script.read_text() for script in scripts}
    kill = "threading.Timer({}, os.kill, (os.getpid(), 9)).start()\nfirst = resume()\n"
    killed = 0
    for _ in range(20):
        script = chance.choice(scripts)
        plant(script, "import os\n", "import os\nimport threading\n")
        plant(script, "first = resume()\n", kill.format(chance.uniform(0, 0.25)))
        killed += any(rank.returncode == -9 for rank in run(again, 4, fork_server).ranks)
        script.write_text(texts[script])
        if (again / "weights-rank2.pt").exists():  # it came to its end: from the start again
            run(again, 4, fork_server).check()
            assert losses(again) == whole[1]
            forget(again, saved(again))
            for path in again.glob("weights*"):
                path.unlink()
    assert killed > 5
    run(again, 4, fork_server).check()
    assert losses(again) == whole[1]
    equal(weights(again), whole[2])


def test_parity(tmp_path, fork_server):
    """With checkpoints the scripts do what the user's model does; those of a run stay."""
    folder = compile_job(tmp_path, "out")
    kept = folder.parent / "checkpoints/step-4"
    kept.mkdir(parents=True)
    prove(load(tmp_path / "job.yaml"), fork_server, steps=3)
    found = verify(folder, steps=3, timeout_s=60, fork_server=fork_server)
    assert found.ok, str(found)
    assert list(kept.iterdir()) == []
    assert list(kept.parent.iterdir()) == [kept]


def test_a_state_that_is_no_tensor(tmp_path, fork_server):
    """SparseAdam counts its steps in Python."""
    code = """
def build():
    return nn.Embedding(11, 8, sparse=True)
"""
    spec = make_spec(
        tmp_path,
        code,
        model={"loss": "mse_loss"},
        data={
            "source": "random",
            "samples": 16,
            "fields": {"input": TOKENS, "target": {"shape": [8]}},
        },
        train={"steps": 4, "optimizer": {"name": "sparseadam", "lr": 0.1}},
        checkpoint={"dir": "checkpoints", "every": 2},
    )
    write(pipeline.compile(spec, tmp_path / "out"), tmp_path / "out")
    run(tmp_path / "out", 1, fork_server).check()
    expected = losses(tmp_path / "out")
    forget(tmp_path / "out", [4])
    run(tmp_path / "out", 1, fork_server).check()
    assert losses(tmp_path / "out") == expected
