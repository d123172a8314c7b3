"""Cases: what users of such systems ran into in public, each named by its number in the list.

All start from one small model: 6 blocks of width 16, tanh(Linear), batch 8, fp32, seed 0, SGD with
lr 0.1, on 2 ranks or as the case says. Losses, gradients, parameters and buffers are compared with
the model in one process, step by step.
"""

import json
from pathlib import Path

import pytest
from jobs import make_spec, prove

from ppc import pipeline
from ppc.emit.write import write
from ppc.errors import SpecError
from ppc.frontend.samples import samples_of_step
from ppc.run.launch import run_forked

pytestmark = pytest.mark.dist

BLOCK = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def blocks(count=6):
    return nn.ModuleList(Block() for _ in range(count))
"""
PLAIN = """
class Net(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.blocks = blocks(count)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def build(count=6):
    return Net(count)
"""
LANGUAGE_MODEL = """
class Net(nn.Module):
    def __init__(self, vocab, tied):
        super().__init__()
        self.embed = nn.Embedding(vocab, 16)
        self.blocks = blocks()
        self.head = nn.Linear(16, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def build(vocab=32, tied=True):
    return Net(vocab, tied)
"""
ROWS = {"x": {"shape": [16]}, "y": {"shape": [16]}}
TOKEN = {"dtype": "int64", "high": 32}


def small(
    folder: Path, code: str = PLAIN, *, model=None, data=None, train=None, replicas=1, **parallel
):
    """The spec of a case: what it does not say is as in the head of this file."""
    parallel = {"pipeline": 2, "microbatches": 4} | parallel | {"data": replicas}
    return make_spec(
        folder,
        BLOCK + code,
        model=model or {},
        data={"source": "random", "samples": 32, "fields": ROWS} | (data or {}),
        train={"global_batch": 8, "steps": 4} | (train or {}),
        cluster={"devices_per_node": parallel["pipeline"] * replicas},
        parallel=parallel,
    )


def language_model(folder: Path, *, vocab: int = 32, tied: bool = True, **options):
    data = {"fields": {"tokens": TOKEN, "labels": TOKEN}}
    model = {"loss": "cross_entropy", "args": {"vocab": vocab, "tied": tied}}
    return small(folder, LANGUAGE_MODEL, model=model, data=data, **options)


def edges(spec):
    return {
        edge for program in pipeline.lower(spec, spec.folder).programs for edge in program.edges
    }


def blocks_of_stages(spec):
    """How many blocks each stage has."""
    job = pipeline.lower(spec, spec.folder)
    paths = [[job.graph.layers[i].path for i in stage.layers] for stage in job.plan.stages]
    return [sum(path.startswith("blocks") for path in stage) for stage in paths]


def train(spec, server):
    """Run the scripts: what the ranks printed, and the rows of metrics.jsonl."""
    folder = spec.folder / "out"
    write(pipeline.compile(spec, folder), folder)
    world_size = spec.parallel.pipeline * spec.parallel.data
    result = run_forked(folder, world_size, timeout_s=60, server=server).check()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [rank.stdout for rank in result.ranks], rows


@pytest.mark.parametrize("stages", [2, 3])
def test_c1_tied_weights_are_one_parameter(tmp_path, fork_server, stages):
    spec = language_model(tmp_path, pipeline=stages)
    found = prove(spec, fork_server, exact=False)
    compared = {(row.kind, row.step): row.compared for row in found.rows}
    assert compared["gradient", 0] == 2 * 6 + 2  # that of the tied weight on both of its ranks
    assert compared["saved", None] == 2 * 6 + 2 + 1  # under both names, and that all load


def test_c4_a_buffer_that_all_blocks_use(tmp_path, fork_server):
    code = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cos", torch.cos(torch.arange(16.0)), persistent=False)
        self.blocks = blocks()

    def forward(self, x):
        scale = self.cos * 2
        for block in self.blocks:
            x = block(x) * scale
        return x

def build():
    return Net()
"""
    spec = small(tmp_path, code, pipeline=3)
    prove(spec, fork_server, exact=False)
    assert {len(edge.values) for edge in edges(spec)} == {1}  # x alone, and its gradient


def test_c6_a_skip_from_the_first_stage_to_the_last(tmp_path, fork_server):
    code = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = blocks()

    def forward(self, x):
        first = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return x + first

def build():
    return Net()
"""
    spec = small(tmp_path, code, pipeline=3, schedule="1f1b")
    prove(spec, fork_server, exact=False)
    assert {(edge.source, edge.target) for edge in edges(spec)} >= {(0, 2), (2, 0)}


@pytest.mark.parametrize("stages", [2, 3])
def test_c7_a_keyword_input_that_later_stages_need(tmp_path, fork_server, stages):
    code = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = blocks()

    def forward(self, x, *, scale):
        for block in self.blocks:
            x = block(x) * scale
        return x

def build():
    return Net()
"""
    data = {"fields": ROWS | {"scale": {"shape": [1]}}}
    prove(small(tmp_path, code, data=data, pipeline=stages), fork_server, exact=False)


@pytest.mark.parametrize("stages", [2, 3])
def test_c8_labels_for_a_loss_inside_the_model(tmp_path, fork_server, stages):
    code = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = blocks()

    def forward(self, x, labels):
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, labels)

def build():
    return Net()
"""
    data = {"fields": {"x": {"shape": [16]}, "labels": {"shape": [16]}}}
    model = {"loss": "output"}
    spec = small(tmp_path, code, model=model, data=data, pipeline=stages)
    prove(spec, fork_server, exact=False)


@pytest.mark.parametrize("stages", [2, 3])
def test_c10_several_values_between_stages(tmp_path, fork_server, stages):
    """Of them only x is a float with a gradient: a mask and positions go with it."""
    code = """
class Masked(Block):
    def forward(self, x, mask, pos):
        return torch.where(mask, super().forward(x), x) + pos / 16, ~mask, pos + 1

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Masked() for _ in range(6))

    def forward(self, x):
        noise = torch.rand_like(x)  # is not computed twice
        mask, pos = noise > 0.5, (noise * 8).long()
        for block in self.blocks:
            x, mask, pos = block(x, mask, pos)
        return x

