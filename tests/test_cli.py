"""The command line: what it prints, its exit codes, and that it stays light."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from jobs import make_spec, plant
from typer.testing import CliRunner

from ppc import cli
from ppc.errors import InternalError
from ppc.run.launch import run_forked

root = Path(__file__).parent.parent
quickstart = root / "specs/quickstart.yaml"


@pytest.fixture
def ppc(tmp_path, monkeypatch):
    """Runs a command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(cli.app, [str(a) for a in arguments])


def test_check_prints_what_it_understood(ppc):
    done = ppc("check", quickstart)
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        f"{quickstart}: ok",
        "quickstart: models/gpt.py:build, 200 steps of 32 samples from text, AdamW, fp32",
        "pipeline 2 x data 1 on 2 cpu, 1f1b, microbatches 8",
    ]


def test_check_in_json(ppc):
    answer = json.loads(ppc("check", quickstart, "--json").stdout)
    assert answer["ok"] is True
    assert answer["spec"]["train"]["steps"] == 200
    assert "locations" not in answer["spec"]


def test_complaints_are_red_text_and_exit_code_1(ppc, tmp_path):
    (tmp_path / "s.yaml").write_text("model: 1\ncluster: {devices_per_node: 1, device: h10}\n")
    done = ppc("check", "s.yaml")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "s.yaml: the spec needs data",
        'hint: data: {source: text, files: "{stdlib}/*.py", sequence: 128}',
        "s.yaml:1:1: model is 1, not a mapping",
        "hint: such as model: {factory: models/gpt.py:build}",
        "s.yaml:2:32: cluster.device is 'h10', not cpu, v100, a100, h100 or h200",
        "hint: did you mean h100?",
    ]
    colored = CliRunner().invoke(cli.app, ["check", "s.yaml"], color=True)
    assert "\x1b[31ms.yaml: the spec needs data\x1b[0m" in colored.stderr


def test_complaints_in_json(ppc, tmp_path):
    ppc("init", "s")
    (tmp_path / "s.yaml").write_text(quickstart.read_text().replace("steps: 200", "steps: no"))
    done = ppc("check", "s.yaml", "--json")
    answer = json.loads(done.stdout)
    assert (done.exit_code, answer["ok"]) == (1, False)
    assert answer["complaints"][0]["message"] == "train.steps is 'no', not a whole number"
    assert answer["complaints"][0]["line"] == 18


def test_one_complaint_in_json_without_a_place_in_the_file(ppc):
    answer = json.loads(ppc("check", "none.yaml", "--json").stdout)
    assert answer["complaints"] == [
        {
            "file": "none.yaml",
            "line": None,
            "column": None,
            "message": "cannot be read: no such file or directory",
            "hint": "name a YAML file that is there and may be read; `ppc init` writes one",
        }
    ]


def test_a_bug_keeps_its_traceback(ppc, monkeypatch):
    for error in (InternalError("0F1 twice", "order", "plan", "grid"), KeyError("x")):

        def fail(_, error=error):
            raise error

        monkeypatch.setattr("ppc.frontend.load.load", fail)
        done = ppc("check", quickstart)
        assert done.exit_code == 70
        assert "Traceback" in done.stderr
        assert "bug of ppc" in done.stderr
        assert str(error) in done.stderr


@pytest.mark.parametrize(
    "arguments", [["check"], ["nonsense"], ["show", "x.yaml"], ["init", "a/b"]]
)
def test_wrong_usage(ppc, arguments):
    assert ppc(*arguments).exit_code == 2


def test_version_and_help(ppc):
    assert ppc("--version").stdout == "ppc 0.1.0\n"
    for arguments in ([], ["-h"], ["compile", "--help"]):
        assert "ppc" in ppc(*arguments).output or "Usage" in ppc(*arguments).output


def test_init_writes_the_quickstart(ppc, tmp_path):
    """The starter is specs/quickstart.yaml with its model, byte for byte."""
    assert ppc("init").exit_code == 0
    for name in ("quickstart.yaml", "models/gpt.py"):
        assert (tmp_path / name).read_bytes() == (root / "specs" / name).read_bytes()
    assert ppc("check", "quickstart.yaml").exit_code == 0


