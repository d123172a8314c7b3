"""More cases of the list that tests/test_cases.py begins: what goes wrong around the training."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import kept
import numpy as np
import pytest
import torch
from jobs import make_spec, plant, prove
from test_cases import language_model, small

from ppc import pipeline
from ppc.emit.write import write
from ppc.errors import CaptureError, Complaints, PlanError, RunError
from ppc.run.launch import run_forked, run_torchrun
from ppc.run.verify import verify

pytestmark = pytest.mark.dist


def compiled(spec) -> Path:
    folder = spec.folder / "out"
    write(pipeline.compile(spec, folder), folder)
    return folder


def weights(folder: Path, ranks: int) -> dict[str, torch.Tensor]:
    paths = [folder / f"weights-rank{rank}.pt" for rank in range(ranks)]
    return {name: t for path in paths for name, t in torch.load(path).items()}


@pytest.mark.parametrize("stages", [1, 3])
def test_c3_a_tied_weight_is_in_the_optimizer_once(tmp_path, fork_server, stages):
    """Under either name, on the ranks that read it; no second copy decays away from it."""
    optimizer = {"name": "adamw", "lr": 0.1, "weight_decay": 0.1}
    spec = language_model(tmp_path, train={"optimizer": optimizer}, pipeline=stages)
    prove(spec, fork_server, exact=False)
    folder = compiled(spec)
    for rank in range(stages):
        script = folder / f"rank{rank}.py"
        names = '[n for group in optimizer.param_groups for n in group["param_names"]]'
        script.write_text(f"{script.read_text()}print(*{names})\n")
    result = run_forked(folder, stages, timeout_s=60, server=fork_server).check()
    named = [name for rank in result.ranks for name in rank.stdout.splitlines()[-1].split()]
    blocks = [f"blocks.{i}.linear.{kind}" for i in range(6) for kind in ("bias", "weight")]
    tied = ["embed.weight"] if stages == 1 else ["embed.weight", "head.weight"]
    assert sorted(named) == [*blocks, *tied]
    saved = weights(folder, stages)
    assert torch.equal(saved["embed.weight"], saved["head.weight"])


SENTENCES = """
class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        words = torch.arange(5 + 2 * (i % 2)) + i
        return words % 32, (words + 1) % 32
"""
LENGTHS = "words of sample 1 has the shape [7], that of sample 0 [5]: a batch has one"


def test_c18_samples_of_other_lengths(tmp_path, fork_server):
    """Refused before anything runs, with what to write, which then is right: nothing is cut off."""
    code = f"{WORDS}{SENTENCES}"
    data = {"source": "net.py:Sentences", "fields": ["words", "next"]}
    model = {"loss": "net.py:loss"}

    def spec(**more):
        return make_spec(
            tmp_path, code, model=model, data=data | more, train={"global_batch": 8},
            cluster={"devices_per_node": 2}, parallel={"pipeline": 2, "microbatches": 4},
        )  # fmt: skip

    with pytest.raises(CaptureError) as raised:
        pipeline.compile(spec(), tmp_path / "out")
    assert raised.value.message == LENGTHS
    assert raised.value.hint == "data: {pad: {words: 0}, length: 7 or more}"
    with pytest.raises(CaptureError, match=r"words of sample 1 has length 7; data\.length is 6"):
        pipeline.compile(spec(pad={"words": 0, "next": -100}, length=6), tmp_path / "out")
    prove(spec(pad={"words": 0, "next": -100}, length=7), fork_server, exact=False)


WORDS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.first = nn.Embedding(32, 16), nn.Linear(16, 16)
        self.second = nn.Linear(16, 32)

    def forward(self, words):
        return self.second(torch.tanh(self.first(self.embed(words))))

def build():
    return Net()

def loss(logits, next):
    return nn.functional.cross_entropy(logits.flatten(0, 1), next.flatten())
"""

DROPPED = """
from torch.utils.checkpoint import checkpoint

class Dropped(Block):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(super().forward(x))

class Net(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(Dropped() for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=REENTRANT) if self.checkpointed else block(x)
        return x

def build(checkpointed):
    return Net(checkpointed)
"""


