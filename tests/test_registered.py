"""Operations of the user's own: kept whole, imported by the scripts, refused where they lack what
training needs."""

import ast
import sys
from pathlib import Path

import pytest
from emitted import emit
from jobs import make_spec, prove

from ppc.check.text import check_text
from ppc.errors import CaptureError, InternalError
from ppc.frontend.load import load
from ppc.pipeline import compile, lower

pytestmark = pytest.mark.torch

CUBE = """
from math import pi

import torch
from helpers import scale
from torch import Tensor


@torch.library.custom_op("ppc_tests::cube", mutates_args=())
def cube(x: Tensor, weight: Tensor, factors: list[float], negate: bool = False) -> Tensor:
    return scale(x**3 * weight, factors[0]) * (-1 if negate else 1)


@cube.register_fake
def _(x, weight, factors, negate=False):
    return torch.empty_like(x)


def setup(ctx, inputs, output):
    x, weight, ctx.factors, ctx.negate = inputs
    ctx.save_for_backward(x, weight)


def backward(ctx, grad):
    x, weight = ctx.saved_tensors
    grad = grad * ctx.factors[0] * (-1 if ctx.negate else 1)
    return 3 * x**2 * weight * grad, (x**3 * grad).sum(0), None, None


cube.register_autograd(backward, setup_context=setup)
"""
HELPERS = "def scale(x, factor):\n    return x * factor\n"
NET = """
from cubes import cube

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 4)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return cube(self.linear(x), self.weight, [0.5], negate=True)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Block(5), Block(4), nn.Linear(4, 1)

    def forward(self, x):
        x = torch.ops.ppc_tests.cube(self.a(x), self.a.weight, [2.0])
        return self.c(self.b(x))

def build():
    return Net()
"""


def job(folder, cubes=CUBE, code=NET, stages=1, **parallel):
    (folder / "cubes.py").write_text(cubes)
    (folder / "helpers.py").write_text(HELPERS)
    return make_spec(
        folder,
        code,
        cluster={"devices_per_node": stages},
        parallel={"pipeline": stages, "microbatches": 2} | parallel,
    )


def test_it_stays_whole_and_is_called_as_the_user_calls_it(tmp_path):
    emitted = emit(job(tmp_path))
    targets = [op.target for op in emitted.job.graph.ops]
    assert targets.count("ppc_tests.cube.default") == 3
    script = emitted.script()
    assert "import cubes  # noqa: F401  # registers torch.ops.ppc_tests.cube\n" in script
    assert "Needs PyTorch and cubes.py, beside it." in " ".join(script.split())
    assert "torch.ops.ppc_tests.cube(self.linear(x), self.weight, (0.5,), negate=True)" in script
    assert "torch.ops.ppc_tests.cube(self.a(x), self.a.weight, (2.0,))" in script


def test_the_module_lies_beside_the_scripts_that_import_it(tmp_path):
    """With what it imports from its folder; a stage without the operation imports nothing."""
    code = NET.replace("self.c(self.b(x))", "self.c(x)")
    spec = job(tmp_path, code=code, stages=2, cuts=["c"])
    files = {file.path: file.text for file in compile(spec)}
    assert files["cubes.py"] == CUBE
    assert files["helpers.py"] == HELPERS
    importing = [name for name in ("rank0.py", "rank1.py") if "import cubes" in files[name]]
    assert importing == ["rank0.py"]
    assert "Needs PyTorch alone." in " ".join(files["rank1.py"].split())
    nodes = [n for n in ast.walk(ast.parse(files["rank0.py"])) if isinstance(n, ast.Import)]
    modules = {alias.name.partition(".")[0] for node in nodes for alias in node.names}
    assert modules - sys.stdlib_module_names == {"torch", "cubes"}


@pytest.mark.dist
def test_a_spec_named_from_the_folder_above(tmp_path, monkeypatch):
    (tmp_path / "jobs").mkdir()
    spec = job(tmp_path / "jobs", stages=2, cuts=["b"])
    monkeypatch.chdir(tmp_path)
    files = {file.path: file.text for file in compile(load(Path("jobs") / spec.path.name))}
    assert files["cubes.py"] == CUBE


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_parity_over_two_stages(tmp_path, fork_server, schedule):
    spec = job(tmp_path, stages=2, schedule=schedule, cuts=["b"])
    prove(spec, fork_server, steps=3)
    scripts = [file.text for file in compile(spec) if file.path.startswith("rank")]
    assert ["import cubes" in script for script in scripts] == [True, True]


