"""What a spec asks for, the scripts do: models, data, batches, optimizers, schedules of the rate.

Each case compiles anew in float64, runs the ranks and the user's own model, and compares every
step's loss, gradients, weights and buffers (limit 1e-10), and what was saved.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from jobs import make_spec, prove, vary
from safetensors.torch import save_file
from thin import half_slow

from ppc.emit.write import write
from ppc.errors import PlanError
from ppc.frontend.samples import read_samples
from ppc.pipeline import compile, lower

pytestmark = pytest.mark.dist

IMAGES = {
    "samples": 20,
    "fields": {
        "images": {"shape": [3, 16, 16]},
        "labels": {"shape": [], "dtype": "int64", "high": 10},
    },
}
VOLUMES = {
    "samples": 10,
    "fields": {
        "volumes": {"shape": [1, 8, 8, 8]},
        "labels": {"shape": [8, 8, 8], "dtype": "int64", "high": 3},
    },
}
TEXT = {"sequence": 8}
GPT2 = {"layers": 2, "width": 16, "heads": 2, "context": 8, "dropout": 0.1}
LLAMA = {"layers": 3, "width": 16, "heads": 2, "kv_heads": 1, "context": 8}
MLP = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)

def build():
    return Net()
"""
FIELDS = {"x": {"shape": [6]}, "y": {"shape": [2]}}


@pytest.mark.parametrize(
    ("name", "args", "data", "stages", "schedule"),
    [
        ("resnet18", {"width": 4}, IMAGES, 2, "gpipe"),
        pytest.param("resnet18", {"width": 4}, IMAGES, 3, "1f1b", marks=pytest.mark.slow),
        ("unet3d", {"levels": 2}, VOLUMES, 3, "1f1b"),
        pytest.param("unet3d", {"levels": 2}, VOLUMES, 4, "gpipe", marks=pytest.mark.slow),
        ("lstm", {"width": 16}, TEXT, 2, "1f1b"),
        pytest.param("lstm", {"width": 16}, TEXT, 3, "gpipe", marks=pytest.mark.slow),
        ("dlrm", {}, {}, 2, "1f1b"),
        pytest.param("dlrm", {}, {}, 3, "gpipe", marks=pytest.mark.slow),
        ("frozen", {}, IMAGES, 2, "gpipe"),
        pytest.param("frozen", {}, IMAGES, 3, "1f1b", marks=pytest.mark.slow),
        ("gpt2", GPT2, TEXT, 2, "1f1b"),
        pytest.param("gpt2", GPT2, TEXT, 4, "gpipe", marks=pytest.mark.slow),
        ("llama", LLAMA, TEXT, 2, "gpipe"),
        pytest.param("llama", LLAMA, TEXT, 3, "1f1b", marks=pytest.mark.slow),
    ],
)
def test_a_model(tmp_path, fork_server, name, args, data, stages, schedule):
    parallel = {"pipeline": stages, "schedule": schedule, "microbatches": 3}
    spec = vary(tmp_path, name, args, data=data, train={"global_batch": 8}, parallel=parallel)
    prove(spec, fork_server, steps=3)