@pytest.mark.parametrize("reentrant", [False, True])
def test_c27_the_user_s_checkpoints_change_no_bit(tmp_path, fork_server, reentrant):
    found = []
    for checkpointed in (False, True):
        folder = tmp_path / str(checkpointed)
        folder.mkdir()
        code = DROPPED.replace("REENTRANT", str(reentrant))
        spec = small(folder, code, model={"args": {"checkpointed": checkpointed}})
        out = compiled(spec)
        assert ("checkpoint" in (out / "rank1.py").read_text()) == checkpointed
        run_forked(out, 2, timeout_s=60, server=fork_server).check()
        losses = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").open()]
        found.append((losses, weights(out, 2)))
    (first, before), (second, after) = found
    assert first == second
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


BRANCHES = """
class Net(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.blocks, self.n = blocks(), n

    def forward(self, x, mask=None):
        for _ in range(self.n):
            for block in self.blocks:
                x = block(x)
        if mask is not None:
            x = x * mask
        BRANCH
        return x

def build(n=2):
    return Net(n)
"""


@pytest.mark.parametrize("masked", [False, True])
def test_c34_tests_for_none_and_loops_over_numbers(tmp_path, fork_server, masked):
    fields = {"x": {"shape": [16]}, "y": {"shape": [16]}}
    fields |= {"mask": {"shape": [16], "dtype": "int64", "high": 2}} if masked else {}
    spec = small(tmp_path, BRANCHES.replace("BRANCH", ""), data={"fields": fields})
    prove(spec, fork_server, exact=False)


def test_c34_a_branch_on_data_is_refused_at_its_line(tmp_path):
    step = "x = -x if x.sum() > 0 else x"
    with pytest.raises(CaptureError) as raised:
        pipeline.compile(small(tmp_path, BRANCHES.replace("BRANCH", step)), tmp_path / "out")
    where = raised.value.where
    assert Path(where.file).read_text().splitlines()[where.line - 1].strip() == step
    assert raised.value.message.startswith("what forward computes hangs on the values of its data")
    assert raised.value.hint.startswith("torch.where instead of `if`")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Scripts that wait no longer than two seconds."""
    return compiled(small(tmp_path_factory.mktemp("quick"), train={"steps": 2, "timeout": 2}))


@pytest.fixture
def scripts(quick, tmp_path):
    """A copy of them to spoil."""
    return Path(shutil.copytree(quick, tmp_path / "out"))


@pytest.mark.parametrize(("victim", "signal"), [(0, 9), (1, 19)], ids=["killed", "stopped"])
def test_c41_a_rank_that_is_lost(scripts, fork_server, victim, signal):
    """The others end within the spec's timeout and say what they have lost, where and when."""
    end = f"    if step == 1: os.kill(os.getpid(), {signal})\n"
    plant(scripts / f"rank{victim}.py", "def backward(mb):\n", f"def backward(mb):\n{end}")
    result = run_forked(scripts, 2, timeout_s=60, server=fork_server)
    assert not result.timed_out
    assert result.seconds < 10
    other = result.ranks[1 - victim]
    last = other.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ConnectionError: rank {other.rank}, stage {other.rank}, step 2: lost ")
    assert other.returncode == 1


ROWS = """
import os

class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.read = 0

    def __len__(self):
        return 32

    def __getitem__(self, i):
        self.read += 1
        if os.environ.get("RANK") == "0" and self.read > 8:
            raise OSError(f"row {i} is gone")
        return torch.ones(16) * i, torch.ones(16)
"""


def test_c41_a_dataset_that_raises_on_one_rank(tmp_path, fork_server):
    data = {"source": "net.py:Rows", "fields": ["x", "y"]}
    spec = make_spec(
        tmp_path, MLP + ROWS, data=data, train={"global_batch": 8, "timeout": 20},
        cluster={"devices_per_node": 2}, parallel={"pipeline": 2, "microbatches": 4},
    )  # fmt: skip
    result = run_forked(compiled(spec), 2, timeout_s=60, server=fork_server)
    assert result.seconds < 10
    assert result.first_failed == 0
    here = "RuntimeError: rank 0, stage 0, step 2: sample "
    assert result.ranks[0].stderr.strip().splitlines()[-1].startswith(here)
    assert "cannot be read: OSError: row " in result.ranks[0].stderr


MLP = """
def build():
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
"""


