"""The benchmarks run, on sizes that say nothing about speed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist
root = Path(__file__).parent.parent


def run(folder, script, *arguments):
    command = [sys.executable, str(root / "benchmarks" / script), *arguments]
    found = folder / "found.json"
    command += ["--json", str(found), "--folder", str(folder / "work")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(found.read_text()), done.stdout


def test_sleeping_layers(tmp_path):
    shape = ("--shapes", "2x4", "--times", "2/4", "--schedules", "1f1b")
    (found,), told = run(tmp_path, "virtual.py", *shape, "--repeats", "1", "--steps", "3")
    assert found["ideal_s"] == pytest.approx(5 * 0.006)
    assert found["simulated_s"] > found["ideal_s"]  # the times measured are the sleep and more
    assert min(found["steps_s"]["ppc"] + found["steps_s"]["torch"]) > found["ideal_s"]
    assert "2 x 4 1f1b 4 KB" in told


@pytest.mark.slow
def test_large_values(tmp_path):
    few = ("--elements", str(2**21), "--repeats", "1", "--steps", "4")
    found, told = run(tmp_path, "virtual.py", "--large", *few)
    names = ["2 x 16 gpipe 4 KB", "2 x 16 gpipe 8 MB", "2 x 16 1f1b 4 KB", "2 x 16 1f1b 8 MB"]
    assert [result["case"] for result in found] == names
    assert all(name in told for name in names)


@pytest.mark.slow
def test_real_models(tmp_path):
    few = ("--models", "gpt", "--pairs", "1", "--steps", "3")
    found, told = run(tmp_path, "real.py", *few)
    cases = [result["case"] for result in found]
    assert cases == ["gpt one", "gpt pipeline", "gpt data"]
    assert "slower" in told or "ok" in told
