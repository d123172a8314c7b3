"""Llama 70B for 64 ranks and 405B for 1,024, as benchmarks/large.py compiles them: the memory that
this takes is asked for here, the seconds are printed (`-s`)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]
root = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    command = [sys.executable, str(root / "benchmarks/large.py"), "--folder", str(folder)]
    done = subprocess.run(
        [*command, "--json", str(folder / "found.json")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)  # noqa: T201  # the seconds
    found = json.loads((folder / "found.json").read_text())
    return {(run["spec"], run["command"]): run for run in found}


@pytest.mark.parametrize(("shape", "most_gb"), [("llama_70b", 2), ("llama_405b", 3)])
def test_memory(runs, shape, most_gb):
    for command in ("check", "plan", "compile"):
        run = runs[shape, command]
        assert run["exit_code"] == 0, run["complaint"]
        assert run["peak_gb"] < most_gb


@pytest.mark.parametrize(("shape", "ranks"), [("llama_70b", 64), ("llama_405b", 1024)])
def test_the_plan_fits_and_every_rank_has_its_script(runs, shape, ranks):
    assert 0 < runs[shape, "plan"]["fullest_gb"] < 141
    assert runs[shape, "compile"]["files"] == ranks + 3  # run.py, plan.txt, manifest.json
    assert runs[shape, "compile"]["written_mb"] < ranks * 0.03


def test_too_few_stages_are_refused_with_the_missing_bytes(runs):
    refused = runs["llama_405b_8_stages", "plan"]
    assert refused["exit_code"] == 1
    assert "bytes) more than the device has (131.3 GiB)" in refused["complaint"]