@pytest.mark.slow
def test_c42_two_runs_at_once_on_one_machine(tmp_path):
    """As torchrun --standalone starts them: neither asks for a port of its own."""
    folders = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        folders.append(compiled(small(tmp_path / name, train={"steps": 2})))
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(run_torchrun, folder, 2, timeout_s=120) for folder in folders]
    for folder, run in zip(folders, runs, strict=True):
        run.result().check()
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2


PARTS = """
from parts.blocks import Block

def build():
    return nn.Sequential(*[Block() for _ in range(2)])
"""
PART = """
import torch
import torch.nn as nn
from . import sizes

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(sizes.WIDTH, sizes.WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x))
"""


def parts_spec(folder, **sections):
    (folder / "parts").mkdir()
    (folder / "parts/__init__.py").touch()
    (folder / "parts/blocks.py").write_text(PART)
    (folder / "parts/sizes.py").write_text("WIDTH = 16\n")
    fields = {"x": {"shape": [16]}, "y": {"shape": [16]}}
    return make_spec(
        folder, PARTS, data={"source": "random", "samples": 8, "fields": fields}, **sections
    )


def test_c54_a_folder_knows_its_spec_and_files(tmp_path, fork_server):
    """Of all that has changed verify says which file, what it was and is, and what to do."""
    spec = parts_spec(tmp_path)
    folder = compiled(spec)
    sources = json.loads((folder / "manifest.json").read_text())["sources"]
    assert list(sources) == ["net.py", "parts/__init__.py", "parts/blocks.py", "parts/sizes.py"]
    assert verify(folder, steps=1, fork_server=fork_server).ok
    file = tmp_path / "parts/blocks.py"
    file.write_text(PART.replace("tanh", "sin"))
    with pytest.raises(RunError) as raised:
        verify(folder, steps=1)
    assert str(raised.value).startswith(
        f"{file} has changed since {folder} was compiled from it: "
        f"sha256 {sources['parts/blocks.py'][:12]} then, "
    )
    assert raised.value.hint == f"ppc compile {spec.path} -o {folder}"
    spec.path.write_text(spec.path.read_text() + "\n")
    (tmp_path / "parts/sizes.py").rename(tmp_path / "parts/other.py")
    with pytest.raises(Complaints) as several:
        verify(folder, steps=1)
    assert [error.message.split(" ")[0] for error in several.value.errors] == [
        str(spec.path), str(file), str(tmp_path / "parts/sizes.py"),
    ]  # fmt: skip
    assert several.value.errors[2].message.endswith(f"is gone, from which {folder} was compiled")


def test_c54_a_layer_is_edited_and_compiled_again(tmp_path, fork_server):
    spec = parts_spec(tmp_path)
    folder = compiled(spec)
    before = (folder / "rank0.py").read_text()
    (tmp_path / "parts/blocks.py").write_text(PART.replace("tanh", "sin"))
    compiled(spec)
    after = (folder / "rank0.py").read_text()
    assert [("tanh" in text, "sin(" in text) for text in (before, after)] == [
        (True, False), (False, True),
    ]  # fmt: skip
    assert verify(folder, steps=1, fork_server=fork_server).ok


def write_rows(folder: Path, width: int, dtype: type) -> None:
    np.save(folder / "x.npy", np.ones((8, width), dtype))
    np.save(folder / "y.npy", np.ones((8, 16), np.float32))


@pytest.mark.parametrize(
    ("width", "dtype", "found"),
    [
        (17, np.float32, "torch.float32[17]"),
        (16, np.int64, "torch.int64[16]"),
        (16, np.float64, ""),
    ],
)
def test_c54_other_data_than_it_was_compiled_for(tmp_path, fork_server, width, dtype, found):
    write_rows(tmp_path, 16, np.float32)
    data = {"source": "arrays", "files": {"x": "x.npy", "y": "y.npy"}}
    spec = make_spec(
        tmp_path, MLP, data=data, cluster={"devices_per_node": 2}, parallel={"pipeline": 2}
    )
    folder = compiled(spec)
    write_rows(tmp_path, width, dtype)
    result = run_forked(folder, 2, timeout_s=60, server=fork_server)
    if not found:  # a script converts floats
        result.check()
        return
    assert result.seconds < 10
    assert result.ranks[0].stderr.strip() == (
        f"rank 0, stage 0: x of a sample is {found}, not torch.float32[16], "
        "which this was compiled for"
    )