def test_an_edit_counts_and_nothing_else_registers_anew(tmp_path, fork_server):
    """Torch has one operation of a name: models that are built twice call the same one."""
    spec = job(tmp_path)
    before = {file.path: file.text for file in compile(spec)}
    first = sys.modules["cubes"]
    compile(spec)
    assert sys.modules["cubes"] is first
    (tmp_path / "cubes.py").write_text(CUBE.replace("x**3 * weight", "x**3 * weight * 1.0"))
    after = {file.path: file.text for file in compile(spec)}
    assert sys.modules["cubes"] is not first
    assert after["cubes.py"] != before["cubes.py"]
    other = tmp_path / "other"
    other.mkdir()
    prove(job(other, stages=2), fork_server, steps=2)
    assert sys.modules["cubes"].__file__ == str(other / "cubes.py")


def refusal(spec):
    with pytest.raises(CaptureError) as raised:
        lower(spec, spec.folder / "out")
    return raised.value


def test_without_a_fake_it_is_refused(tmp_path):
    cubes = CUBE.replace("@cube.register_fake", "")
    error = refusal(job(tmp_path, cubes))
    assert "no fake impl registered for <CustomOpDef(ppc_tests::cube)>" in error.message
    assert error.where.file.endswith("net.py")
    assert "its register_fake" in error.hint


def test_without_a_backward_it_is_refused_where_a_gradient_is_needed(tmp_path):
    cubes, _, _ = CUBE.partition("cube.register_autograd")
    error = refusal(job(tmp_path, cubes))
    assert error.message.startswith("ppc_tests::cube has no backward, and what it reads needs a")
    assert error.where.file.endswith("cubes.py")
    assert "cube.register_autograd" in error.hint
    code = NET.replace("self.c(self.b(x))", "self.c(self.a.linear(x[:, :1].expand(-1, 5)))")
    code = code.replace("x = torch.ops", "x = self.a.linear(x)\n        x = torch.ops")
    code = code.replace("self.a(x), self.a.weight", "x.detach(), self.a.weight.detach()")
    compile(job(tmp_path, cubes, code))


def test_one_that_writes_is_refused(tmp_path):
    cubes = CUBE.partition("@cube.register_fake")[0].replace("args=()", 'args=("x",)')
    cubes += "\n\n@cube.register_fake\ndef _(x, weight, factors, negate=False):\n    return x + 1\n"
    error = refusal(job(tmp_path, cubes))
    assert error.message.startswith("ppc_tests::cube writes its arguments")


def test_one_in_the_model_file_is_refused(tmp_path):
    error = refusal(job(tmp_path, code=CUBE + NET.replace("from cubes import cube", "")))
    assert error.message == "net.py registers the operation ppc_tests::cube beside other things"
    assert "a file of its own" in error.hint


def test_one_from_elsewhere_is_refused(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "cubes.py").write_text(CUBE)
    error = refusal(job(tmp_path, code=NET.replace("from cubes", "from package.cubes")))
    assert error.message.startswith("ppc_tests.cube.default in a is an operation of ppc_tests's")


def test_a_name_of_torchs_in_another_namespace_means_nothing(tmp_path):
    """An operation called `dropout`, `view` or `copy` is still the user's."""
    for name in ("view", "dropout", "copy", "lstm", "split", "add"):
        folder = tmp_path / name
        folder.mkdir()
        cubes = CUBE.replace("::cube", f"::{name}")
        code = NET.replace("ppc_tests.cube", f"ppc_tests.{name}")
        emitted = emit(job(folder, cubes, code))
        assert emitted.script().count(f"torch.ops.ppc_tests.{name}(") == 2


def test_large_models_are_compared_by_operations(tmp_path, monkeypatch):
    """Theirs among them, whatever it is called."""
    for module in ("capture", "text"):
        monkeypatch.setattr(f"ppc.check.{module}.is_comparable", lambda *_: False)
    cubes, code = (text.replace("cube", "clone") for text in (CUBE, NET.replace("cubes", "twins")))
    (tmp_path / "twins.py").write_text(cubes)
    emitted = emit(job(tmp_path, code=code))
    wrong = emitted.script().replace("self.a.weight, (2.0,)", "self.a.weight, (3.0,)")
    assert wrong != emitted.script()
    with pytest.raises(InternalError, match="clone"):
        check_text(emitted.spec, emitted.job.graph, emitted.job.units, [wrong], 2)
