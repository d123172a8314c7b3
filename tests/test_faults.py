"""Faults planted in scripts that were right: verify finds each, and where it shows first.

Three stages, a skip over the second, a weight on the first and the last, dropout, batch norm,
batches that do not divide evenly. Found in float32, in the scripts of one compilation.
"""

import shutil
import tempfile
from pathlib import Path

import pytest
from jobs import failed, make_spec, plant

from ppc import pipeline
from ppc.emit.write import write
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
        self.third = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = torch.tanh(self.norm(self.first(self.embed(tokens))))
        y = self.drop(torch.tanh(self.second(x)))
        return self.head(torch.tanh(self.third(y)) + x)

def build():
    return Net()
"""
TOKENS = {"dtype": "int64", "high": 11}
TIED = 'guard("the gradient of %s.weight", '
CLIP = 'guard("the norm of all gradients", dist.all_reduce, *args)'

FAULTS = {
    "a gradient scaled in one stage": (
        [(1, "gradients_to_0.send(mb, ", "gradients_to_0.send(mb, 1.01 * ")],
        ("gradient", 0),
    ),
    "a skip dropped in forward": ([(2, ".tanh() + x)", ".tanh() + 0 * x)")], ("loss", 0)),
    "a skip dropped in backward": (
        [(0, "(grad_x_from_1, grad_x_from_2)", "(grad_x_from_1, 0 * grad_x_from_2)")],
        ("gradient", 0),
    ),
    "a tied gradient that is not summed": (
        [
            (0, f"{TIED % 'embed'}dist.all_reduce", f"{TIED % 'embed'}lambda *_: None"),
            (2, f"{TIED % 'head'}dist.all_reduce", f"{TIED % 'head'}lambda *_: None"),
        ],
        ("gradient", 0),
    ),
    "a tied gradient that counts twice in the norm": (
        [(2, 'if name != "head.weight"', "if name")],
        ("gradient", 0),
    ),
    "weights of another seed": ([(1, "SEED} {name}", "SEED + 1} {name}")], ("initial", None)),
    "a tied weight with a seed of its own": (
        [(2, 'draw(tensor, "embed.weight"', "draw(tensor, name")],
        ("initial", None),
    ),
    "a wrong learning rate": ([(1, "LR * (step + 1)", "LR * (step + 2)")], ("parameter", 0)),
    "a course that ends too early": (
        [(1, "LR * (1 - (step - WARMUP_STEPS)", "LR * (0 * (step - WARMUP_STEPS)")],
        ("parameter", 2),
    ),
    "a loss that is scaled, when each step is clipped": (
        [(2, "loss * (sizes[mb] / sum(sizes))", "2 * loss * (sizes[mb] / sum(sizes))")],
        ("metric", 0),
    ),
    "a clip that is skipped": (
        [(rank, "MAX_NORM, ", "9.0, ") for rank in range(3)],
        ("gradient", 0),
    ),
    "a clip by the norm of each stage": (
        [(rank, CLIP, "pass") for rank in range(3)],
        ("gradient", 0),
    ),
    "labels of other samples": (
        [(2, 'draw_field(samples, "labels"', 'draw_field(samples.roll(1), "labels"')],
        ("loss", 0),
    ),
    "another order of the samples": (
        [(rank, "SEED} epoch {epoch}", "SEED} epoch {epoch + 1}") for rank in (0, 2)],
        ("loss", 0),
    ),
    "microbatches of unequal size that count alike": (
        [(2, "loss * (sizes[mb] / sum(sizes))", "loss / MICROBATCHES")],
        ("gradient", 0),
    ),
    "a loss that is logged with wrong weights": (
        [(2, ".double() * sizes[mb] / sum(sizes)", ".double() / MICROBATCHES")],
        ("loss", 0),
    ),
    "another dropout mask": ([(1, 'seed_layer(key, "drop")', "0")], ("loss", 0)),
    "one dropout mask for all steps": ([(1, "{step} {mb}", "0 {mb}")], ("loss", 1)),
    "another momentum": ([(1, "momentum=0.9", "momentum=0.8")], ("parameter", 1)),
    "no weight decay": ([(2, ", weight_decay=0.1", "")], ("parameter", 0)),
    "gradients of the last step that are kept": (
        [(1, "    optimizer.zero_grad()\n", "")],
        ("gradient", 1),
    ),
    "other running statistics": (
        [(0, "\ninit_weights(stage)\n", "\ninit_weights(stage)\nstage.norm.momentum = 0.2\n")],
        ("buffer", 0),
    ),
}
"""Fault -> what is planted, as (rank, right, wrong), and (kind, step) of what differs first."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    spec = make_spec(
        tmp_path_factory.mktemp("faults"),
        NET,
        model={"loss": "cross_entropy"},
        data={"source": "random", "samples": 23, "fields": {"tokens": TOKENS, "labels": TOKENS}},
        train={
            "global_batch": 8,
            "steps": 4,
            "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
            "lr_schedule": {"name": "linear", "warmup": 2},
            "clip_norm": 0.5,
        },
        cluster={"devices_per_node": 3},
        parallel={"pipeline": 3, "microbatches": 3, "cuts": ["second", "third"]},
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
    comparison = verify(scripts, fork_server=fork_server)
    assert comparison.ok, str(comparison)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(scripts, fork_server, fault):
    planted, first = FAULTS[fault]
    for rank, right, wrong in planted:
        plant(scripts / f"rank{rank}.py", right, wrong)
    found = failed(verify(scripts, steps=3, fork_server=fork_server))
    order = ("initial", "loss", "gradient", "metric", "parameter", "buffer")
    assert min(found, key=lambda row: (row[1] or 0, order.index(row[0]))) == first
