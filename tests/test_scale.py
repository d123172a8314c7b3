"""What a compilation does does not grow with replicas, nor with layers that are alike.

A small stand-in: 8 layers on 4 stages with 4 replicas of each. What Llama's 405B takes on 1,024
ranks is in benchmarks/large.py and test_large.py.
"""

import difflib
from collections import Counter
from itertools import pairwise

import pytest
from jobs import make_spec

from ppc import pipeline
from ppc.emit import lift, view
from ppc.emit.groups import member_lines, spell_ranks
from ppc.emit.render import render
from ppc.frontend.capture import capture
from ppc.ir.program import Program
from ppc.passes import communicate, roll

pytestmark = pytest.mark.torch

NET = """
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.relu(self.inner(self.norm(x)))

class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.blocks = nn.ModuleList(Block(5) for _ in range(layers))
        self.head = nn.Linear(5, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def build(layers):
    return Net(layers)
"""


def make(folder, *, layers=8, stages=4, replicas=4):
    return make_spec(
        folder,
        NET,
        model={"args": {"layers": layers}},
        data={
            "source": "random",
            "samples": 64,
            "fields": {"x": {"shape": [5]}, "y": {"shape": [1]}},
        },
        train={"global_batch": 64, "clip_norm": 1.0},
        cluster={"devices_per_node": stages * replicas},
        parallel={"pipeline": stages, "data": replicas, "microbatches": 8},
    )


def counted(monkeypatch, *places):
    """How often the functions at these places are called from here on."""
    counts = Counter()

    def count(owner, name, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for owner, name in places:
        count(owner, name, getattr(owner, name))
    return counts


def work(monkeypatch, folder, **shape):
    """How often the parts of a compilation that take time run."""
    folder.mkdir()
    spec = make(folder, **shape)
    with monkeypatch.context() as patch:
        counts = counted(
            patch,
            (capture, "trace"),
            (communicate, "run_microbatches"),
            (roll, "roll_blocks"),
            (view, "lift_stage"),
            (lift.Lifter, "draft"),
        )
        pipeline.compile(spec)
    return counts


def test_replicas_cost_nothing_but_their_text(tmp_path, monkeypatch):
    alone = work(monkeypatch, tmp_path / "one", replicas=1)
    several = work(monkeypatch, tmp_path / "four", replicas=4)
    assert several == alone
    assert several["lift_stage"] == 4
    assert several["trace"] == 2


def test_equal_layers_are_lifted_once(tmp_path, monkeypatch):
    few = work(monkeypatch, tmp_path / "four", layers=4, stages=1, replicas=1)
    many = work(monkeypatch, tmp_path / "sixteen", layers=16, stages=1, replicas=1)
    assert few["draft"] == many["draft"] == 2  # the first has no gradient to send on
    assert few == many


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    return pipeline.lower(make(folder), folder)


@pytest.fixture(scope="module")
def scripts(job):
    return [str(file.text).splitlines() for file in render(job)[: job.plan.world_size]]


def test_replicas_share_their_instructions(job):
    plan, units = job.plan, job.units
    programs = communicate.communicate(plan, units, pipeline.order(plan, "1f1b"), clip=True)
    for ranks in plan.pipelines()[1:]:
        for rank, first in zip(ranks, plan.pipelines()[0], strict=True):
            assert all(map(is_same, moves(programs[rank]), moves(programs[first])))
            assert units[rank].ops is units[first].ops


def moves(program: Program):
    (loop,) = (action for action in program.actions if hasattr(action, "body"))
    return loop.body[: -roll.end_length(loop.body)]


def is_same(one, other):
    return one is other


def test_scripts_of_replicas_differ_in_few_lines(job, scripts):
    for stage in job.plan.stages:
        for one, other in pairwise(stage.mesh.ranks):
            compared = difflib.ndiff(scripts[one], scripts[other])
            changes = [line for line in compared if line[0] in "+-"]
            assert 0 < len(changes) < 60, changes


def test_the_groups_of_many_ranks_are_told_by_their_rule(job, scripts):
    groups = job.programs[0].groups
    lines = list(member_lines(groups, "members"))
    assert len(groups) == 24 + 4 + 4
    pairs = "(i, i + 4), (i + 4, i)"
    assert lines == [
        f"members = [g for r in range(4) for i in range(r, r + 12, 4) for g in [{pairs}]]",
        "members += [tuple(range(i, i + 4)) for i in range(0, 16, 4)]",
        "members += [tuple(range(i, i + 16, 4)) for i in range(4)]",
    ]
    assert "\n".join(lines) in "\n".join(scripts[5])


def made(groups):
    """What the lines make."""
    names = {}
    exec("\n".join(member_lines(groups, "members")), names)  # noqa: S102  # our own text
    return names["members"]


@pytest.mark.parametrize(
    "groups",
    [
        [(i, i + 1) for i in range(100)],
        [(i, i * i) for i in range(1, 40)],
        [(7, 8), *((i + 1, i) for i in range(0, 60, 2)), (0, 5, 6), (0, 5, 7)],
        [(i + 40 * r, i + 1 + 40 * r) for r in (0, 1, 2, 5) for i in range(30)],
        [tuple(range(r, r + 4 * n, 4)) for n in (2, 3, 9) for r in range(12)],
        [(3, 1), (2, 1), (1, 0)] * 10,
    ],
)
def test_whatever_the_groups_are_the_lines_make_them(groups):
    assert made(groups) == groups


def test_a_group_of_many_ranks_is_a_range():
    assert spell_ranks((0, 8, 16)) == "(0, 8, 16)"
    assert spell_ranks(tuple(range(3, 1024, 8))) == "tuple(range(3, 1027, 8))"
    assert spell_ranks((*range(30), 77)) == str((*range(30), 77))