@pytest.mark.slow
def test_skips_over_stages(tmp_path, fork_server):
    cuts = ["encoders.1", "bottleneck", "ups.1"]
    parallel = {"pipeline": 4, "schedule": "1f1b", "microbatches": 3, "cuts": cuts}
    spec = vary(tmp_path, "unet3d", {"levels": 2}, data=VOLUMES, parallel=parallel)
    programs = lower(spec, tmp_path).programs
    ends = {(edge.source, edge.target) for program in programs for edge in program.edges}
    assert ends >= {(0, 3), (3, 0)}
    prove(spec, fork_server, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dlrm", "unet3d"])
def test_a_model_under_torchrun(tmp_path, name):
    prove(vary(tmp_path, name, train={"global_batch": 8}), None, steps=2)


def mlp(folder: Path, *, data=None, train=None, **parallel):
    """The small net on 22 random samples, in batches of 8: the last of an epoch has 6."""
    data = {"source": "random", "samples": 22, "fields": FIELDS} | (data or {})
    parallel = {"pipeline": 2, "microbatches": 3} | parallel
    return make_spec(
        folder,
        MLP,
        data={key: value for key, value in data.items() if value is not None},
        train={"global_batch": 8, "steps": 6} | (train or {}),
        cluster={"devices_per_node": parallel["pipeline"]},
        parallel=parallel,
    )


def num_steps(found):
    return sum(row.kind == "loss" for row in found.rows)


@pytest.mark.parametrize(
    ("shape", "samples", "last_batch"),
    half_slow([(1, 4), (2, 1), (2, 3), (3, 4), (3, 8)], [8, 9, 22, 24], ["keep", "drop"]),
)
def test_batches(tmp_path, fork_server, shape, samples, last_batch):
    """Even and uneven microbatches; a last batch of 1 or of 6 samples, or none."""
    stages, microbatches = shape
    data = {"samples": samples, "last_batch": last_batch}
    spec = mlp(tmp_path, data=data, pipeline=stages, microbatches=microbatches)
    assert num_steps(prove(spec, fork_server)) == 6


@pytest.mark.parametrize("samples", [1, 3])
def test_fewer_samples_than_microbatches(tmp_path, fork_server, samples):
    prove(mlp(tmp_path, data={"samples": samples}, pipeline=3, microbatches=5), fork_server)


@pytest.mark.parametrize(("last_batch", "steps"), [("keep", 6), ("drop", 4)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_epochs(tmp_path, fork_server, last_batch, steps, schedule):
    spec = mlp(
        tmp_path,
        data={"last_batch": last_batch},
        train={"epochs": 2, "lr_schedule": "linear"},
        schedule=schedule,
    )
    assert num_steps(prove(spec, fork_server)) == steps


@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"name": "sgd", "lr": 0.1, "momentum": 0.9, "dampening": 0.3},
        {"name": "adamw", "lr": 0.01},
        {"name": "adamw", "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.2, "amsgrad": True},
    ],
    ids=["momentum", "nesterov", "dampening", "adamw", "amsgrad"],
)
def test_an_optimizer(tmp_path, fork_server, optimizer):
    prove(mlp(tmp_path, train={"optimizer": optimizer}), fork_server)


@pytest.mark.parametrize(
    ("name", "warmup", "final"), half_slow(["constant", "linear", "cosine"], [0, 2, 6], [0, 0.1])
)
def test_a_course_of_the_learning_rate(tmp_path, fork_server, name, warmup, final):
    course = {"name": name, "warmup": warmup} | ({"final": final} if name != "constant" else {})
    prove(mlp(tmp_path, train={"lr_schedule": course}), fork_server)


@pytest.mark.parametrize("norm", [0.05, 1e9])
@pytest.mark.parametrize("stages", [1, 3])
def test_clipping(tmp_path, fork_server, norm, stages):
    prove(mlp(tmp_path, train={"clip_norm": norm}, pipeline=stages), fork_server)


def test_float32(tmp_path, fork_server):
    train = {"clip_norm": 0.05, "optimizer": "adamw", "lr_schedule": {"name": "cosine"}}
    prove(mlp(tmp_path, train=train, pipeline=3), fork_server, exact=False)


def test_another_seed(tmp_path, fork_server):
    prove(mlp(tmp_path, train={"seed": 7}), fork_server)


def write_npy(folder):
    generator = np.random.default_rng(0)
    np.save(folder / "x.npy", generator.standard_normal((22, 6)).astype(np.float32))
    np.save(folder / "y.npy", generator.standard_normal((22, 2)))
    return {"source": "arrays", "files": {"x": "x.npy", "y": "y.npy"}}


def write_fortran_npy(folder):
    generator = np.random.default_rng(0)
    np.save(folder / "x.npy", np.asfortranarray(generator.random((22, 6)).astype(np.float16)))
    np.save(folder / "y.npy", np.asfortranarray(generator.integers(0, 9, (22, 2), np.int16)))
    return {"source": "arrays", "files": {"x": "x.npy", "y": "y.npy"}}


def write_safetensors(folder):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(22, 6, generator=generator)
    y = torch.randn(22, 2, generator=generator, dtype=torch.float64)
    save_file({"x": x, "y": y}, folder / "arrays.safetensors")
    return {"source": "arrays", "files": "arrays.safetensors"}


def write_dataset(folder):
    (folder / "points.py").write_text("""
import torch
from torch.utils.data import Dataset

class Points(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        return x, [0.1 * i, 1.0]
""")
    return {"source": "points.py:Points", "args": {"count": 22}, "fields": ["x", "y"]}


def write_dataset_of_dicts(folder):
    (folder / "points.py").write_text("""
import numpy as np

class Points:
    def __len__(self):
        return 22

    def __getitem__(self, i):
        return {"y": np.array([0.1 * i, 1.0]), "x": np.random.default_rng(i).random(6)}
""")
    return {"source": "points.py:Points"}


@pytest.mark.parametrize(
    "write",
    [write_npy, write_fortran_npy, write_safetensors, write_dataset, write_dataset_of_dicts],
)
@pytest.mark.parametrize("stages", [1, 3])
def test_data(tmp_path, fork_server, write, stages):
    data = dict.fromkeys(("samples", "fields")) | write(tmp_path)
    prove(mlp(tmp_path, data=data, pipeline=stages), fork_server, exact=stages == 3)


def test_text(tmp_path, fork_server):
    """Of several patterns, a file found twice, and one that makes no sample of its own."""
    for name, text in (("a.txt", "some text " * 9), ("b.txt", "more" * 20), ("c.txt", "x")):
        (tmp_path / name).write_text(text)
    data = {"files": ["*.txt", "a*"], "sequence": 8, "last_batch": "drop"}
    spec = vary(tmp_path, "lstm", {"width": 8, "vocab": 256}, data=data, train={"global_batch": 8})
    prove(spec, fork_server, steps=5)


def write_random_dataset(folder):
    """Input and label, which are read on different ranks, share what is drawn."""
    (folder / "points.py").write_text("""
import random
import numpy as np
import torch

class Points:
    def __len__(self):
        return 22

    def __getitem__(self, i):
        noise = torch.randn(1).item() + random.random() + np.random.rand()
        return torch.full((6,), i + noise) / 9, torch.full((2,), i + noise)
""")
    return {"source": "points.py:Points", "fields": ["x", "y"]}


@pytest.mark.parametrize("last_batch", ["keep", "drop"])
def test_a_dataset_that_draws_at_random(tmp_path, fork_server, last_batch):
    """Alike on every rank, and anew in each epoch."""
    data = dict.fromkeys(("samples", "fields")) | write_random_dataset(tmp_path)
    data |= {"last_batch": last_batch}
    spec = mlp(tmp_path, data=data, train={"epochs": 2, "global_batch": 11}, pipeline=2)
    prove(spec, fork_server)
    samples = read_samples(spec)
    first, again, other = (samples.batch([3], ["x"], epoch)[0] for epoch in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_scripts_for_gpus_are_proved_without_them(tmp_path, fork_server):
    """Also where the last stage holds nothing but a tied head, whose norm the first one counts."""
    spec = vary(
        tmp_path,
        "gpt_tied",
        {"layers": 2, "width": 16, "heads": 2},
        parallel={"pipeline": 3, "microbatches": 4, "cuts": ["blocks.1", "head"]},
        cluster={"device": "h100"},
    )
    prove(spec, fork_server, steps=2)
    write(compile(spec, tmp_path / "out"), tmp_path / "out")
    script = (tmp_path / "out" / "rank2.py").read_text()
    assert 'backend, device_id = ("nccl", device) if cuda else ("gloo", None)\n' in script
    assert "get_total_norm(grads).square().to(device)\n" in script


def test_a_tied_weight_starts_as_the_user_made_it_under_either_name(tmp_path, fork_server):
    """Only the second name is called; the first comes first among the parameters."""
    code = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.embed = nn.Embedding(20, 6), nn.Embedding(20, 6)
        self.embed.weight = self.shared.weight
        self.mid, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 20)

    def forward(self, x):
        return self.head(self.norm(self.mid(self.embed(x)))).transpose(1, 2)

def build():
    return Net()
"""
    token = {"shape": [4], "dtype": "int64", "high": 20}
    spec = make_spec(
        tmp_path,
        code,
        model={"loss": "cross_entropy"},
        data={"source": "random", "samples": 12, "fields": {"x": token, "y": token}},
        cluster={"devices_per_node": 2},
        parallel={"pipeline": 2},
    )
    prove(spec, fork_server)


@pytest.mark.parametrize("line", ["h @ self.a.weight", "h + self.norm.weight"])
def test_a_weight_read_outside_its_module(tmp_path, fork_server, line):
    """On a stage that holds nothing else of the module."""
    code = f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        h = self.b(self.norm(self.a(x)).tanh())
        return self.c({line})

def build():
    return Net()
"""
    spec = make_spec(
        tmp_path,
        code,
        data={"source": "random", "samples": 16, "fields": FIELDS},
        cluster={"devices_per_node": 2},
        parallel={"pipeline": 2, "cuts": ["c"]},
    )
    prove(spec, fork_server)


def test_an_operand_that_gives_a_shape_alone(tmp_path, fork_server):
    """No stage waits for its gradient."""
    code = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        h = self.a(x)
        z = self.b(x * 2).relu()
        return self.c(z * self.scale.expand_as(h))

def build():
    return Net()
"""
    spec = make_spec(
        tmp_path,
        code,
        data={"source": "random", "samples": 16, "fields": FIELDS},
        cluster={"devices_per_node": 2},
        parallel={"pipeline": 2},
    )
    prove(spec, fork_server)


def test_a_tied_weight_that_one_stage_reads_without_gradient(tmp_path):
    code = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mid, self.second = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x):
        h = self.mid(self.first(x))
        with torch.no_grad():
            near = h @ self.first.weight
        return self.second(h + near)

def build():
    return Net()
"""
    spec = make_spec(
        tmp_path,
        code,
        cluster={"devices_per_node": 2},
        parallel={"pipeline": 2, "cuts": ["mid"]},
    )
    with pytest.raises(
        PlanError, match=r"stage 1 reads first.weight without gradient, and stage 0"
    ):
        lower(spec, tmp_path)


def test_draws_that_nobody_reads(tmp_path, fork_server):
    """They come before others of the same layer, in the model and in the scripts."""
    code = """
class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        y = self.linear(x)
        nn.functional.dropout(y, 0.5)
        return x + nn.functional.dropout(y, 0.5) * y

class Unread(nn.Module):
    def forward(self, x):
        nn.functional.dropout(x * 2, 0.5)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.noisy, self.unread, self.head = Noisy(), Unread(), nn.Linear(6, 2)

    def forward(self, x):
        x = self.noisy(x)
        self.unread(x)
        return self.head(x)

def build():
    return Net()
"""
    spec = make_spec(
        tmp_path,
        code,
        data={"source": "random", "samples": 16, "fields": FIELDS},
        cluster={"devices_per_node": 2},
        parallel={"pipeline": 2, "cuts": ["head"]},
    )
    prove(spec, fork_server)


def test_a_value_that_is_named_several_times_is_made_once(tmp_path, fork_server):
    """Though the user's statement makes it in place: its batch norm would count thrice."""
    code = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 2)

    def attend(self, x):
        return self.attention(x, x, x, need_weights=False)[0]

    def forward(self, x):
        x = x + self.attend(self.norm(x)[:, None])[:, 0]
        return self.head(x)