def build():
    return Net()
"""
    spec = small(tmp_path, code, pipeline=stages, schedule="1f1b")
    prove(spec, fork_server, exact=False)
    forwards = [edge for edge in edges(spec) if edge.kind == "activations"]
    found = {meta.dtype for edge in forwards for _, meta in edge.values}
    assert found == {"float32", "bool", "int64"}
    assert {len(edge.values) for edge in edges(spec) if edge.kind == "gradients"} == {1}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("what", ["a stage", "biases"])
def test_c13_frozen_parameters(tmp_path, fork_server, replicas, what):
    """Of a frozen stage nothing is sent back and nothing summed."""
    parameters = {
        "a stage": "self.blocks[:3].parameters()",
        "biases": "(block.linear.bias for block in self.blocks)",
    }[what]
    code = PLAIN.replace(
        "        self.blocks = blocks(count)\n",
        f"""        self.blocks = blocks(count)
        for parameter in {parameters}:
            parameter.requires_grad_(False)
""",
    )
    spec = small(tmp_path, code, cuts=["blocks.3"], replicas=replicas)
    prove(spec, fork_server, exact=False)
    assert any(edge.kind == "gradients" for edge in edges(spec)) == (what == "biases")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_c16_microbatches_that_do_not_divide_the_batch(tmp_path, fork_server, schedule):
    spec = small(tmp_path, train={"global_batch": 10}, schedule=schedule)
    prove(spec, fork_server, exact=False)


def test_c17_a_short_last_batch(tmp_path, fork_server):
    spec = small(tmp_path, data={"samples": 22}, train={"epochs": 2})
    found = prove(spec, fork_server, exact=False)
    assert sum(row.kind == "loss" for row in found.rows) == 6
    for epoch in range(2):
        taken = [n for step in range(3) for n in samples_of_step(spec, 22, 3 * epoch + step)]
        assert sorted(taken) == list(range(22))


def test_c17_data_smaller_than_a_batch(tmp_path, fork_server):
    spec = small(tmp_path, data={"samples": 5}, train={"epochs": 2})
    found = prove(spec, fork_server, exact=False)
    assert sum(row.kind == "loss" for row in found.rows) == 2
    with pytest.raises(SpecError, match="5 samples make no batch of 8, and last_batch drops them"):
        small(tmp_path, data={"samples": 5, "last_batch": "drop"})


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_c20_fewer_microbatches_than_stages(tmp_path, fork_server, schedule, microbatches):
    spec = small(tmp_path, pipeline=3, schedule=schedule, microbatches=microbatches)
    prove(spec, fork_server, exact=False)


@pytest.mark.parametrize("stages", [2, 3])
def test_c22_blocks_that_the_stages_do_not_divide(tmp_path, fork_server, stages):
    spec = small(tmp_path, model={"args": {"count": 7}}, pipeline=stages)
    found = prove(spec, fork_server, exact=False)
    assert sum(blocks_of_stages(spec)) == 7
    (loads,) = [row for row in found.rows if row.kind == "saved"]
    assert loads.compared == 2 * 7 + 1  # each parameter once, and that their union loads strictly


@pytest.mark.parametrize(("stages", "expected"), [(2, [6, 0]), (4, [0, 3, 3, 0])])
def test_c23_an_embedding_and_a_head_have_weight(tmp_path, stages, expected):
    """In time and in memory: with 50,000 words each outweighs all blocks."""
    spec = language_model(tmp_path, vocab=50_000, pipeline=stages)
    assert blocks_of_stages(spec) == expected
    memory = pipeline.lower(spec, tmp_path).report.memory
    for rank in (0, stages - 1):
        assert memory[rank].parameters >= 50_000 * 16 * 4


def test_c24_a_line_each_step_with_the_true_loss(tmp_path, fork_server):
    losses = {}
    for schedule in ("gpipe", "1f1b"):
        folder = tmp_path / schedule
        folder.mkdir()
        spec = small(folder, schedule=schedule)
        printed, rows = train(spec, fork_server)
        losses[schedule] = [row["loss"] for row in rows]
        assert printed[0] == ""
        lines = printed[1].splitlines()
        assert [line.split(" | ")[0] for line in lines] == [f"step {i}/4" for i in range(1, 5)]
        assert [line.split(" | ")[1] for line in lines] == [
            f"loss {loss:.4f}" for loss in losses[schedule]
        ]
        prove(spec, fork_server, exact=False)
    assert losses["gpipe"] == pytest.approx(losses["1f1b"], abs=1e-6)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stages", [2, 3])
def test_c26_clipping_by_the_norm_of_the_whole_model(tmp_path, fork_server, stages, tied):
    norms = {}
    for count in (1, stages):
        folder = tmp_path / str(count)
        folder.mkdir()
        spec = language_model(folder, tied=tied, train={"clip_norm": 0.1}, pipeline=count)
        _, rows = train(spec, fork_server)
        norms[count] = [row["gradient_norm"] for row in rows]
    assert min(norms[1]) > 0.1  # all steps are clipped
    assert norms[stages] == pytest.approx(norms[1], rel=1e-4)
    prove(spec, fork_server, exact=False)


@pytest.mark.parametrize("stages", [1, 2])
def test_c26_clipping_with_replicas(tmp_path, fork_server, stages):
    """Both replicas clip by the norm of the gradients' sum, a tied weight counted once."""
    norms = {}
    for replicas in (1, 2):
        folder = tmp_path / str(replicas)
        folder.mkdir()
        spec = language_model(folder, train={"clip_norm": 0.1}, pipeline=stages, replicas=replicas)
        _, rows = train(spec, fork_server)
        norms[replicas] = [row["gradient_norm"] for row in rows]
    assert min(norms[1]) > 0.1  # all steps are clipped
    assert norms[2] == pytest.approx(norms[1], rel=1e-4)
    prove(spec, fork_server, exact=False)