def test_c54_a_dataset_that_has_changed(tmp_path, fork_server):
    """A float where whole numbers were is not cut off to one."""
    code = "class Rows:\n    def __len__(self):\n        return 8\n\n"
    code += "    def __getitem__(self, i):\n        return torch.ones(16) * i, LABEL\n"
    loss = "def loss(output, y):\n    return (output.mean(1) - y).square().mean()\n"
    data = {"source": "rows.py:Rows", "fields": ["x", "y"]}
    (tmp_path / "rows.py").write_text("import torch\n\n" + code.replace("LABEL", "i"))
    spec = make_spec(tmp_path, MLP + loss, model={"loss": "net.py:loss"}, data=data)
    folder = compiled(spec)
    (folder / "rows.py").write_text("import torch\n\n" + code.replace("LABEL", "i / 2"))
    result = run_forked(folder, 1, timeout_s=60, server=fork_server)
    last = result.ranks[0].stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: rank 0, stage 0, step 1: sample ")
    assert last.endswith("ValueError: y has the dtype torch.float32, not torch.int64")


@pytest.mark.parametrize(("version", "runs"), [("2.8.1", False), ("2.9.0", True), ("3.1", True)])
def test_c54_another_torch(scripts, fork_server, version, runs):
    """Older than any that scripts run with it is refused; newer is no fault."""
    other = f'torch.__version__ = torch.torch_version.TorchVersion("{version}")'
    plant(scripts / "run.py", "import torch\n", f"import torch\n\n{other}\n")
    result = run_forked(scripts, 2, timeout_s=60, server=fork_server)
    assert result.ok == runs
    for rank in result.ranks if not runs else ():
        assert rank.stderr == f"job needs torch 2.9 or newer; rank {rank.rank} has 2.8.1\n"


def test_c54_ranks_with_different_torches(scripts, fork_server):
    other = 'torch.__version__ = torch.torch_version.TorchVersion("2.99")'
    plant(scripts / "rank1.py", "import torch\n", f"import torch\n\n{other}\n")
    result = run_forked(scripts, 2, timeout_s=60, server=fork_server)
    for rank in result.ranks:
        assert "before step 1: ranks differ in torch: {0: '" in rank.stderr.splitlines()[-1]


HELD = """
    held = [*stage.parameters(), *(p.grad for p in stage.parameters())]
    held += [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    (FOLDER / f"{RANK}.held").write_text(str(sum(t.nbytes for t in held)))
"""


def test_c55_the_estimate_is_that_of_the_heaviest_rank(tmp_path, fork_server):
    """Embedding and head outweigh the rest: each rank's bytes are those that the plan has."""
    spec = language_model(
        tmp_path, vocab=5000, tied=False, cuts=["blocks.0", "head"], pipeline=3,
        train={"optimizer": {"name": "adamw", "lr": 0.1}, "steps": 2},
    )  # fmt: skip
    memory = pipeline.lower(spec, tmp_path).report.memory
    folder = compiled(spec)
    for rank in range(3):
        plant(folder / f"rank{rank}.py", "    optimizer.step()\n", f"    optimizer.step(){HELD}")
    wrapper = (str(Path(kept.__file__).absolute()), str(tmp_path))
    run_forked(folder, 3, timeout_s=60, server=fork_server, wrapper=wrapper).check()
    for rank, counted in enumerate(memory):
        weights_ = counted.parameters + counted.gradients + counted.optimizer
        assert int((folder / f"{rank}.held").read_text()) == weights_
        passing = counted.activations - int((tmp_path / f"{rank}.kept").read_text())
        assert 0 <= passing <= counted.parameters  # a weight's gradient, before it is added
    heaviest = max(m.total for m in memory)
    assert heaviest > 1.5 * sum(m.total for m in memory) / 3
    fits = replace(spec, cluster=with_memory(spec, heaviest))
    assert pipeline.lower(fits, tmp_path).report.memory[2].total == memory[2].total
    tight = replace(spec, cluster=with_memory(spec, heaviest - 1))
    with pytest.raises(PlanError, match=r"\(1 bytes\) more than the device has"):
        pipeline.lower(tight, tmp_path)


def with_memory(spec, size: int):
    return replace(spec.cluster, device=replace(spec.cluster.device, memory=size))
