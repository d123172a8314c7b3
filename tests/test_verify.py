"""Scripts that are right are found equal to the user's model, whatever they are verified from.

Faults in training are in test_faults.py.
"""

import json

import numpy as np
import pytest
import torch
from jobs import failed, make_spec, plant

from ppc import pipeline
from ppc.emit.write import write
from ppc.errors import RunError
from ppc.run.verify import verify

pytestmark = pytest.mark.dist

TIED = """
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        for module in (self.embed, self.first, self.second):
            nn.init.normal_(module.weight, std=0.3)

    def forward(self, tokens):
        x = torch.tanh(self.norm(self.first(self.embed(tokens))))
        return self.head(torch.tanh(self.second(self.drop(x))))

def build():
    return Net()
"""
TOKENS = {"dtype": "int64", "high": 11}
STEPS = 5


def tied_spec(folder, **train):
    return make_spec(
        folder,
        TIED,
        model={"loss": "cross_entropy"},
        data={"source": "random", "samples": 31, "fields": {"tokens": TOKENS, "labels": TOKENS}},
        train={
            "global_batch": 12,
            "steps": STEPS,
            "optimizer": {"name": "adamw", "lr": 0.01},
            "lr_schedule": {"name": "cosine", "warmup": 2},
            "clip_norm": 0.5,
            **train,
        },
        cluster={"devices_per_node": 2},
        parallel={"pipeline": 2, "microbatches": 3, "cuts": ["second"]},
    )


@pytest.fixture
def compiled(tmp_path):
    """A folder of scripts, and the spec that it was compiled from."""
    spec = tied_spec(tmp_path)
    folder = tmp_path / "out"
    write(pipeline.compile(spec, folder), folder)
    return folder


def test_scripts_of_a_spec_in_float32_and_float64(tmp_path, fork_server):
    spec = tied_spec(tmp_path, steps=20)
    for exact in (False, True):
        comparison = verify(spec.path, steps=4, exact=exact, fork_server=fork_server)
        assert comparison.ok, str(comparison)
        compared = {(row.kind, row.step): row.compared for row in comparison.rows}
        for step in range(4):
            assert compared["loss", step] == 1
            assert compared["gradient", step] == 8  # the tied one on both ranks
            assert compared["parameter", step] == 8
            assert compared["buffer", step] == 3
        assert ("loss", 4) not in compared
        assert compared["initial", None] == 11
        assert compared["saved", None] == 12  # and that all of them load into the model
        assert {row.limit for row in comparison.rows if row.kind == "parameter"} == {
            1e-10 if exact else 1e-5
        }


def test_a_folder_runs_as_it_is_and_only_as_far_as_asked(compiled, fork_server):
    before = sorted(path.name for path in compiled.parent.rglob("*"))
    for steps in (None, 2, STEPS + 9):
        comparison = verify(compiled, steps=steps, fork_server=fork_server)
        assert comparison.ok, str(comparison)
        assert max(r.step for r in comparison.rows if r.kind == "loss") + 1 == min(steps or 5, 5)
        assert any(row.kind == "saved" for row in comparison.rows) == (steps != 2)
    assert sorted(path.name for path in compiled.parent.rglob("*")) == before


@pytest.mark.slow
def test_under_torchrun(compiled):
    assert verify(compiled, steps=2).ok
    assert verify(compiled).ok


def test_weights_that_are_saved_under_another_name_or_changed(compiled, fork_server):
    save = "torch.save(stage.state_dict()"
    plant(
        compiled / "rank1.py",
        save,
        'torch.save({n.replace("second", "third"): t for n, t in stage.state_dict().items()}',
    )
    comparison = verify(compiled, fork_server=fork_server)
    assert failed(comparison) == {("saved", None)}
    (row,) = [row for row in comparison.rows if row.kind == "saved"]
    assert row.failed == 3  # the two names, and loading them
    plant(compiled / "rank1.py", 'replace("second", "third"): t', 'replace("", ""): t * 2')
    assert failed(verify(compiled, fork_server=fork_server)) == {("saved", None)}


