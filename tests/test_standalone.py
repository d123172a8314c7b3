"""Scripts need PyTorch and nothing else: they run, far from their spec, where only torch is."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import pytest
import torch
from jobs import make_spec, vary
from safetensors.torch import save_file

from ppc import pipeline
from ppc.emit.write import write
from ppc.run.launch import run_forked

pytestmark = pytest.mark.dist

ABSENT = ["numpy", "ppc", "transformers", "safetensors", "ruamel", "jsonschema", "pytest"]
NUMPY_WEIGHTS = """
import numpy as np

def build():
    net = nn.Linear(40, 1)
    net.weight.data = torch.from_numpy(np.linspace(-1, 1, 40, dtype=np.float32)[None])
    return net
"""


def torch_and_its_dependencies() -> dict[str, Distribution]:
    """By name; numpy is no dependency of torch."""
    found: dict[str, Distribution] = {}
    wanted = ["torch"]
    for name in wanted:
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # of another platform, or an extra
            continue
        for requirement in found[name].requires or ():
            needed = re.match(r"[\w.-]+", requirement)[0].lower()
            if "extra ==" not in requirement and needed not in wanted:
                wanted.append(needed)
    return found


@pytest.fixture(scope="session")
def python(tmp_path_factory):
    """An interpreter of an environment with links to these packages and to nothing else."""
    home = tmp_path_factory.mktemp("torch-only")
    venv.create(home, symlinks=True, with_pip=False)
    (site,) = home.glob("lib/python*/site-packages")
    for package in torch_and_its_dependencies().values():
        tops = {file.parts[0] for file in package.files or () if file.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(package.locate_file(top))
    return home / "bin" / "python"


def run(python, *arguments, folder):
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR") if key in os.environ}
    result = subprocess.run(
        [python, *arguments],
        cwd=folder,
        env=kept | {"OMP_NUM_THREADS": "1"},
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def elsewhere(spec, server):
    """The compiled folder and its data, moved where neither spec nor model is, and the losses that
    it gave before."""
    folder = spec.folder / "out"
    write(pipeline.compile(spec, folder), folder)
    run_forked(folder, spec.parallel.pipeline, timeout_s=60, server=server).check()
    expected = losses(folder)
    (folder / "metrics.jsonl").unlink()
    there = spec.folder.parent / "elsewhere"
    shutil.copytree(spec.folder, there, ignore=shutil.ignore_patterns("*.yaml", "net.py", "models"))
    shutil.rmtree(spec.folder)
    return there / "out", expected


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_the_environment_has_torch_alone(python, tmp_path):
    code = "import sys, importlib.util as u; print(*(n for n in sys.argv[1:] if u.find_spec(n)))"
    assert run(python, "-c", code, "torch", *ABSENT, folder=tmp_path).split() == ["torch"]
    for name in ABSENT:
        assert __import__(name)


@pytest.mark.slow
def test_gpt2_on_two_ranks_needs_no_transformers(python, home, fork_server):
    spec = vary(
        home,
        "gpt2",
        {"layers": 2, "width": 16, "heads": 2, "context": 8},
        data={"sequence": 8},
        train={"steps": 3},
        parallel={"microbatches": 2},
    )
    folder, expected = elsewhere(spec, fork_server)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert "step 3/3" in run(python, *torchrun, "run.py", folder=folder)
    assert losses(folder) == pytest.approx(expected, rel=1e-6)
    assert {path.name for path in folder.glob("*.pt")} == {"weights-rank0.pt", "weights-rank1.pt"}


def write_npy(folder):
    generator = np.random.default_rng(0)
    np.save(folder / "x.npy", generator.random((10, 40)).astype(np.float32))
    np.save(folder / "y.npy", np.asfortranarray(generator.random((10, 1))))
    return {"x": "x.npy", "y": "y.npy"}


def write_safetensors(folder):
    save_file(
        {"x": torch.ones(10, 40), "y": torch.arange(10.0)[:, None]}, folder / "xy.safetensors"
    )
    return "xy.safetensors"


@pytest.mark.parametrize("write_data", [write_npy, write_safetensors])
def test_arrays_and_saved_weights_are_read_without_numpy(python, home, fork_server, write_data):
    data = {"source": "arrays", "files": write_data(home)}
    folder, expected = elsewhere(make_spec(home, NUMPY_WEIGHTS, data=data), fork_server)
    assert (folder / "weights.safetensors").exists()
    run(python, "run.py", folder=folder)
    assert losses(folder) == pytest.approx(expected, rel=1e-6)


READ_AHEAD = """
import torch

class Rows:
    def __len__(self):
        return 10

    def __getitem__(self, i):
        return [0.1] * (1 + i), torch.rand(1)
"""


def write_token_files(folder):
    for name in "ab":
        (folder / f"{name}.bin").write_bytes(bytes(range(246)) + bytes(range(236)))
    files = {"files": ["a.bin", "b*.bin"], "dtype": "uint16", "sequence": 40}
    return {"source": "tokens", **files}


def write_rows(folder):
    (folder / "rows.py").write_text(READ_AHEAD)
    fields = {"fields": ["x", "y"], "pad": {"x": 0}, "length": 40, "workers": 2}
    return {"source": "rows.py:Rows", **fields}


@pytest.mark.parametrize("write_data", [write_token_files, write_rows])
def test_tokens_and_workers_need_torch_alone(python, home, fork_server, write_data):
    code = """
class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x.to(self.weight.dtype) / 1e4)

def build():
    return Net(40, 1)

def loss(output, target):
    return nn.functional.mse_loss(output, target[:, -1:].to(output.dtype) / 1e4)
"""
    field = "tokens" if write_data is write_token_files else "x"
    model = {"loss": "net.py:loss", "inputs": [field]}
    spec = make_spec(home, code, data=write_data(home), model=model)
    folder, expected = elsewhere(spec, fork_server)
    run(python, "run.py", folder=folder)
    assert losses(folder) == pytest.approx(expected, rel=1e-6)


def test_scripts_import_torch_and_the_standard_library():
    """All that are committed; beside them, copies of the user's modules that they need."""
    scripts = sorted((Path(__file__).parents[1] / "generated").glob("*/r*.py"))
    assert len(scripts) > 20
    for script in scripts:
        nodes = list(ast.walk(ast.parse(script.read_text())))
        names = [a.name for node in nodes if isinstance(node, ast.Import) for a in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
        tops = {name.partition(".")[0] for name in names}
        assert "torch" in tops or script.name == "run.py"
        beside = {path.stem for path in script.parent.glob("*.py")}
        assert tops <= sys.stdlib_module_names | {"torch"} | beside, script
