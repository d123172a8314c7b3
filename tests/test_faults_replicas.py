"""Faults planted in the scripts of replicas: each is found, at the start or by verify.

Two stages, each on two ranks, with batch norm, dropout, a weight on both stages and clipping.
"""

import shutil
import tempfile
from pathlib import Path

import pytest
from jobs import failed, make_spec, plant

from ppc import pipeline
from ppc.emit.write import write
from ppc.errors import RunError
from ppc.run.verify import verify

pytestmark = pytest.mark.dist

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = torch.tanh(self.norm(self.first(self.embed(tokens))))
        return self.head(self.drop(torch.tanh(self.second(x))))

def build():
    return Net()
"""
TOKENS = {"dtype": "int64", "high": 11}
SHARED = "dist.all_reduce(stage.norm.running_mean, dist.ReduceOp.MAX, groups[(0, 1)])"
ALL, FIRST, LAST = range(4), (0, 1), (2, 3)

FAULTS = {
    "gradients of one stage that are not summed": (
        [(rank, "dist.all_reduce, *args))", "lambda *_: torch.futures.Future(), *args))")
         for rank in LAST]
        + [(rank, 'guard("gradients of a replica", work.wait)', "pass") for rank in LAST],
        ("gradient", 0),
    ),
    "gradients that are summed twice": (
        [(rank, "    reducer.finish()\n", "    reducer.finish()\n    reducer.finish()\n")
         for rank in ALL],
        ("gradient", 0),
    ),
    "gradients summed before the last backward": (
        [(rank, "last=mb == MICROBATCHES - 1", "last=mb == 0") for rank in FIRST]
        + [(rank, "dist.all_reduce, *args))",  # else what comes later may be summed by good luck
            "dist.all_reduce, *args))\n        self.works[-1].wait()") for rank in FIRST],
        ("gradient", 0),
    ),
    "a loss that is not divided by the number of replicas": (
        [(rank, "loss / (MICROBATCHES * REPLICAS)", "loss / MICROBATCHES") for rank in LAST],
        ("gradient", 0),
    ),
    "a loss that is logged without the other replica": (
        [(rank, 'guard("the loss of a replica", dist.all_reduce, loss,',
          'guard("the loss of a replica", lambda *_: None, loss,') for rank in LAST],
        ("loss", 0),
    ),
    "samples of the other replica": (
        [(1, "[REPLICA::REPLICAS]", "[0::REPLICAS]"), (3, "[REPLICA::REPLICAS]", "[0::REPLICAS]")],
        ("loss", 0),
    ),
    "labels of the other replica": (
        [(3, "[REPLICA::REPLICAS]", "[0::REPLICAS]")],
        ("loss", 0),
    ),
    "one dropout mask for both replicas": (
        [(rank, "{mb * REPLICAS + REPLICA}", "{mb * REPLICAS}") for rank in LAST],
        ("loss", 0),
    ),
    "a tied gradient summed over a pipeline alone": (
        [(rank, "grad, dist.ReduceOp.SUM, groups[(0, 1, 2, 3)]",
          f"grad, dist.ReduceOp.SUM, groups[{(rank % 2, rank % 2 + 2)}]") for rank in ALL],
        ("gradient", 0),
    ),
    "a tied gradient that is in a bucket too": (
        [(0, '[p for name, p in stage.named_parameters() if name != "embed.weight"]',
          "list(stage.parameters())"),
         (1, '[p for name, p in stage.named_parameters() if name != "embed.weight"]',
          "list(stage.parameters())")],
        ("gradient", 0),
    ),
    "a norm over both replicas": (
        [(rank, f"dist.all_reduce, square, dist.ReduceOp.SUM, groups[{(rank % 2, rank % 2 + 2)}])",
          "dist.all_reduce, square)") for rank in ALL],
        ("gradient", 0),
    ),
    "gradients of the last step that are kept": (
        [(1, "    optimizer.zero_grad(set_to_none=False)\n", "")],
        ("gradient", 1),
    ),
    "replicas that update at another rate": (
        [(3, "lr=LR", "lr=1.001 * LR")],
        ("parameter", 0),
    ),
    "running statistics that replicas share": (
        [(rank, "    reducer.finish()\n",
          f"    reducer.finish()\n    {SHARED}\n")
         for rank in FIRST],
        ("buffer", 0),
    ),
}  # fmt: skip
"""Fault -> what is planted, as (rank, right, wrong), and (kind, step) of what differs first."""

REFUSED = {
    "weights of another seed on one replica": (
        [(3, "SEED} {name}", "SEED + 1} {name}")],
        "before step 1: ranks differ in weights of stage 1",
    ),
    "another number of replicas": (
        [(2, "REPLICA, REPLICAS = 0, 2", "REPLICA, REPLICAS = 0, 3")],
        "before step 1: ranks differ in replicas",
    ),
    "another size of buckets": (
        [(1, "BUCKET_BYTES = 4 * 2**20", "BUCKET_BYTES = 8 * 2**20")],
        "before step 1: ranks differ in replicas",
    ),
    "gradients that leave their buckets": (
        [(rank, "zero_grad(set_to_none=False)", "zero_grad()") for rank in LAST],
        "step 2: a gradient has left its bucket",
    ),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    spec = make_spec(
        tmp_path_factory.mktemp("faults"),
        NET,
        model={"loss": "cross_entropy"},
        data={"source": "random", "samples": 24, "fields": {"tokens": TOKENS, "labels": TOKENS}},
        train={
            "global_batch": 8,
            "steps": 3,
            "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
            "clip_norm": 3.0,  # in step 1 the norm is 2.5
        },
        cluster={"devices_per_node": 4},
        parallel={"pipeline": 2, "data": 2, "microbatches": 2, "cuts": ["second"]},
    )
    folder = spec.folder / "out"
    write(pipeline.compile(spec, folder), folder)
    return folder


@pytest.fixture
def scripts(compiled):
    """A copy to spoil."""
    return Path(
        shutil.copytree(compiled, tempfile.mkdtemp(dir=compiled.parent), dirs_exist_ok=True)
    )


def test_no_fault_none_found(scripts, fork_server):
    comparison = verify(scripts, fork_server=fork_server, timeout_s=60)
    assert comparison.ok, str(comparison)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(scripts, fork_server, fault):
    planted, first = FAULTS[fault]
    for rank, right, wrong in planted:
        plant(scripts / f"rank{rank}.py", right, wrong)
    found = failed(verify(scripts, fork_server=fork_server, timeout_s=60))
    order = ("initial", "loss", "gradient", "metric", "parameter", "replica", "buffer")
    assert min(found, key=lambda row: (row[1] or 0, order.index(row[0]))) == first


def test_gradients_that_are_not_waited_for(scripts, fork_server):
    """From the second step on none is sent; the first may be ready by good luck."""
    for rank in ALL:
        plant(scripts / f"rank{rank}.py", "    reducer.finish()\n", "")
    found = failed(verify(scripts, fork_server=fork_server, timeout_s=60))
    assert ("gradient", 1) in found


@pytest.mark.parametrize("fault", REFUSED)
def test_fault_that_the_scripts_notice(scripts, fork_server, fault):
    planted, message = REFUSED[fault]
    for rank, right, wrong in planted:
        plant(scripts / f"rank{rank}.py", right, wrong)
    with pytest.raises(RunError, match=message):
        verify(scripts, fork_server=fork_server, timeout_s=60)
