"""What scripts read when they run: equal to the reference, each sample once an epoch, or an error
that names the sample."""

import re
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from jobs import make_spec, prove
from safetensors.torch import save_file
from test_data_files import integers, targets, token_model

from ppc.emit.write import write
from ppc.frontend.samples import read_samples, samples_of_step
from ppc.pipeline import compile
from ppc.run.launch import run_forked

pytestmark = pytest.mark.dist

MODEL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        x = x.to(self.first.weight.dtype).flatten(1)
        return self.last(torch.tanh(self.first(x)))

def build():
    return Net()

def loss(output, y, weight):
    return (weight * ((output - y) ** 2).mean(1)).mean()
"""
ROWS = """
import os
import torch

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, i):
        if i == -1:
            raise OSError("no image 7.jpg")
        if "RANK" in os.environ:  # in a script, not in the compiler
            with open("read.log", "a") as file:
                file.write(os.environ["RANK"] + " " + str(i) + chr(10))
        size = 1 + i % 6
        return torch.randn(size) + i, torch.randn(6).tolist(), 0.1 * i
"""


def two_stages(folder: Path, data, code=MODEL, device: str = "cpu"):
    return make_spec(
        folder,
        code,
        data=data,
        model={"loss": "net.py:loss"},
        cluster={"devices_per_node": 2, "device": device},
        train={"steps": None, "epochs": 2, "seed": 3},
        parallel={"pipeline": 2},
    )


@pytest.mark.parametrize(("dtype", "files"), [("uint16", "a.bin"), ("uint32", "*.bin")])
def test_tokens(dtype, files, tmp_path, fork_server):
    rng = np.random.default_rng(0)
    for name, count in (("a.bin", 41), ("b.bin", 17)):
        rng.integers(0, np.iinfo(dtype).max, count, dtype).tofile(tmp_path / name)
    data = {"source": "tokens", "files": files, "dtype": dtype, "sequence": 4}
    prove(two_stages(tmp_path, data, token_model), fork_server)


def test_arrays_of_odd_shapes(tmp_path, fork_server):
    """Integers of four dimensions in Fortran's order, and a number a sample."""
    np.save(tmp_path / "x.npy", np.asfortranarray(integers.astype("u2")))
    np.save(tmp_path / "y.npy", targets.astype("f2"))
    np.save(tmp_path / "weight.npy", np.arange(10) % 3 == 0)
    data = {"source": "arrays", "files": {name: f"{name}.npy" for name in ("x", "y", "weight")}}
    prove(two_stages(tmp_path, data), fork_server)


def test_safetensors_of_odd_shapes(tmp_path, fork_server):
    x, y = torch.from_numpy(integers).to(torch.bfloat16), torch.from_numpy(targets).double()
    tensors = {"x": x, "y": y, "weight": torch.arange(10).to(torch.uint8)}
    save_file(tensors, tmp_path / "all.safetensors")
    prove(
        two_stages(tmp_path, {"source": "arrays", "files": "all.safetensors"}, MODEL), fork_server
    )


def rows_spec(folder: Path, last_batch: str = "keep", workers: int = 0, device: str = "cpu"):
    (folder / "rows.py").write_text(ROWS)
    data = {"source": "rows.py:Rows", "fields": ["x", "y", "weight"], "workers": workers}
    data |= {"pad": {"x": 0.5}, "length": 6, "last_batch": last_batch}
    return two_stages(folder, data, device=device)


@pytest.mark.parametrize(("workers", "device"), [(0, "cpu"), (2, "cpu"), (2, "h100")])
def test_padded_samples_of_a_dataset(workers, device, tmp_path, fork_server):
    """What it draws is the same with any number of workers: the reference has none."""
    prove(rows_spec(tmp_path, workers=workers, device=device), fork_server)


@pytest.mark.parametrize(("workers", "last_batch"), [(0, "keep"), (2, "keep"), (2, "drop")])
def test_every_sample_is_read_once_an_epoch(workers, last_batch, tmp_path, fork_server):
    """By each of the ranks, which read different fields of it; those that are dropped are not."""
    spec = rows_spec(tmp_path, workers=workers, last_batch=last_batch)
    run(spec, fork_server).check()
    lines = (tmp_path / "out" / "read.log").read_text().splitlines()
    found = Counter(tuple(map(int, line.split())) for line in lines)
    steps = (2 if last_batch == "drop" else 3) * 2
    assert read_samples(spec).count == 11
    taken = Counter(i for step in range(steps) for i in samples_of_step(spec, 11, step))
    assert found == Counter({(rank, i): n for rank in (0, 1) for i, n in taken.items()})
    assert last_batch == "drop" or set(taken.values()) == {2}


def run(spec, server):
    folder = spec.folder / "out"
    write(compile(spec, folder), folder)
    return run_forked(folder, 2, timeout_s=60, server=server)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read(workers, tmp_path, fork_server):
    """The user's error comes at once, with the sample, the rank and the step; nothing is left."""
    spec = rows_spec(tmp_path, workers=workers)
    folder = tmp_path / "out"
    write(compile(spec, folder), folder)
    (folder / "rows.py").write_text(ROWS.replace("i == -1", "i == 7"))
    started = time.monotonic()
    result = run_forked(folder, 2, timeout_s=60, server=fork_server)
    assert time.monotonic() - started < 20
    step = next(step for step in range(3) if 7 in samples_of_step(spec, 11, step))
    rank = result.ranks[result.first_failed]
    where = f"rank {rank.rank}, stage {rank.rank}, step {step + 1}: sample 7 cannot be read"
    assert f"RuntimeError: {where}: OSError: no image 7.jpg\n" in rank.stderr
    assert re.search(r'rows.py", line \d+, in __getitem__', rank.stderr)
    assert not left(folder)


def left(folder: Path, within_s: float = 5.0) -> list[Path]:
    """Processes that still run in the folder after that time, which they may take to end."""
    deadline, found = time.monotonic() + within_s, [folder]
    while found and time.monotonic() < deadline:
        found = []
        for entry in Path("/proc").glob("[0-9]*/cwd"):
            with suppress(OSError):  # it has ended, or is another user's
                found += [entry] if entry.readlink() == folder else []
    return found


def test_workers_end_with_the_training(tmp_path, fork_server):
    result = run(rows_spec(tmp_path, workers=2), fork_server).check()
    assert [rank.stderr for rank in result.ranks] == ["", ""]
    assert not left(tmp_path / "out")