def build():
    return Net()
"""
    data = {"source": "random", "samples": 16, "fields": FIELDS}
    spec = make_spec(tmp_path, code, data=data)
    prove(spec, fork_server)
    write(compile(spec, tmp_path / "out"), tmp_path / "out")
    assert (tmp_path / "out" / "rank0.py").read_text().count("self.norm(") == 1


WRITES = {
    "rows of an embedding, to a norm": ("nn.Embedding(9, 6, max_norm=1.0)", "self.part(n)"),
    "a target that is not trained": (
        "nn.Embedding(9, 6).requires_grad_(False)",
        "(self.part.weight.mul_(0.9), self.part(n))[1]",
    ),
    "nothing, compiled": ("torch.compile(nn.Embedding(9, 6))", "self.part(n)"),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_parameter_that_forward_may_write(tmp_path, fork_server, name):
    made, used = WRITES[name]
    code = f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = {made}
        self.mid, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, n):
        return self.head(torch.tanh(self.mid({used})))

def build():
    return Net()
"""
    fields = {"n": {"shape": [], "dtype": "int64", "high": 9}, "y": {"shape": [2]}}
    spec = make_spec(
        tmp_path,
        code,
        data={"source": "random", "samples": 16, "fields": fields},
        cluster={"devices_per_node": 2},
        parallel={"pipeline": 2, "schedule": "gpipe"},
    )
    prove(spec, fork_server)


def test_a_part_of_a_sequential_that_is_called_by_itself(tmp_path, fork_server):
    """Also where a class stands in for an nn.Sequential inside."""
    code = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        inner = nn.Sequential(nn.Linear(6, 6), nn.Sequential())
        self.parts = nn.Sequential(nn.Sequential(inner, nn.Identity()))
        self.mid, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        x = self.parts(self.mid(x))
        return self.head(self.parts[0][0][0](x))

def build():
    return Net()
"""
    prove(
        make_spec(tmp_path, code, data={"source": "random", "samples": 16, "fields": FIELDS}),
        fork_server,
    )


def test_buffers_that_no_line_of_the_user_writes(tmp_path, fork_server):
    """A spectral norm in an nn.Sequential reads what it has just written."""
    code = """
from torch.nn.utils.parametrizations import spectral_norm
def build():
    norms = [spectral_norm(nn.Linear(6, 6), n_power_iterations=2) for _ in range(2)]
    return nn.Sequential(norms[0], nn.Tanh(), norms[1], nn.Tanh(), nn.Linear(6, 2))
"""
    prove(
        make_spec(tmp_path, code, data={"source": "random", "samples": 16, "fields": FIELDS}),
        fork_server,
    )