def test_c29_replicas_start_alike_and_stages_as_in_one_process(tmp_path, fork_server):
    """No seed but the spec's: verify compares the first values of every rank bit by bit."""
    spec = small(tmp_path, replicas=2)
    found = prove(spec, fork_server, exact=False, steps=1)
    compared = {row.kind: row.compared for row in found.rows}
    assert compared["initial"] == 2 * 2 * 6
    folder = tmp_path / "out"
    write(pipeline.compile(spec, folder), folder)
    for rank in range(4):
        path = folder / f"rank{rank}.py"
        total = "sum(p.sum().item() for p in stage.parameters())"
        start = "\ninit_weights(stage)\n"
        path.write_text(path.read_text().replace(start, f"{start}print({total})\n"))
    result = run_forked(folder, 4, timeout_s=60, server=fork_server).check()
    sums = [rank.stdout.splitlines()[0] for rank in result.ranks]
    assert sums[0] == sums[1]
    assert sums[2] == sums[3]
    assert sums[0] != sums[2]


IN_PLACE = """
from torch.utils.checkpoint import checkpoint


class Act(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.InstanceNorm1d(4, affine=True)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.norm(self.linear(x).view(-1, 4, 4)).flatten(1)
        x.add_(1)
        return self.relu(x)


class Net(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(Act() for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def build(checkpointed=False):
    return Net(checkpointed)
"""