def test_init_takes_a_name(ppc, tmp_path):
    assert ppc("init", "mine").exit_code == 0
    assert ppc("init", "other.yaml").exit_code == 0  # models/gpt.py is there, and the same
    assert "name: mine\n" in (tmp_path / "mine.yaml").read_text()
    assert ppc("check", "other.yaml").stdout.startswith("other.yaml: ok\nother: ")


def test_init_never_overwrites(ppc, tmp_path):
    (tmp_path / "quickstart.yaml").write_text("mine")
    done = ppc("init")
    assert done.exit_code == 1
    assert "quickstart.yaml exists and is left as it is" in done.stderr
    assert (tmp_path / "quickstart.yaml").read_text() == "mine"
    assert not (tmp_path / "models").exists()

    (tmp_path / "models").mkdir()
    (tmp_path / "models/gpt.py").write_bytes(b"\xff mine")
    assert ppc("init", "other").exit_code == 1
    assert not (tmp_path / "other.yaml").exists()


def test_init_where_nothing_can_be_written(ppc, tmp_path):
    (tmp_path / "models").write_text("a file")
    done = ppc("init")
    assert (done.exit_code, "cannot be written" in done.stderr) == (1, True)


# ---------------------------------------------------------------- commands that need a model

GATED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("gate", torch.randperm(5).float())
        self.linear = nn.Linear(5, 1)

    def forward(self, x):
        return self.linear(x * self.gate)

def build():
    return Net()
