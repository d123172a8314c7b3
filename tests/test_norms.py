"""Batch norms: by the microbatch, of each replica or of all together; what cannot be is refused."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jobs import failed, make_spec, plant, prove, vary

from ppc import pipeline
from ppc.analysis.invariants.program import verify_programs
from ppc.analysis.invariants.unit import verify_units
from ppc.check.text import check_text
from ppc.emit.write import write
from ppc.errors import Complaints, InternalError, PpcError
from ppc.pipeline import lower
from ppc.run.together import Turns
from ppc.run.verify import verify

IMAGES = {
    "samples": 24,
    "fields": {
        "images": {"shape": [3, 16, 16]},
        "labels": {"shape": [], "dtype": "int64", "high": 10},
    },
}
NET = """
class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = norm
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return self.drop(torch.relu(self.norm(self.linear(x)))) + x

class Net(nn.Module):
    def __init__(self, norms):
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, norms))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def weight(x):
    return len(x) if x[0, 0] < 0.5 else 0

class Own(nn.BatchNorm1d):
    pass

class Functional(nn.Module):
    def forward(self, x):
        return nn.functional.batch_norm(x, None, None, training=True)

def build():
    return Net([NORMS])
"""
PLAIN = "nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=0.3, eps=0.1)"
FROZEN = "nn.BatchNorm1d(6), nn.BatchNorm1d(6).eval().requires_grad_(False), nn.BatchNorm1d(6)"
BARE = """
nn.BatchNorm1d(6, affine=False), nn.BatchNorm1d(6, track_running_stats=False), nn.BatchNorm1d(6)
"""


def blocks(
    folder: Path, norms: str = PLAIN, *, samples=36, shape=(6,), data=2, train=None, **parallel
):
    """A few blocks, on batches of 13; the last of an epoch has 10."""
    parallel = {"pipeline": 1, "microbatches": 2, "sync_batch_norm": True} | parallel
    fields = {"x": {"shape": list(shape)}, "y": {"shape": [*shape[:-1], 2]}}
    model = {"weight": parallel.pop("weight")} if "weight" in parallel else {}
    return make_spec(
        folder,
        NET.replace("NORMS", norms),
        model=model,
        data={
            "source": "random",
            "samples": samples,
            "fields": fields,
            "last_batch": parallel.pop("last_batch", "keep"),
        },
        train={"global_batch": 13, "steps": parallel.pop("steps", 4), **(train or {})},
        cluster={"devices_per_node": parallel["pipeline"] * data},
        parallel={"data": data, **parallel},
    )


@pytest.mark.dist
@pytest.mark.parametrize(
    ("norms", "options"),
    [
        (PLAIN, {"pipeline": 2, "recompute": "stage"}),
        (PLAIN, {"data": 3, "recompute": ["blocks"]}),
        (FROZEN, {"pipeline": 2, "schedule": "gpipe", "recompute": "stage"}),
        (BARE, {}),
        ("nn.BatchNorm1d(4)", {"shape": (4, 6)}),
        ("nn.BatchNorm2d(4)", {"shape": (4, 5, 6)}),
        ("nn.BatchNorm1d(6)", {"pipeline": 2, "cuts": ["head"], "weight": "net.py:weight"}),
        (PLAIN, {"sync_batch_norm": False, "pipeline": 2}),
    ],
)
def test_replicas(tmp_path, fork_server, norms, options):
    """13 samples in 2 x 2 microbatches are 4, 3, 3, 3, in 2 x 3 they are 3, 2, 2, 2, 2, 2."""
    prove(blocks(tmp_path, norms, **options), fork_server)


@pytest.mark.dist
def test_bf16(tmp_path, fork_server):
    """Means of numbers in bf16 are float32, as in torch's own."""
    norms = "nn.BatchNorm1d(6), nn.BatchNorm1d(6, affine=False)"
    prove(blocks(tmp_path, norms, train={"precision": "bf16"}), fork_server, exact=False)


@pytest.mark.slow
@pytest.mark.dist
def test_images(tmp_path, fork_server):
    """ResNet18: 2 dimensions more, no batch of one size, norms and their sums on both stages."""
    parallel = {"pipeline": 2, "data": 2, "microbatches": 2, "sync_batch_norm": True}
    spec = vary(
        tmp_path,
        "resnet18",
        {"width": 4},
        data=IMAGES,
        parallel=parallel,
        train={"global_batch": 10},
    )
    prove(spec, fork_server, steps=3)


