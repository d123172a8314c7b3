"""A command that is ended from outside leaves no process and no scratch folder behind."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from jobs import make_spec

from ppc import pipeline
from ppc.emit.write import write
from ppc.run.launch import descendants
from ppc.signals import Ended, ended_by_signals


def test_signals_raise_and_are_as_before_afterwards():
    with pytest.raises(Ended) as raised, ended_by_signals():
        signal.raise_signal(signal.SIGTERM)
    assert raised.value.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_ignored_signal_stays_ignored():
    """nohup ppc verify ..."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_by_signals():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def alive(pid: int) -> bool:
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in ("Z", "X")
    return False


def wait_for(condition, limit_s):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def keyboard():
    """Interrupts are not ignored, as they are below `make test &`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.dist
@pytest.mark.usefixtures("keyboard")
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["term", "keyboard"]
)
def test_verify_is_ended_while_its_ranks_run(tmp_path, number, code):
    """From the keyboard the signal comes to torchrun too."""
    train = {"global_batch": 4, "steps": 100_000, "optimizer": {"name": "sgd", "lr": 0.1}}
    spec = make_spec(tmp_path, train=train)
    write(pipeline.compile(spec, tmp_path / "out"), tmp_path / "out")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    before = sorted(tmp_path.iterdir())
    process = subprocess.Popen(
        [sys.executable, "-m", "ppc", "verify", "out", "--steps", "100000"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    below = []
    try:
        wait_for(lambda: any(tmp_path.glob(".ppc-verify-*/metrics.jsonl")), 120)
        below = descendants(process.pid)
        assert len(below) >= 2
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        assert process.wait(60) == code
        wait_for(lambda: not any(map(alive, below)), 10)
    finally:
        for pid in (process.pid, *below):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert b"Traceback" not in process.stderr.read()
    assert sorted(tmp_path.iterdir()) == before
    assert list(scratch.iterdir()) == []
