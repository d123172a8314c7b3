"""Ranks that do not belong together say so before the first message, all of them and at once; a
rank that is lost later ends the job, and the others say what they have lost.

Never an abort inside the transport, never a wait for the timeout of ten minutes.
"""

import shutil
import tempfile
from pathlib import Path

import pytest
from jobs import make_spec, plant

from ppc import pipeline
from ppc.emit.write import write
from ppc.run.launch import run_forked, run_torchrun

pytestmark = pytest.mark.dist

NET = """
class Net(nn.Module):
    def __init__(self, skip):
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 256)
        self.skip = skip

    def forward(self, tokens):
        x = torch.tanh(self.first(self.embed(tokens)))
        y = torch.tanh(self.second(x))
        return self.head(y + x if self.skip else y).transpose(1, 2)

def build(skip=False):
    return Net(skip)
"""
STEPS = "STEPS, GLOBAL_BATCH, SEED = 3, 8, 0"
MICROBATCHES = "MICROBATCHES, COMPILATION = 4, "
SIZE = "MICROBATCH_SIZE = GLOBAL_BATCH // MICROBATCHES"
DIE = "os.kill(os.getpid(), 9)"
STOP = "os.kill(os.getpid(), 19)"
NO_THREADS = """
import sys
names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
if sys.platform == "linux" and names.count("pt_gloo_runloop\\n") > 2:  # of torch's default group
    raise RuntimeError(f"threads are left: {names}")
"""
SOON_S = 8.0
"""Far below the timeout: a run takes half a second, and a killed rank gets two to be heard."""


def compile_net(folder, *, skip=False, data=1, **train):
    """Three stages on the bytes of a text, even microbatches: no rank but the ends reads data."""
    folder.mkdir()
    (folder / "text.txt").write_text("some text " * 40)
    spec = make_spec(
        folder,
        NET,
        model={"loss": "cross_entropy", "args": {"skip": skip}},
        data={"source": "text", "files": "text.txt", "sequence": 4, "last_batch": "drop"},
        train={"global_batch": 8, "clip_norm": 1.0, **train},
        cluster={"devices_per_node": 3 * data},
        parallel={"pipeline": 3, "data": data, "microbatches": 4, "cuts": ["second", "head"]},
    )
    write(pipeline.compile(spec, folder / "out"), folder / "out")
    return folder / "out"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compile_net(tmp_path_factory.mktemp("startup") / "job")


@pytest.fixture(scope="module")
def others(compiled):
    """Two more compilations: the same messages, and other messages between other ranks."""
    base = compiled.parents[1]
    return compile_net(base / "alike", seed=1), compile_net(base / "unlike", skip=True)


@pytest.fixture
def scripts(compiled):
    """A copy to spoil."""
    copy = tempfile.mkdtemp(dir=compiled.parent)
    return Path(shutil.copytree(compiled, copy, dirs_exist_ok=True))


@pytest.fixture
def run(fork_server):
    def run_soon(folder, world_size=3):
        result = run_forked(folder, world_size, timeout_s=60, server=fork_server)
        assert not result.timed_out
        assert result.seconds < SOON_S
        return result

    return run_soon


def last_line(rank):
    return rank.stderr.strip().splitlines()[-1]


def test_as_compiled_it_runs(scripts, run):
    run(scripts).check()


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("other", [0, 1], ids=["alike", "unlike"])
def test_a_rank_of_another_compilation(scripts, others, run, rank, other):
    shutil.copy(others[other] / f"rank{rank}.py", scripts)
    for found in run(scripts).ranks:
        assert found.returncode == 1
        here = f"RuntimeError: rank {found.rank}, stage {found.rank}, before step 1: "
        assert last_line(found).startswith(f"{here}ranks differ in compilation: {{0: '")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_another_number_of_ranks(scripts, run, world_size):
    for found in run(scripts, world_size).ranks:
        assert found.returncode == 1
        assert found.stderr == f"job is compiled for 3 ranks, not {world_size}\n"


def test_a_rank_that_runs_the_file_of_another(scripts, run):
    plant(scripts / "run.py", 'f"rank{rank}.py"', '"rank1.py"')
    result = run(scripts)
    for rank in (0, 2):
        expected = "this is rank 1 of 3; start them all through run.py\n"
        assert result.ranks[rank].stderr == expected
    assert not result.ok


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(
    ("right", "wrong", "fact"),
    [
        (STEPS, STEPS.replace("3", "2"), "constants: {0: ("),
        (STEPS, STEPS.replace("8", "12"), "constants: {0: ("),
        (STEPS, STEPS.replace("0", "7"), "constants: {0: ("),
        (MICROBATCHES, MICROBATCHES.replace("4", "2"), "constants: {0: ("),
        (SIZE, "MICROBATCH_SIZE = 4", ">"),
        (", 4, 8)", ", 4, 9)", ">"),
        (", 4, 8)", ", 4, 8, dtype=torch.float64)", ">"),
    ],
    ids=["steps", "batch", "seed", "microbatches", "microbatch size", "shape", "dtype"],
)
def test_a_number_that_was_edited_in_one_file(scripts, run, rank, right, wrong, fact):
    """`>`: in what goes over some edge, which is named."""
    plant(scripts / f"rank{rank}.py", right, wrong)
    for found in run(scripts).ranks:
        assert found.returncode == 1
        assert last_line(found).startswith(f"RuntimeError: rank {found.rank}, stage {found.rank}, ")
        assert "before step 1: ranks differ in " in last_line(found)
        assert fact in last_line(found)