FAULTS = {
    "no adjoint": ("sum_replicas(sums.clone())", "sums", ("gradient", 0)),
    "the adjoint of a sum alone": ("- normal * along.view(shape)", "", ("gradient", 0)),
    "statistics of one replica": ("sum_replicas(table)", "table", ("loss", 0)),
    "means that do not weigh by count": (
        "(counts * means).sum(0) / count",
        "means.mean(0)",
        ("loss", 0),
    ),
    "a biased running variance": ("var * count / (count - 1)", "var", ("buffer", 0)),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    spec = blocks(tmp_path_factory.mktemp("faults"), steps=2)
    folder = spec.folder / "out"
    write(pipeline.compile(spec, folder), folder)
    return folder


@pytest.mark.dist
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(compiled, fork_server, fault):
    right, wrong, first = FAULTS[fault]
    scripts = Path(shutil.copytree(compiled, compiled.with_name(fault.replace(" ", "-"))))
    for rank in range(2):
        plant(scripts / f"rank{rank}.py", right, wrong)
    found = failed(verify(scripts, steps=1, fork_server=fork_server))
    order = ("loss", "gradient", "parameter", "replica", "buffer")
    assert min(found, key=lambda row: order.index(row[0])) == first


def test_the_text_is_checked_as_the_only_replica(tmp_path, monkeypatch):
    """Of a small model the class itself; of a large one only that a batch norm stands there."""
    spec = blocks(tmp_path)
    job = lower(spec, tmp_path)
    script = str(pipeline.compile(spec)[0].text)
    unit = job.units[:1]
    with pytest.raises(InternalError, match="running_var differs"):
        check_text(spec, job.graph, unit, [script.replace("count / (count - 1)", "1")], 4)
    monkeypatch.setattr("ppc.check.text.is_comparable", lambda *_: False)
    check_text(spec, job.graph, unit, [script], 4)
    with pytest.raises(InternalError, match="batch_norm"):
        check_text(spec, job.graph, unit, [script.replace("eps=0.1", "eps=0.2")], 4)


@pytest.mark.parametrize(
    ("norms", "options", "message", "hint"),
    [
        (
            PLAIN,
            {"samples": 14, "sync_batch_norm": False},
            (
                "the batch norm blocks.0.norm (net.py:13) and 1 more would have one value for each "
                "channel: a last batch of 1 makes 2 microbatches for each of 2 replicas, some of 1 "
                "sample"
            ),
            "last_batch: drop",
        ),
        (
            PLAIN,
            {"samples": 13, "microbatches": 6, "sync_batch_norm": False},
            (
                "the batch norm blocks.0.norm (net.py:13) and 1 more would have one value for each "
                "channel: the global batch of 13 makes 6 microbatches for each of 2 replicas, some "
                "of 1 sample"
            ),
            "microbatches: 3 or sync_batch_norm: true",
        ),
        (
            "Functional()",
            {"samples": 14, "data": 1},
            (
                "the batch norm blocks.0.norm (net.py:34) would have one value for each channel: a "
                "last batch of 1 makes 2 microbatches, some of 1 sample"
            ),
            "last_batch: drop",
        ),
        (
            "nn.BatchNorm1d(4)",
            {"samples": 16, "shape": (4, 6)},
            (
                "the batch norm blocks.0.norm (net.py:13) would wait for ever: a last batch of 3 "
                "leaves 1 of 2 replicas without samples in microbatch 1, and replicas normalise "
                "together"
            ),
            "last_batch: drop",
        ),
        (
            "Own(6)",
            {"samples": 13},
            (
                "the batch norm in blocks.0.norm, of class Own, cannot be computed by all replicas "
                "together: it is no call of torch's own nn.BatchNorm1d, 2d or 3d"
            ),
            "such a module, or sync_batch_norm: false",
        ),
        (
            "nn.BatchNorm1d(6)",
            {"samples": 13, "train": {"compile": True}},
            "torch.compile does not see the sums over replicas in a batch norm",
            "compile: false, or sync_batch_norm: false",
        ),
        (
            "nn.BatchNorm1d(6)",
            {"samples": 13, "weight": "net.py:weight"},
            (
                "the batch norm blocks.0.norm (net.py:13) is on the last stage, where a microbatch "
                "in which nothing counts, by weight: net.py:weight, does not go back; but replicas "
                "normalise together"
            ),
            "weight: samples, sync_batch_norm: false, or cuts behind the norm",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, norms, options, message, hint):
    with pytest.raises(PpcError) as caught:
        lower(blocks(tmp_path, norms, **options), tmp_path)
    assert (caught.value.message, caught.value.hint) == (message, hint)
    assert caught.value.where is not None


def test_all_is_refused_at_once(tmp_path):
    norms = "Own(6), nn.BatchNorm1d(6), Functional()"
    with pytest.raises(Complaints) as caught:
        lower(blocks(tmp_path, norms, samples=14), tmp_path)
    assert len(caught.value.errors) == 4


@pytest.mark.parametrize(
    ("norms", "options"),
    [
        (PLAIN, {"samples": 14, "steps": 1}),  # no epoch ends
        (PLAIN, {"samples": 17}),  # microbatches of 1, but 2 together
        ("nn.BatchNorm1d(4)", {"samples": 14, "shape": (4, 6), "sync_batch_norm": False}),
        ("nn.BatchNorm1d(6).eval()", {"samples": 14, "sync_batch_norm": False}),
    ],
)
def test_what_can_be_is_not_refused(tmp_path, norms, options):
    lower(blocks(tmp_path, norms, **options), tmp_path)


def test_units_and_programs_without_the_sums_are_no_good(tmp_path):
    job = lower(blocks(tmp_path, pipeline=2), tmp_path)
    units = tuple(replace(unit, collectives=()) for unit in job.units)
    with pytest.raises(InternalError, match="does not sum the statistics"):
        verify_units(units, job.graph, job.plan)
    programs = tuple(replace(program, norm_groups=()) for program in job.programs)
    with pytest.raises(InternalError, match="groups of norms are"):
        verify_programs(programs, job.plan, job.units)


def test_a_replica_that_comes_to_another_norm_ends_the_reference():
    turns = Turns(2)

    def two() -> None:
        turns.meet(0, torch.zeros(1))
        turns.meet(0, torch.zeros(1))

    with pytest.raises(PpcError, match="do not come to the same batch norms"):
        turns.run([two, lambda: turns.meet(1, torch.zeros(1))])
