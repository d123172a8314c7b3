"""`compile: true`: the compiled stages train as the user's model does, dropout included."""

import shutil

import pytest
from jobs import failed, make_spec, plant, vary

from ppc.emit.write import write
from ppc.pipeline import compile
from ppc.run.verify import verify

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile for CPUs needs g++"),
]

NET = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.dropout = nn.Dropout({chance})

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.linear(x)))

def build():
    return nn.Sequential(*(Block() for _ in range({blocks})), nn.Linear(6, 1))
"""
FIELDS = {"x": {"shape": [6]}, "y": {"shape": [1]}}


def job(folder, *, chance=0.3, blocks=3, stages=1, samples=16):
    """Blocks with dropout, in 2 microbatches of 4 samples; the last batch may be shorter."""
    return make_spec(
        folder,
        NET.format(chance=chance, blocks=blocks),
        data={"source": "random", "samples": samples, "fields": FIELDS},
        train={"global_batch": 8, "compile": True, "precision": "fp64"},
        cluster={"devices_per_node": stages},
        parallel={"pipeline": stages, "microbatches": 2},
    )


@pytest.mark.slow
def test_dropout_is_that_of_the_model(tmp_path, fork_server):
    spec = job(tmp_path, blocks=1)
    folder = tmp_path / "out"
    write(compile(spec, folder), folder)
    text = (folder / "rank0.py").read_text()
    assert "@torch.compiler.disable\ndef seed_layer(key, path):" in text
    line = 'stage.forward = torch.compile(stage.forward, options={"fallback_random": True})'
    assert line in text
    found = verify(folder, steps=2, timeout_s=300, fork_server=fork_server)
    assert found.ok, str(found)
    assert {row.limit for row in found.rows if row.kind == "loss"} == {1e-10}


@pytest.mark.slow
def test_inductors_own_draws_would_show(tmp_path, fork_server):
    folder = tmp_path / "out"
    write(compile(job(tmp_path), folder), folder)
    plant(folder / "rank0.py", '{"fallback_random": True}', "{}")
    found = verify(folder, steps=2, timeout_s=300, fork_server=fork_server)
    assert ("loss", 0) in failed(found)


@pytest.mark.slow
def test_stages(tmp_path, fork_server):
    """More layers to seed than torch compiles a function for, and a short last batch, of 3 samples:
    microbatches of other sizes."""
    spec = job(tmp_path, blocks=12, stages=2, samples=11)
    found = verify(spec.path, steps=4, timeout_s=300, fork_server=fork_server)
    assert found.ok, str(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spiking", "series"])
def test_autograd_functions_and_leaves(tmp_path, fork_server, name):
    """What stays whole is the user's own code, which torch.compile takes as it takes a model's."""
    spec = vary(tmp_path, name, train={"compile": True, "global_batch": 8, "precision": "fp64"})
    found = verify(spec.path, steps=2, timeout_s=300, fork_server=fork_server)
    assert found.ok, str(found)


def test_without_dropout_nothing_is_seeded(tmp_path):
    (file, *_) = compile(job(tmp_path, chance=0.0), tmp_path / "out")
    assert "stage.forward = torch.compile(stage.forward)\n" in str(file.text)
    assert "torch.compiler" not in str(file.text)