def test_weights_that_are_not_saved_though_an_older_run_left_some(compiled, fork_server):
    torch.save({}, compiled / "weights-rank1.pt")
    plant(compiled / "rank1.py", 'FOLDER / "weights-rank1.pt")', 'FOLDER / "other.pt")')
    comparison = verify(compiled, fork_server=fork_server)
    assert failed(comparison) == {("saved", None)}
    (row,) = [row for row in comparison.rows if row.kind == "saved"]
    assert (row.name, row.note) == ("weights-rank1.pt", "not written")


def test_scripts_that_fail_are_an_error_with_the_ranks_words(compiled, fork_server):
    plant(compiled / "rank1.py", ".backward()", ".backward(torch.ones(7))")
    with pytest.raises(RunError, match=r"rank 1 of 2 ranks failed first[\s\S]*RuntimeError"):
        verify(compiled, steps=1, fork_server=fork_server)


def test_a_folder_without_its_spec(compiled, fork_server):
    manifest = json.loads((compiled / "manifest.json").read_text())
    spec = compiled.parent / manifest["spec"]
    text = spec.read_text()
    spec.write_text(text + "\n")
    with pytest.raises(RunError, match=r"job.yaml has changed since .* was compiled from it"):
        verify(compiled, fork_server=fork_server)
    spec.unlink()
    with pytest.raises(RunError, match=r"was compiled from .*job.yaml, which is not there"):
        verify(compiled, fork_server=fork_server)
    (compiled / "manifest.json").unlink()
    with pytest.raises(RunError, match=r"has no manifest.json that names its spec"):
        verify(compiled, fork_server=fork_server)


def test_a_frozen_stage_and_a_single_one(tmp_path, fork_server):
    code = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(5, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.norm(self.encoder(x)))

def build():
    return Net()
"""
    for stages in (1, 2):
        (tmp_path / str(stages)).mkdir()
        spec = make_spec(
            tmp_path / str(stages),
            code,
            data={
                "source": "random",
                "samples": 20,
                "fields": {"x": {"shape": [5]}, "y": {"shape": [1]}},
            },
            cluster={"devices_per_node": stages},
            parallel={"pipeline": stages, "cuts": ["head"][: stages - 1]},
        )
        folder = spec.folder / "out"
        write(pipeline.compile(spec, folder), folder)
        for steps in (2, None):
            comparison = verify(folder, steps=steps, fork_server=fork_server)
            assert comparison.ok, str(comparison)


def test_values_of_numpy_are_those_beside_the_scripts(tmp_path, fork_server):
    """They differ each time the model is built."""
    code = """
import numpy as np

def build():
    net = nn.Linear(20, 1)
    net.weight.data = torch.from_numpy(np.random.default_rng().random((1, 20), np.float32))
    return net
"""
    fields = {"x": {"shape": [20]}, "y": {"shape": [1]}}
    spec = make_spec(tmp_path, code, data={"source": "random", "samples": 8, "fields": fields})
    folder = tmp_path / "out"
    write(pipeline.compile(spec, folder), folder)
    assert (folder / "weights.safetensors").exists()
    for target in (folder, spec.path):
        comparison = verify(target, steps=1, fork_server=fork_server)
        assert comparison.ok, str(comparison)


def test_a_copy_finds_the_data_that_the_scripts_name_from_their_own_place(tmp_path, fork_server):
    (tmp_path / "specs").mkdir()
    for name, width in (("x", 5), ("y", 1)):
        np.save(tmp_path / f"specs/{name}.npy", np.ones((8, width), np.float32))
    data = {"source": "arrays", "files": {"x": "x.npy", "y": "y.npy"}}
    spec = make_spec(tmp_path / "specs", data=data)
    folder = tmp_path / "generated" / "job"
    write(pipeline.compile(spec, folder), folder)
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"job.yaml"', '"specs/job.yaml"'))
    comparison = verify(folder, steps=1, fork_server=fork_server)
    assert comparison.ok, str(comparison)
