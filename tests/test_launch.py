import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import pytest

from ppc.errors import RunError
from ppc.run.launch import ForkServer, run_forked, run_torchrun
from ppc.run.result import Rank, Result

pytestmark = pytest.mark.dist

TWO_RANKS = Path(__file__).parent / "two_ranks"
PREAMBLE = """
import os, signal, subprocess, sys, time
from pathlib import Path
RANK = int(os.environ["RANK"])
Path(f"pid{RANK}").write_text(str(os.getpid()))
"""
MEET = """
from datetime import timedelta
import torch
import torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(minutes=10))
"""
# A rank that has started a process of its own: torchrun and the ranks' groups must not lose it.
CHILD = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path(f"pid{RANK}.child").write_text(str(child.pid))
"""


@pytest.fixture
def write(tmp_path):
    """Writes run.py; what it started ends with the test, whatever the code under test does."""

    def write_script(text):
        (tmp_path / "run.py").write_text(PREAMBLE + dedent(text))
        return tmp_path

    yield write_script
    for path in tmp_path.glob("pid*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{path.read_text()}/cwd").readlink() == tmp_path:
                os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.fixture
def both(fork_server):
    """The two ways to launch; the second takes seconds, so few tests use it."""

    def run(way, folder, world_size, **options):
        if way == "forked":
            return run_forked(folder, world_size, server=fork_server, **options)
        return run_torchrun(folder, world_size, **options)

    return run


def runs(pid):
    """Whether the process still runs; one that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def left_running(folder, expected):
    """The processes noted in the folder that still run, a second later at most."""
    pids = [int(path.read_text()) for path in folder.glob("pid*")]
    assert len(pids) == expected
    deadline = time.monotonic() + 1
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [pid for pid in pids if runs(pid)]


def wait_for(*paths):
    deadline = time.monotonic() + 60
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < deadline, paths
        time.sleep(0.01)


def test_both_ways_run_the_same_training(tmp_path, both):
    losses, outputs = {}, {}
    for way in ("forked", "torchrun"):
        folder = shutil.copytree(TWO_RANKS, tmp_path / way)
        result = both(way, folder, 2, timeout_s=60).check()
        assert [rank.returncode for rank in result.ranks] == [0, 0]
        assert result.first_failed is None
        outputs[way] = [rank.stdout for rank in result.ranks]
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        losses[way] = [json.loads(line)["loss"] for line in lines]
        assert (folder / "weights-rank0.pt").exists()
    assert len(losses["forked"]) == 4
    assert losses["forked"] == losses["torchrun"]
    assert outputs["forked"] == outputs["torchrun"]
    assert outputs["forked"][0] == "".join(f"rank 0 | step {step}\n" for step in range(4))
    assert outputs["forked"][1].count("loss") == 4


def test_a_rank_finds_what_torchrun_sets(write, fork_server):
    folder = write("""
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE OMP_NUM_THREADS MINE"
        print(*(os.environ[name] for name in names.split()), sys.argv, __name__)
        print(sys.path[0], os.getcwd())
        print("to stderr", file=sys.stderr)
        """)
    result = run_forked(folder, 3, timeout_s=20, server=fork_server, environment={"MINE": "x"})
    for rank in result.check().ranks:
        words = f"{rank.rank} {rank.rank} 3 3 1 x ['run.py'] __main__\n{folder} {folder}\n"
        assert rank.stdout == words
        assert rank.stderr == "to stderr\n"


@pytest.mark.parametrize("way", ["forked", "torchrun"])
def test_the_rank_that_raises_is_named(write, both, way):
    folder = write(
        CHILD
        + MEET
        + """
if RANK == 1:
    raise ValueError("one is odd")
dist.recv(torch.empty(1), 1)
"""
    )
    result = both(way, folder, 3, timeout_s=60)
    assert not result.ok
    assert result.first_failed == 1
    assert not result.timed_out
    assert result.explain().startswith("rank 1 of 3 ranks failed first, exit code 1\n")
    assert result.explain().endswith("ValueError: one is odd")
    with pytest.raises(RunError, match="one is odd"):
        result.check()
    if way == "forked":  # torchrun leaves the children of its workers alone
        assert left_running(folder, 6) == []


def test_the_rank_that_is_killed_is_named(write, fork_server):
    folder = write(
        MEET
        + """
if RANK == 2:
    os.kill(os.getpid(), signal.SIGKILL)
dist.recv(torch.empty(1), 2)
"""
    )
    result = run_forked(folder, 4, timeout_s=60, server=fork_server)
    assert result.first_failed == 2
    assert result.explain().startswith("rank 2 of 4 ranks failed first, ended by SIGKILL")
    assert result.seconds < 10


