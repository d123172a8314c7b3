"""Two ways to run a folder of emitted scripts (run.py and rank*.py), with one kind of result.

`run_torchrun` starts torchrun as a user would. `run_forked` forks the ranks from a ForkServer, a
process that has imported torch already: the same scripts in a tenth of a second a case instead of
several. Either takes a wrapper, arguments to put before the script (`observe.wrapper`).
No process that was started here outlives the call, or the ForkServer.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Self

from ..errors import RunError
from .result import Rank, Result

START_S = 120.0  # for the fork server to import torch on a busy machine
STREAMS = ("stdout", "stderr")
ANSWER_S = 30.0  # for the fork server to end the ranks, after their limit


def run_torchrun(
    folder: Path,
    world_size: int,
    *,
    timeout_s: float,
    wrapper: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Result:
    """Run `torchrun --standalone --nproc-per-node WORLD_SIZE run.py` in the folder.

    The ranks' output goes to files (torchrun's --redirects), to be told apart. `environment` is
    added to this process's own. Raises RunError if the folder has no run.py.
    """
    require_scripts(folder)
    with tempfile.TemporaryDirectory(prefix="ppc-torchrun-") as scratch:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(world_size), "--redirects", "3", "--log-dir", scratch]
        words, started, timed_out = Path(scratch, "launcher"), time.monotonic(), False
        with words.open("w") as output:
            agent = subprocess.Popen(
                [*command, *wrapper, "run.py"],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                agent.wait(timeout_s)
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                end_tree(agent)
        seconds = time.monotonic() - started
        ranks, first = read_logs(Path(scratch), world_size, agent.returncode)
        return Result(ranks, seconds, timed_out, first, read_text([words]))


def read_logs(
    scratch: Path, world_size: int, returncode: int
) -> tuple[tuple[Rank, ...], int | None]:
    """How each rank ended, by torchrun's logs, and which failed first."""
    codes, first = failures(read_text([scratch / "launcher"]))
    ranks = (
        Rank(
            rank,
            0 if returncode == 0 else codes.get(rank),
            *(read_text(scratch.glob(f"*/attempt_0/{rank}/{name}.log")) for name in STREAMS),
        )
        for rank in range(world_size)
    )
    return tuple(ranks), first


def failures(words: str) -> tuple[dict[int, int], int | None]:
    """From torchrun's words: the exit codes of the ranks that it names, the first that failed."""
    said = r"rank +: (\d+) \(local_rank: \d+\)\s+exitcode +: (-?\d+)"
    codes = {int(rank): int(code) for rank, code in re.findall(said, words)}
    first = re.search(said, words.partition("Root Cause")[2])
    return codes, int(first[1]) if first else None


def end_tree(agent: subprocess.Popen[bytes]) -> None:
    """Kill torchrun, if it still runs, and its workers, which lead sessions of their own."""
    if agent.poll() is not None:
        return
    agent.send_signal(signal.SIGSTOP)  # it starts no worker while they are counted
    for pid in descendants(agent.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.kill()
    agent.wait()


def descendants(ancestor: int) -> list[int]:
    """The processes below this one, parents first (Linux; none are found elsewhere)."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process ended meanwhile
            # "pid (name) state parent ...", where the name may hold spaces and brackets
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [ancestor]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


class ForkServer:
    """A process that has imported torch and forks ranks on request: start it once, use it often.

        with ForkServer() as server:
            result = run_forked(folder, 4, timeout_s=20, server=server)

    One run at a time. The ranks, and it, end with the process that started it.
    """

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ppc.run.fork"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # read when torch is imported
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # an interrupt from the keyboard comes to the client alone
        )
        self.answer(START_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer to a request (ppc.run.fork has the form of both)."""
        if self.process.stdin is None or self.process.poll() is not None:
            raise RunError("the fork server is not running")
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        try:
            answer: dict[str, Any] = self.answer(timeout_s)
        except BaseException:
            self.close()  # the ranks too
            raise
        return answer

    def answer(self, timeout_s: float) -> Any:
        """The next line from the server. Raises RunError if there is none in time."""
        out = self.process.stdout
        if out is None or not select.select([out], [], [], timeout_s)[0]:
            raise RunError(f"the fork server has not answered for {timeout_s:.0f} s")
        line = out.readline()
        if not line:
            raise RunError(f"the fork server ended with exit code {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End it: it sees its input close and ends the ranks; killed, it takes them with it."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self.process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def run_forked(
    folder: Path,
    world_size: int,
    *,
    timeout_s: float,
    server: ForkServer | None = None,
    wrapper: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    group_timeout_s: float | None = None,
) -> Result:
    """Run the folder's run.py in one forked process for each rank, in the folder.

    Without a server one is started for this run. `group_timeout_s` bounds every wait on another
    rank, where the script's own timeout is longer. Raises RunError if the folder has no run.py.
    """
    require_scripts(folder)
    with (
        tempfile.TemporaryDirectory(prefix="ppc-fork-") as scratch,
        nullcontext(server) if server else ForkServer() as running,
    ):
        request = {
            "folder": str(folder.absolute()),
            "entry": [*wrapper, "run.py"],
            "world_size": world_size,
            "environment": dict(environment or {}),
            "timeout_s": timeout_s,
            "group_timeout_s": group_timeout_s,
            "scratch": scratch,
        }
        answer = running.ask(request, timeout_s + ANSWER_S)
        ranks = tuple(
            Rank(rank, code, *(read_text([Path(scratch, f"{rank}.{name}")]) for name in STREAMS))
            for rank, code, _ in answer["ranks"]
        )
    failed = [(at, rank) for rank, _, at in answer["ranks"] if at is not None]
    first = min(failed)[1] if failed else None
    return Result(ranks, answer["seconds"], answer["timed_out"], first)


def require_scripts(folder: Path) -> None:
    """Raise RunError unless there is something to run."""
    if not (folder / "run.py").is_file():
        raise RunError(f"{folder} has no run.py", hint="ppc compile SPEC writes such a folder")


def read_text(paths: Iterable[Path]) -> str:
    """What the files hold, end to end; a rank that never started has left none."""
    return "".join(path.read_text(errors="replace") for path in paths if path.exists())
