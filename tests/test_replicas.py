"""Replicas do what one process does with all samples: data parallelism, with and without stages.

Rank r is replica r mod `data` of stage r // `data`; microbatch k of a global batch is number
k // `data` of replica k mod `data`. Compared in float64, limit 1e-10, if a case does not say so.
"""

from pathlib import Path

import pytest
from jobs import make_spec, plant, prove, vary

from ppc import pipeline
from ppc.emit.write import write
from ppc.ir.program import Collective, Loop
from ppc.run.launch import run_forked
from ppc.run.verify import verify

pytestmark = pytest.mark.dist

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        first = x = torch.tanh(self.blocks[0](x))
        for block in self.blocks[1:]:
            x = self.drop(torch.tanh(block(x)))
        return self.head(x + first)

def build():
    return Net()
"""
TIED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mid = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.mid:
            x = torch.tanh(layer(x))
        return self.head(x)

def build():
    return Net()
"""
NORMED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(3)
        )
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)

def build():
    return Net()
"""
PARTLY = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.partly = nn.Linear(6, 6), nn.Linear(6, 6)
        self.unused, self.head = nn.Linear(6, 6), nn.Linear(6, 2)
        self.frozen.requires_grad_(False)
        self.partly.weight.requires_grad_(False)

    def forward(self, x):
        x = torch.tanh(self.frozen(x))
        y = torch.tanh(self.partly(x))
        z = torch.tanh(self.unused(x)).detach()
        return self.head(y + z)

def build():
    return Net()
"""
MIXED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.wide = nn.Linear(6, 6), nn.Linear(6, 6, dtype=torch.{wide})
        self.last, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        y = torch.tanh(self.first(x))
        y = torch.tanh(self.wide(y.to(self.wide.weight.dtype)))
        return self.head(torch.tanh(self.last(y.{real})))

def build():
    return Net()
"""
IMAGES = {
    "samples": 12,
    "fields": {
        "images": {"shape": [3, 16, 16]},
        "labels": {"shape": [], "dtype": "int64", "high": 10},
    },
}
GPT2 = {"layers": 2, "width": 16, "heads": 2, "context": 8, "dropout": 0.1}
TOKENS = {"dtype": "int64", "high": 11}
ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.2}


def small(
    folder: Path, code: str = NET, *, model=None, data=None, train=None, replicas=2, **parallel
):
    """A net on 22 random samples in batches of 8: the last batch of an epoch has 6."""
    fields = {"x": {"shape": [6]}, "y": {"shape": [2]}}
    if code == TIED:
        fields = {"tokens": TOKENS, "labels": TOKENS}
        model = {"loss": "cross_entropy"} | (model or {})
    parallel = {"pipeline": 2, "microbatches": 2} | parallel | {"data": replicas}
    return make_spec(
        folder,
        code,
        model=model or {},
        data={"source": "random", "samples": 22, "fields": fields} | (data or {}),
        train={"global_batch": 8, "steps": 4} | (train or {}),
        cluster={"devices_per_node": parallel["pipeline"] * replicas},
        parallel=parallel,
    )


def scripts_of(spec) -> Path:
    folder = spec.folder / "out"
    write(pipeline.compile(spec, folder), folder)
    return folder


@pytest.mark.parametrize(
    ("stages", "schedule", "microbatches"),
    [
        (1, "gpipe", 1),
        (1, "1f1b", 3),
        (2, "1f1b", 1),
        (2, "gpipe", 4),
        (3, "gpipe", 3),
        (3, "1f1b", 4),
    ],
)
def test_replicas(tmp_path, fork_server, stages, schedule, microbatches):
    """With dropout, a skip over stages and clipping; even where the batch divides."""
    parallel = {"pipeline": stages, "schedule": schedule, "microbatches": microbatches}
    prove(small(tmp_path, train={"clip_norm": 0.05}, **parallel), fork_server)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("microbatches", [1, 3, 4])
@pytest.mark.parametrize("last_batch", ["keep", "drop"])
def test_every_layout(tmp_path, fork_server, stages, schedule, microbatches, last_batch):
    parallel = {"pipeline": stages, "schedule": schedule, "microbatches": microbatches}
    prove(small(tmp_path, data={"last_batch": last_batch}, **parallel), fork_server)


@pytest.mark.parametrize(
    ("replicas", "stages"), [(3, 1), pytest.param(3, 2, marks=pytest.mark.slow), (4, 1)]
)
def test_more_replicas(tmp_path, fork_server, replicas, stages):
    train = {"clip_norm": 0.05, "optimizer": ADAMW}
    prove(small(tmp_path, pipeline=stages, replicas=replicas, train=train), fork_server)


def test_a_share_for_every_microbatch_alike(tmp_path, fork_server):
    """Even microbatches have no sizes in the script."""
    spec = small(tmp_path, data={"last_batch": "drop"}, train={"clip_norm": 0.05})
    prove(spec, fork_server)
    assert "sizes" not in (scripts_of(spec) / "rank3.py").read_text()


@pytest.mark.parametrize("code", [NET, TIED], ids=["plain", "tied"])
@pytest.mark.parametrize("samples", [9, 11])
def test_a_last_batch_that_leaves_a_replica_nothing(tmp_path, fork_server, code, samples):
    """Of 1 sample: none for replica 1, not even one microbatch; of 3: an empty microbatch."""
    spec = small(tmp_path, code, data={"samples": samples}, pipeline=2)
    prove(spec, fork_server)


@pytest.mark.parametrize("stages", [1, 3])
def test_fewer_samples_than_replicas(tmp_path, fork_server, stages):
    """In every step replica 1 has nothing to do, not even where all is a tied weight's head."""
    prove(small(tmp_path, TIED, data={"samples": 1}, pipeline=stages), fork_server)