@pytest.mark.parametrize(
    ("statement", "code", "words"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('enough')", 1, "enough\n"),
        ("sys.exit()", 0, ""),
        ("os._exit(4)", 4, ""),
        ("def f(:", 1, "SyntaxError"),
    ],
)
def test_exit_codes_are_python_s(write, fork_server, statement, code, words):
    result = run_forked(write(statement), 1, timeout_s=20, server=fork_server)
    assert result.ranks[0].returncode == code
    assert words in result.ranks[0].stderr
    assert result.first_failed == (0 if code else None)


@pytest.mark.parametrize("way", ["forked", "torchrun"])
def test_nothing_runs_on_after_the_limit(write, both, way):
    limit = 1.0 if way == "forked" else 10.0  # torchrun needs two seconds to start
    folder = write(CHILD + "\nprint('started', flush=True)\ntime.sleep(600)\n")
    result = both(way, folder, 2, timeout_s=limit)
    assert result.timed_out
    assert not result.ok
    assert limit <= result.seconds < limit + 3
    assert [rank.stdout for rank in result.ranks] == ["started\n"] * 2
    assert "not done after" in result.explain()
    assert left_running(folder, 4) == []


def test_at_the_limit_every_stuck_rank_says_where_it_is(write, fork_server):
    folder = write("def stuck():\n    time.sleep(600)\nif RANK:\n    stuck()\n")
    result = run_forked(folder, 3, timeout_s=0.5, server=fork_server)
    assert [rank.returncode for rank in result.ranks] == [0, -9, -9]
    assert result.explain().startswith("of 3 ranks, not done after 0.")
    assert ": 1, 2\n" in result.explain()
    assert result.explain().count("in stuck") == 2


def test_others_have_a_moment_for_their_last_words(write, fork_server):
    folder = write("""
        if RANK == 0:
            sys.exit(1)
        time.sleep(0.5)
        print("I lost rank 0", flush=True)
        time.sleep(600)
        """)
    result = run_forked(folder, 2, timeout_s=60, server=fork_server)
    assert result.first_failed == 0
    assert not result.timed_out
    assert result.seconds < 5
    assert result.ranks[1].stdout == "I lost rank 0\n"


@pytest.mark.parametrize("group", ["None", "dist.new_group([0, 1])"])
def test_group_timeout_is_the_shorter_one(write, fork_server, group):
    folder = write(
        MEET
        + f"""
group = {group}
if RANK == 0:
    dist.recv(torch.empty(1), 1, group=group)
time.sleep(1.5)
"""
    )
    result = run_forked(folder, 2, timeout_s=30, server=fork_server, group_timeout_s=1)
    assert result.first_failed == 0
    assert "Timed out" in result.ranks[0].stderr
    assert result.seconds < 10


def test_a_server_goes_on_after_a_failure(write, fork_server):
    folder = write("sys.exit(RANK)")
    assert not run_forked(folder, 2, timeout_s=20, server=fork_server).ok
    assert run_forked(folder, 1, timeout_s=20, server=fork_server).ok


@pytest.mark.parametrize("victim", ["client", pytest.param("server", marks=pytest.mark.slow)])
def test_ranks_end_with_client_and_server(write, tmp_path, victim):
    folder = write(CHILD + "\ntime.sleep(600)\n")
    client = f"""
from pathlib import Path
from ppc.run.launch import ForkServer, run_forked
with ForkServer() as server:
    Path("server").write_text(str(server.process.pid))
    run_forked(Path({str(folder)!r}), 2, timeout_s=600, server=server)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", client], cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    pids = [tmp_path / name for name in ("server", "pid0", "pid1", "pid0.child", "pid1.child")]
    wait_for(*pids)
    server = int(pids[0].read_text())
    os.kill(process.pid if victim == "client" else server, signal.SIGKILL)
    try:
        assert process.wait(20) != 0
        deadline = time.monotonic() + 5
        while runs(server) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not runs(server)
        if victim == "server":  # the kernel ends the ranks; their own children are theirs to mind
            for path in tmp_path.glob("pid?.child"):
                os.kill(int(path.read_text()), signal.SIGKILL)
        assert left_running(tmp_path, 4) == []
    finally:
        process.kill()


def test_a_server_that_is_gone_says_so(write):
    server = ForkServer()
    server.close()
    with pytest.raises(RunError, match="not running"):
        run_forked(write(""), 1, timeout_s=5, server=server)


@pytest.mark.parametrize("way", ["forked", "torchrun"])
def test_a_folder_without_scripts_is_refused(tmp_path, both, way):
    with pytest.raises(RunError, match=r"has no run\.py"):
        both(way, tmp_path, 2, timeout_s=5)


def test_explain_without_a_rank_to_name():
    """As when torchrun itself fails: its own words are all there is."""
    ranks = (Rank(0, None, "", ""), Rank(1, None, "", ""))
    result = Result(ranks, 1.0, timed_out=False, first_failed=None, launcher="no such option")
    assert not result.ok
    assert result.explain().endswith("no such option")