@pytest.mark.parametrize("recompute", ["none", "stage", ["blocks"], "users"])
def test_c30_writes_in_place_at_a_cut_and_behind_a_checkpoint(tmp_path, fork_server, recompute):
    """torch: a checkpoint whose output is written in place gives no gradient."""
    args = {"checkpointed": recompute == "users"}
    chosen = "none" if recompute == "users" else recompute
    prove(small(tmp_path, IN_PLACE, model={"args": args}, recompute=chosen), fork_server)


@pytest.mark.parametrize("replicas", [1, 2])
def test_c31_statistics_by_microbatch(tmp_path, fork_server, replicas):
    """Of each microbatch, as in one process with the same microbatches; each replica has its own
    running ones."""
    code = """
class Normed(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        return super().forward(self.norm(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[Normed() for _ in range(6)])

    def forward(self, x):
        return self.blocks(x)

def build():
    return Net()
"""
    spec = small(tmp_path, code, train={"global_batch": 16}, replicas=replicas)
    found = prove(spec, fork_server, exact=False)
    buffers = [row.compared for row in found.rows if row.kind == "buffer"]
    assert buffers == [6 * 3 * replicas] * 4


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_c47_replicas_of_a_pipeline_are_one_process(tmp_path, fork_server, schedule):
    data = {"samples": 64}
    train_ = {"global_batch": 16}
    spec = small(tmp_path, data=data, train=train_, replicas=2, schedule=schedule)
    prove(spec, fork_server)


def test_c56_a_rank_builds_only_its_part(tmp_path, fork_server):
    """Of a model of 400 MB in two stages each rank has its 200 MB, and no more at any time."""
    code = """
def build():
    layers = [nn.Linear(2000, 2000) for _ in range(25)]
    for layer in layers:  # without gradients, which take as much
        layer.requires_grad_(False)
    return nn.Sequential(*layers, nn.Linear(2000, 1))
"""
    fields = {"x": {"shape": [2000]}, "y": {"shape": [1]}}
    train_ = {"global_batch": 2, "steps": 1}
    spec = small(tmp_path, code, data={"fields": fields}, train=train_, microbatches=1, cuts=["12"])
    folder = tmp_path / "out"
    write(pipeline.compile(spec, folder), folder)
    memory = """print(*[line.split()[1] for line in open("/proc/self/status")
    if line.startswith(("VmHWM", "VmRSS"))], flush=True)  # kB: the peak, now
"""
    for rank in range(2):
        path = folder / f"rank{rank}.py"
        before = "# plan: what the compiler decided\n"
        text = path.read_text().replace(before, f"{memory}{before}")
        path.write_text(text + memory)
    result = run_forked(folder, 2, timeout_s=60, server=fork_server).check()
    for rank in result.ranks:
        lines = [line for line in rank.stdout.splitlines() if line[0].isdigit()]
        (_, start), (peak, _) = (map(int, line.split()) for line in (lines[0], lines[-1]))
        # libraries map up to 120 MB more; the whole model, or its part twice, would be 400 MB
        assert 180e3 < peak - start < 380e3


def test_c43_many_transfers_over_gloo(tmp_path, fork_server):
    """It neither hangs nor drifts: 50 steps with 48 transfers each, side by side in float64."""
    spec = small(tmp_path, train={"steps": 50, "timeout": 20}, pipeline=4, microbatches=8)
    found = prove(spec, fork_server)
    assert sum(row.kind == "loss" for row in found.rows) == 50