@pytest.mark.parametrize(("stages", "clip"), [(1, False), (2, True), (3, True)])
def test_tied_weights(tmp_path, fork_server, stages, clip):
    train = {"optimizer": ADAMW} | ({"clip_norm": 0.1} if clip else {})
    spec = small(tmp_path, TIED, train=train, pipeline=stages, schedule="1f1b")
    prove(spec, fork_server)
    sums = [
        (item.value, item.group)
        for program in pipeline.lower(spec, tmp_path).programs
        for loop in program.actions
        if isinstance(loop, Loop)
        for item in loop.body
        if isinstance(item, Collective) and "embed" in item.value
    ]
    first, last = range(2), range(2 * stages - 2, 2 * stages)
    assert set(sums) == ({("gradient of embed.weight", (*first, *last))} if stages > 1 else set())


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_what_is_not_trained(tmp_path, fork_server, stages):
    """A frozen stage, a frozen weight, and weights that no loss reaches, which do not decay."""
    cuts = {1: {}, 2: {"cuts": ["partly"]}, 3: {"cuts": ["partly", "unused"]}}[stages]
    spec = small(tmp_path, PARTLY, train={"optimizer": ADAMW}, pipeline=stages, **cuts)
    prove(spec, fork_server)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("exact", [True, False])
def test_running_statistics_of_each_replica(tmp_path, fork_server, stages, exact):
    """They differ by replica; those of replica 0 are saved."""
    spec = small(tmp_path, NORMED, data={"samples": 24}, pipeline=stages)
    found = prove(spec, fork_server, exact=exact)
    buffers = [row for row in found.rows if row.kind == "buffer"]
    assert [row.compared for row in buffers] == [2 * 3 * 3] * 4


def test_float32(tmp_path, fork_server):
    train = {"clip_norm": 0.05, "optimizer": "adamw", "lr_schedule": "cosine"}
    prove(small(tmp_path, train=train), fork_server, exact=False)