"""  # a permutation has no recipe: it is saved, and said
SAID = "note: the first values of gate "


@pytest.fixture
def job(tmp_path):
    """job.yaml in the folder that commands run in."""
    return make_spec(tmp_path, GATED).path.name


def tree(folder):
    """The files, without those that Python itself leaves."""
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    return {name for name in found if "__pycache__" not in name}


@pytest.mark.torch
def test_plan_shows_the_plan_and_writes_nothing(ppc, job, tmp_path):
    before = tree(tmp_path)
    done = ppc("plan", job)
    assert done.exit_code == 0
    assert done.stdout.startswith("job: Net on 1 rank, 1f1b, 2 microbatches of up to 2 samples\n")
    assert "memory at the peak" in done.stdout
    answer = json.loads(ppc("plan", job, "--json").stdout)
    assert (answer["ok"], answer["world_size"]) == (True, 1)
    assert answer["memory"][0]["parameters"] == 4 * (6 + 5)
    assert tree(tmp_path) == before


OTHERS = "those that ppc is tested with, 2.13 to 2.15; ppc verify proves its scripts here"


@pytest.mark.torch
@pytest.mark.parametrize(
    ("installed", "note"),
    [
        ("2.12.1", f"note: torch 2.12.1 is older than {OTHERS}"),
        ("2.13.0+cpu", None),
        ("2.15.2", None),
        ("2.16.0a0+git1", f"note: torch 2.16.0a0+git1 is newer than {OTHERS}"),
        ("3.0.0", f"note: torch 3.0.0 is newer than {OTHERS}"),
        ("unknown", None),
    ],
)
def test_a_torch_that_nobody_has_tried(ppc, job, monkeypatch, installed, note):
    """A note and no error, once, and where a model is captured (C62)."""
    monkeypatch.setattr("ppc.version.version", lambda _: installed)
    done = ppc("plan", job)
    assert done.exit_code == 0
    assert [line for line in done.stderr.splitlines() if "torch" in line] == [note] * bool(note)
    assert "torch" not in ppc("check", job).stderr


@pytest.mark.torch
def test_compile_writes_a_folder_and_says_how_to_start_it(ppc, job, tmp_path, monkeypatch):
    done = ppc("compile", job)
    assert done.exit_code == 0
    names = ["rank0.py", "run.py", "plan.txt", "weights.safetensors", "manifest.json"]
    assert done.stdout.splitlines() == [
        f"wrote {', '.join(names)} in generated/job; start it there with",
        "torchrun --standalone --nproc-per-node 1 run.py",
    ]
    assert done.stderr.startswith(SAID)
    assert tree(tmp_path / "generated/job") == set(names)

    monkeypatch.setattr(cli, "sys", SimpleNamespace(stderr=SimpleNamespace(isatty=lambda: True)))
    done = ppc("compile", job, "-o", "else/where", "--json")
    answer = json.loads(done.stdout)  # nothing else is there
    assert answer == {"ok": True, "folder": "else/where", "files": names}
    assert tree(tmp_path / "else/where") == set(names)
    told = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    passes = (
        "capture",
        "segment",
        "recompute",
        "place",
        "check",
        "localize",
        "order",
        "communicate",
        "roll",
    )
    assert told == [f"{name} done" for name in passes]
    assert SAID in done.stderr


@pytest.mark.torch
def test_compile_leaves_a_folder_with_files_of_others_alone(ppc, job, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("mine")
    for form in ([], ["--json"]):
        done = ppc("compile", job, "-o", "mine", *form)
        assert done.exit_code == 1
        complaint = json.loads(done.stdout)["complaints"][0] if form else {}
        message = complaint.get("message", done.stderr)
        assert "mine holds files that ppc did not write: thesis.tex" in message
        assert "give another folder: -o FOLDER" in complaint.get("hint", done.stderr)
    assert tree(tmp_path / "mine") == {"thesis.tex"}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("after", "line"),
    [
        ("capture", "buffer gate: f32[5]"),
        ("segment", "layer linear: "),
        ("place", "stage 0 (one rank: 0): "),
        ("localize", "stage 0 on rank 0"),
        ("order", "rank 0 | 0F0 0B0 0F1 0B1"),
        ("communicate", "    0F(1)"),
        ("roll", "      0F(i)"),
    ],
)
def test_show_prints_the_form_after_a_pass(ppc, job, tmp_path, after, line):
    before = tree(tmp_path)
    done = ppc("show", job, "--after", after)
    assert done.exit_code == 0
    assert any(printed.startswith(line) for printed in done.stdout.splitlines()), done.stdout
    assert tree(tmp_path) == before


@pytest.mark.torch
def test_show_after_a_pass_that_there_is_not(ppc, job):
    done = ppc("show", job, "--after", "lower")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "there is no pass 'lower'",
        (
            "hint: the passes are capture, segment, recompute, place, localize, order, "
            "communicate, roll"
        ),
    ]


@pytest.mark.dist
def test_verify_says_whether_all_is_equal(ppc, job, tmp_path, fork_server, monkeypatch):
    forked = partial(run_forked, server=fork_server)
    monkeypatch.setattr("ppc.run.verify.run_torchrun", forked)
    ppc("compile", job)
    done = ppc("verify", "generated/job", "--steps", "1")
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "equal")
    plant(tmp_path / "generated/job/rank0.py", "LR = 0.1", "LR = 0.2")
    done = ppc("verify", "generated/job", "--steps", "1")
    assert (done.exit_code, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-1] != "equal"


@pytest.mark.dist
def test_verify_in_json(ppc, job, tmp_path, fork_server, monkeypatch):
    forked = partial(run_forked, server=fork_server)
    monkeypatch.setattr("ppc.run.verify.run_torchrun", forked)
    ppc("compile", job)
    done = ppc("verify", "generated/job", "--steps", "1", "--json")
    answer = json.loads(done.stdout)
    assert (done.exit_code, answer["ok"]) == (0, True)
    assert {row["kind"] for row in answer["rows"]} > {"loss", "gradient", "parameter", "buffer"}
    plant(tmp_path / "generated/job/rank0.py", "LR = 0.1", "LR = 0.2")
    done = ppc("verify", "generated/job", "--steps", "1", "--json")
    answer = json.loads(done.stdout)
    assert (done.exit_code, answer["ok"]) == (1, False)
    assert {row["kind"] for row in answer["rows"] if row["failed"]} == {"parameter"}
    plant(tmp_path / "generated/job/rank0.py", "LR = 0.2", "LR = 1 / 0")
    done = ppc("verify", "generated/job", "--json")
    (complaint,) = json.loads(done.stdout)["complaints"]
    assert (done.exit_code, "ZeroDivisionError" in complaint["message"]) == (1, True)


def test_light(tmp_path):
    """`ppc check` and `import ppc` load neither torch nor what belongs to later phases."""
    code = (
        "import sys\n"
        "import ppc\n"
        "assert 'typer' not in sys.modules and 'ruamel' not in sys.modules\n"
        "assert ppc.load(sys.argv[1]).name == 'quickstart'\n"
        "from ppc.cli import app\n"
        "try: app(['check', sys.argv[1]])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "loaded = {'torch', 'numpy', 'jinja2'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code, quickstart], cwd=tmp_path, check=True)


def test_public_names():
    import ppc

    assert set(ppc.__all__) == {"PpcError", "__version__", "compile", "load", "write"}
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = ppc.lode
