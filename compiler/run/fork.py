"""The fork server: has imported torch, has run no operation, forks a process for each rank.

    python -m ppc.run.fork          one JSON request a line in, one JSON answer a line out
    {"folder", "entry", "world_size", "environment", "timeout_s", "group_timeout_s", "scratch"}
    {"ranks": [[rank, returncode, failed_s], ...], "timed_out", "seconds"}

A fork of a process that has imported torch starts in milliseconds instead of seconds. It must have
run no torch operation: the threads that an operation may start do not survive the fork, and the
ranks would wait for them. Ranks meet through a FileStore, since a TCPStore's threads do not either.
All ranks share the server's hash seed: what depends on it shows under torchrun only.
"""

import ctypes
import faulthandler
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.elastic.multiprocessing.errors

from ..frontend.capture.private import import_dynamo

POLL_S = 0.005
LAST_WORDS_S = 2.0  # for the other ranks, after the first failure, to say what they saw of it
STACKS_S = 0.2  # for a rank at the limit to write its stack

Request = dict[str, Any]
Ended = tuple[int, int, float | None]
"""Rank, return code, and when it failed if it failed by itself (time.monotonic)."""


def serve() -> None:
    """Answer requests until the client is gone."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library that prints must not write among the answers
    import_dynamo()
    gc.freeze()
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run_ranks(json.loads(line))), file=answers, flush=True)


def run_ranks(request: Request) -> dict[str, Any]:
    """Fork every rank, wait for all, end what is left at the limit or after a failure."""
    started = time.monotonic()
    server, ranks = os.getpid(), {}
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(request["world_size"]):
        pid = os.fork()
        if pid == 0:
            be_rank(request, rank, server)
        lead_group(pid)
        ranks[pid] = rank
    ended, timed_out = watch(ranks, Path(request["scratch"]), started + request["timeout_s"])
    return {
        "ranks": sorted(ended),
        "timed_out": timed_out,
        "seconds": time.monotonic() - started,
    }


def watch(ranks: dict[int, int], scratch: Path, deadline: float) -> tuple[list[Ended], bool]:
    """Wait for the processes, ending them at the deadline; how each ended, whether it was passed.

    A failure brings the deadline near. Without a client there is nobody to wait for: all end.
    """
    alive, ended, failed, polled = dict(ranks), list[Ended](), False, time.monotonic()
    while alive:
        client_gone = bool(select.select([0], [], [], POLL_S)[0])
        if client_gone or time.monotonic() > deadline:
            ended += kill(alive)
            if client_gone:
                sys.exit("the client is gone")
            return ended, not failed
        started_poll = time.monotonic()
        for pid, rank in list(alive.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                del alive[pid]
                code = reap(pid)
                ended.append((rank, code, failure_time(scratch, rank, polled) if code else None))
                if code and not failed:
                    failed, deadline = True, min(deadline, time.monotonic() + LAST_WORDS_S)
        polled = started_poll
    return ended, False


def failure_time(scratch: Path, rank: int, polled: float) -> float:
    """When the rank failed, by its own note; if it left none it was killed, after the last poll.

    To be killed is no rank's answer to the loss of another, though it may be seen later than that:
    it counts as before all that failed in the time for last words.
    """
    note = scratch / f"{rank}.failed"
    return float(note.read_text()) if note.exists() else polled - LAST_WORDS_S


def kill(pids: dict[int, int]) -> list[Ended]:
    """End these ranks, each after it has written its stack."""
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(STACKS_S)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return [(rank, reap(pid), None) for pid, rank in pids.items()]


def reap(pid: int) -> int:
    """Collect an ended rank and end what it had started; its return code, negative for a signal.

    The group goes first, while the rank's entry in the process table still reserves its number.
    """
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with suppress(ProcessLookupError, PermissionError):  # macOS: nobody left in it
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def lead_group(pid: int) -> None:
    """Make the rank lead a process group; server and rank both do it, so that neither waits."""
    with suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)


def be_rank(request: Request, rank: int, server: int) -> None:
    """The life of a rank's process, from the fork to its exit."""
    code = 1
    try:
        lead_group(0)
        follow(server)
        redirect(Path(request["scratch"]), rank)
        os.environ.update(environment(rank, request["world_size"]) | request["environment"])
        os.chdir(request["folder"])
        sys.path[0] = request["folder"]
        torch.set_num_threads(1)  # OpenMP read its own variable when torch was imported
        store = str(Path(request["scratch"]) / "store")
        meet_through(store, rank, request["world_size"], request["group_timeout_s"])
        code = execute(request["entry"])
        if code:
            note = Path(request["scratch"]) / f"{rank}.failed"
            note.write_text(str(time.monotonic()))
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001  # the fork ends here whatever it was
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)  # no handler of the server's runs in its fork


def follow(server: int) -> None:
    """End with the server, should it be killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != server:
        os._exit(1)


def redirect(scratch: Path, rank: int) -> None:
    """Standard output and error to files, input from nowhere; SIGUSR1 writes the stack."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for name, target in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(scratch / f"{rank}.{name}", flags), target)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)


def environment(rank: int, world_size: int) -> dict[str, str]:
    """What torchrun sets, and gloo kept to the loopback interface."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # nobody listens there: see meet_through
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": loopback,
    }


def meet_through(path: str, rank: int, world_size: int, limit_s: float | None) -> None:
    """Let init_process_group use a FileStore, and no group wait longer than the limit."""
    library: Any = dist
    init, new_group = library.init_process_group, library.new_group

    def limited(timeout: timedelta | None) -> timedelta | None:
        if limit_s is None:
            return timeout
        limit = timedelta(seconds=limit_s)
        return limit if timeout is None else min(timeout, limit)

    def init_process_group(
        backend: str | None = None, timeout: timedelta | None = None, **options: Any
    ) -> None:
        options |= {"store": library.FileStore(path, world_size), "rank": rank}
        init(backend, timeout=limited(timeout), **options | {"world_size": world_size})

    def limited_group(
        ranks: list[int] | None = None, timeout: timedelta | None = None, **options: Any
    ) -> Any:
        return new_group(ranks, timeout=limited(timeout), **options)

    library.init_process_group, library.new_group = init_process_group, limited_group


def execute(entry: list[str]) -> int:
    """Run `script arguments` or `-m module arguments` as Python would; its exit code."""
    try:
        if entry[0] == "-m":
            sys.argv = entry[1:]
            runpy.run_module(entry[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = entry
            runpy.run_path(entry[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:  # noqa: BLE001  # a script's own, Ctrl-C included: its rank failed
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    serve()