@pytest.mark.parametrize("wide", ["float64", "complex64"])
@pytest.mark.parametrize("stages", [1, 3])
def test_weights_of_several_dtypes(tmp_path, fork_server, wide, stages):
    cuts = {"cuts": ["wide", "last"]} if stages == 3 else {}
    code = MIXED.replace("{wide}", wide).replace(
        "{real}", "real" if "complex" in wide else "float()"
    )
    spec = small(tmp_path, code, pipeline=stages, **cuts)
    prove(spec, fork_server, exact=False, steps=2)


@pytest.mark.parametrize("stages", [1, 2])
def test_several_buckets(tmp_path, fork_server, stages):
    """As many messages as parameters, and in one bucket: the same training."""
    folder = scripts_of(small(tmp_path, NET, pipeline=stages, train={"clip_norm": 0.05}))
    for rank in range(2 * stages):
        plant(folder / f"rank{rank}.py", "BUCKET_BYTES = 4 * 2**20", "BUCKET_BYTES = 1")
        plant(
            folder / f"rank{rank}.py",
            "        self.works.clear()\n",
            "        assert len(self.works) == len(list(stage.parameters()))\n"
            "        self.works.clear()\n",
        )
    found = verify(folder, fork_server=fork_server, timeout_s=60)
    assert found.ok, str(found)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_first_steps_of_a_folder(tmp_path, fork_server, steps):
    """Step 3 is a short batch, in which replicas do not run equally many forwards."""
    spec = small(tmp_path, data={"samples": 17}, train={"steps": 6})
    found = verify(scripts_of(spec), steps=steps, fork_server=fork_server, timeout_s=60)
    assert found.ok, str(found)
    assert sum(row.kind == "loss" for row in found.rows) == steps


@pytest.mark.parametrize(
    ("name", "args", "data", "stages"),
    [
        pytest.param("resnet18", {"width": 4}, IMAGES, 2, marks=pytest.mark.slow),
        ("dlrm", {}, {}, 2),
        ("gpt_tied", {"layers": 2, "width": 16, "heads": 2}, {}, 3),
        pytest.param("gpt2", GPT2, {"sequence": 8}, 2, marks=pytest.mark.slow),
        pytest.param("lstm", {"width": 16}, {"sequence": 8}, 3, marks=pytest.mark.slow),
        pytest.param("frozen", {}, IMAGES, 2, marks=pytest.mark.slow),
    ],
)
def test_a_model(tmp_path, fork_server, name, args, data, stages):
    parallel = {"pipeline": stages, "data": 2, "microbatches": 2}
    spec = vary(tmp_path, name, args, data=data, train={"global_batch": 6}, parallel=parallel)
    prove(spec, fork_server, steps=2)


@pytest.mark.slow
def test_the_quickstart_under_torchrun(tmp_path):
    args = {"layers": 2, "width": 32, "heads": 2, "context": 16}
    data, train = {"sequence": 16}, {"global_batch": 16}
    parallel = {"pipeline": 2, "data": 2, "microbatches": 2}
    spec = vary(tmp_path, "quickstart", args, data=data, train=train, parallel=parallel)
    prove(spec, None, steps=3)


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_is_lost_ends_the_others(tmp_path, fork_server, victim):
    """Soon, and they say who they are, in which step, and what they have lost."""
    folder = scripts_of(small(tmp_path, data={"last_batch": "drop"}))
    loop = "for step in range(STEPS):\n"
    die = f"{loop}    if step == 1:\n        os.kill(os.getpid(), 9)\n"
    plant(folder / f"rank{victim}.py", loop, die)
    result = run_forked(folder, 4, timeout_s=60, server=fork_server)
    assert not result.ok
    assert not result.timed_out
    assert result.seconds < 8
    assert result.explain().startswith(f"rank {victim} of 4 ranks failed first, ended by SIGKILL")
    for rank, other in enumerate(result.ranks):
        if rank != victim:
            who = f"rank {rank}, stage {rank // 2}, replica {rank % 2}, step 2: lost "
            assert who in other.stderr, other.stderr