def test_other_data_on_one_rank(scripts, run):
    plant(scripts / "rank2.py", "raw = b", 'raw = b"x" + b')
    for found in run(scripts).ranks:
        assert found.returncode == 1
        assert "ranks differ in data: {0: " in last_line(found)


@pytest.mark.parametrize("line", ["import datetime\n", "init_weights(stage)\n"])
def test_a_rank_that_fails_before_it_meets_the_others(scripts, run, line):
    """They are ended, here after two seconds, by torchrun at once."""
    plant(scripts / "rank1.py", f"\n{line}", f'\n{line}raise ValueError("too early")\n')
    result = run(scripts)
    assert result.first_failed == 1
    assert result.explain().endswith("ValueError: too early")


@pytest.mark.parametrize(
    ("victim", "place"),
    [
        (0, "def backward(mb):\n"),
        (1, "def forward(mb):\n"),
        (1, "def backward(mb):\n"),
        (1, "def clip_gradients():\n"),
        (2, "def forward(mb, labels):\n"),
    ],
)
def test_a_rank_that_is_killed(scripts, run, victim, place):
    """In the second step: each of the others ends with what it has lost."""
    plant(scripts / f"rank{victim}.py", place, f"{place}    if step == 1: {DIE}\n")
    result = run(scripts)
    assert result.first_failed == victim
    assert result.ranks[victim].returncode == -9
    for found in result.ranks:
        if found.rank != victim:
            assert found.returncode == 1
            here = f"ConnectionError: rank {found.rank}, stage {found.rank}, step 2: lost "
            assert last_line(found).startswith(here)


def test_a_message_to_a_rank_that_has_gone_already(scripts, run):
    """Then not the wait fails but the start of the transfer."""
    plant(scripts / "rank1.py", "    run_micro", f"    if step == 1: {DIE}\n    run_micro")
    for script in (scripts / "rank0.py", scripts / "rank2.py"):
        plant(script, "import datetime\n", "import datetime\nfrom time import sleep\n")
        plant(script, "    optimizer.zero_grad()", "    optimizer.zero_grad()\n    sleep(0.5)")
    result = run(scripts)
    assert last_line(result.ranks[0]).endswith("rank 0, stage 0, step 2: lost gradients 1->0")
    assert last_line(result.ranks[2]).endswith("rank 2, stage 2, step 2: lost activations 1->2")


def test_a_rank_that_is_silent_for_too_long(scripts, run):
    """The spec's timeout, here two seconds, bounds every wait."""
    for rank in range(3):
        plant(scripts / f"rank{rank}.py", "timedelta(seconds=600)", "timedelta(seconds=2)")
    plant(scripts / "rank1.py", "def backward(mb):\n", f"def backward(mb):\n    {STOP}\n")
    result = run(scripts)
    for rank, lost in ((0, "gradients 1->0"), (2, "activations 1->2")):
        here = f"ConnectionError: rank {rank}, stage {rank}, step 1: lost {lost} of mb "
        assert last_line(result.ranks[rank]).startswith(here)


@pytest.mark.slow
def test_torchrun_ends_the_others(scripts):
    plant(scripts / "rank1.py", "def forward(mb):\n", f"def forward(mb):\n    {DIE}\n")
    result = run_torchrun(scripts, 3, timeout_s=120)
    assert not result.timed_out
    assert result.first_failed == 1


@pytest.mark.parametrize("data", [1, 2])
def test_no_thread_with_a_tensor_outlives_python(tmp_path, data):
    """torch 2.10 to 2.12 abort where a gloo thread drops a tensor after Python's end: seen in one
    run of twenty. Those of the default group are idle: nothing goes through it."""
    folder = compile_net(tmp_path / "job", data=data)
    scripts = sorted(folder.glob("rank*.py"))
    for script in scripts:
        assert "group.WORLD" not in script.read_text().replace("group.WORLD.get_group_store()", "")
        script.write_text(script.read_text() + NO_THREADS)
    run_forked(folder, len(scripts), timeout_s=60).check()
    for script in scripts:
        plant(script, "groups.clear()", "pass")
    with pytest.raises(Exception, match="threads are left"):
        run_forked(folder, len(scripts), timeout_s=60).check()
