"""What a stranger's file does while it is imported: said at its line with a way out, or without
effect on where and what ppc writes."""

import json
from pathlib import Path

import pytest
from jobs import make_spec
from typer.testing import CliRunner

from ppc import cli

pytestmark = pytest.mark.torch

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 1)

    def forward(self, x):
        return self.linear(x)

def build():
    return Net()
"""
DOT = (
    "leave out the dot if the module lies beside this file; or install the package, and name "
    "package.module:name in the spec"
)


@pytest.fixture
def ppc(tmp_path, monkeypatch):
    """Runs a command on a spec whose model's file begins with some text."""
    monkeypatch.chdir(tmp_path)

    def run(head, *arguments):
        make_spec(tmp_path, head + NET)
        return CliRunner().invoke(cli.app, [arguments[0], "job.yaml", *arguments[1:]])

    return run


@pytest.mark.parametrize(
    ("head", "complaint", "remedy", "mended"),
    [
        (
            "from .parts import f",
            "ImportError: attempted relative import with no known parent package",
            DOT,
            "from parts import f",
        ),
        (
            "import far_away",
            "ModuleNotFoundError: No module named 'far_away'",
            "install far_away where ppc is, or put far_away.py beside this file",
            "import parts",
        ),
        (
            "import sys; sys.exit(3)",
            "SystemExit: 3",
            'what only a program of its own does goes below `if __name__ == "__main__":`',
            'if __name__ == "__main__": sys.exit(3)',
        ),
    ],
)
def test_what_an_import_ends_with(ppc, tmp_path, head, complaint, remedy, mended):
    (tmp_path / "parts.py").write_text("def f(): ...\n")
    done = ppc(head, "compile")
    assert done.exit_code == 1
    line = (tmp_path / "net.py").read_text().splitlines().index(head) + 1
    assert done.stderr.splitlines() == [
        f"net.py:{line}: cannot import net.py:build: {complaint}",
        f"hint: {remedy}",
    ]
    assert not (tmp_path / "generated").exists()
    assert ppc(mended, "compile").exit_code == 0


def test_what_a_model_prints_is_not_among_the_json(ppc):
    done = ppc("print('hello')", "compile", "--json")
    assert json.loads(done.stdout)["ok"] is True
    assert "hello" in done.stderr


def test_a_model_that_goes_to_another_folder(ppc, tmp_path):
    """The output is written where the command was given."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = ppc(f"import os; os.chdir({str(elsewhere)!r})", "compile")
    assert done.exit_code == 0, done.stderr
    assert Path.cwd() == tmp_path
    assert (tmp_path / "generated/job/run.py").exists()
    assert list(elsewhere.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused_before_the_model_runs(ppc, tmp_path):
    (tmp_path / "file").write_text("mine")
    done = ppc("raise SystemExit", "compile", "-o", "file/out")
    assert done.stderr == (
        "file/out cannot be written: file is no folder\nhint: give another folder: -o FOLDER\n"
    )


def test_a_script_is_no_spec(ppc):
    assert ppc("", "compile", "-o", "out").exit_code == 0
    done = CliRunner().invoke(cli.app, ["verify", "out/run.py"])
    assert done.stderr == (
        "out/run.py is no spec, but a file of compiled scripts\nhint: ppc verify out\n"
    )
