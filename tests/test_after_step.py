"""What the user runs after each step of the optimizer."""

import pytest
from emitted import emit
from jobs import failed, make_spec, plant, prove, vary
from nets import net

from ppc.errors import PpcError
from ppc.pipeline import compile
from ppc.run import verify as module
from ppc.run.verify import verify

pytestmark = pytest.mark.torch

CLAMP = """
from bounds import BOUND


def clamp(module):
    for parameter in module.parameters():
        parameter.clamp_(-BOUND, BOUND)
"""

# Two stages that hold one tensor, and a frozen layer.
TIED = net(
    "h = self.a(x)\nreturn self.b(self.c(h)) + self.d(h)",
    "self.c, self.d = nn.Linear(8, 8), nn.Linear(8, 1)\nself.d.weight = self.b.weight\n"
    "self.c.requires_grad_(False)",
)


def job(folder, code=TIED, clamp=CLAMP, *, stages=1, train=None, **parallel):
    (folder / "own").mkdir(exist_ok=True)
    (folder / "own" / "bounds.py").write_text("BOUND = 0.1\n")
    (folder / "own" / "latent.py").write_text(clamp)
    return make_spec(
        folder,
        code,
        train={"after_step": "own/latent.py:clamp"} | (train or {}),
        cluster={"devices_per_node": stages * parallel.get("data", 1)},
        parallel={"pipeline": stages, "microbatches": 2} | parallel,
    )


@pytest.mark.dist
@pytest.mark.parametrize("parallel", [{"cuts": ["b"]}, {"cuts": ["b"], "data": 2}], ids=str)
def test_parity(tmp_path, fork_server, parallel):
    """Copies of a parameter, on other stages and in replicas, stay equal."""
    spec = job(tmp_path, stages=2, **parallel, microbatches=1)
    found = prove(spec, fork_server, steps=2)
    assert found.ok


COUNTING = """
step, seen = 0, {"bounds": []}


def clamp(module):
    global step
    step += 1
    seen["bounds"].append(0.3 / step)
    for parameter in module.parameters():
        parameter.clamp_(-seen["bounds"][-1], seen["bounds"][-1])
"""


@pytest.mark.dist
def test_parity_of_one_that_counts_steps(tmp_path, fork_server):
    """Each rank calls it once a step, as one process does."""
    spec = job(tmp_path, clamp=COUNTING, stages=2, cuts=["b"])
    prove(spec, fork_server, steps=3)


@pytest.mark.dist
def test_parity_in_single_precision(tmp_path, fork_server):
    """Where the user's model takes each step from the scripts' weights."""
    prove(job(tmp_path, train={"clip_norm": 1.0}), fork_server, steps=3, exact=False)


@pytest.mark.dist
def test_a_stage_that_leaves_it_out_is_found(tmp_path, fork_server, monkeypatch):
    spec = job(tmp_path, stages=2, cuts=["b"])
    write = module.write

    def spoil(files, folder):
        write(files, folder)
        plant(folder / "rank1.py", "after_step(stage)", "stage.b.bias.clamp_(-0.1, 0.1)")

    monkeypatch.setattr(module, "write", spoil)
    found = verify(spec.path, steps=2, exact=True, timeout_s=60, fork_server=fork_server)
    assert ("parameter", 1) in failed(found)


def test_the_scripts_import_it(tmp_path):
    files = {f.path: str(f.text) for f in compile(job(tmp_path, stages=2, cuts=["b"]))}
    assert files["latent.py"] == CLAMP
    assert files["bounds.py"] == "BOUND = 0.1\n"
    lines = """
    optimizer.step()
    with torch.no_grad():
        after_step(stage)
    optimizer.zero_grad("""
    for rank in (0, 1):
        assert "\nfrom latent import clamp as after_step\n" in files[f"rank{rank}.py"]
        assert lines in files[f"rank{rank}.py"]


def test_a_stage_without_an_optimizer_runs_it_too(tmp_path):
    """Frozen parameters are changed as in the whole model."""
    code = net(init="self.a.requires_grad_(False)")
    script = emit(job(tmp_path, code, stages=2, cuts=["b"])).script(0)
    assert "optimizer" not in script
    assert "    with torch.no_grad():\n        after_step(stage)\n" in script


alone = (
    "change each parameter by itself: a stage has a part of them, in classes of the script's own"
)
refused = {
    "the model's classes": (
        (
            "import torch.nn as nn\n\n\ndef clamp(module):\n    for m in module.modules():\n"
            "        if type(m).__name__ == 'Net':\n            m.a.weight.clamp_(-0.1, 0.1)\n"
        ),
        (
            "own/latent.py:clamp does something else to a.weight of stage 0 than to that of the "
            "whole model"
        ),
        alone,
    ),
    "all at once": (
        (
            "def clamp(module):\n    total = sum(p.abs().sum() for p in module.parameters())\n"
            "    for p in module.parameters():\n        p.div_(total)\n"
        ),
        (
            "own/latent.py:clamp does something else to a.weight of stage 0 than to that of the "
            "whole model"
        ),
        alone,
    ),
    "a path": (
        "def clamp(module):\n    module.b.weight.clamp_(-0.1, 0.1)\n",
        (
            "own/latent.py:clamp failed on stage 0: "
            "AttributeError: 'Stage' object has no attribute 'b'"
        ),
        None,
    ),
    "another tensor": (
        (
            "import torch.nn as nn\n\n\ndef clamp(module):\n"
            "    for m in module.modules():\n        if isinstance(m, nn.Linear):\n"
            "            m.weight = nn.Parameter(m.weight.clamp(-0.1, 0.1))\n"
        ),
        "own/latent.py:clamp puts another tensor in the place of a.weight",
        "parameter.copy_(...), and other methods that end with _",
    ),
    "a buffer": (
        "def clamp(module):\n    for b in module.buffers():\n        b.zero_()\n",
        "own/latent.py:clamp changes the buffer n",
        "leave buffers alone: replicas have their own",
    ),
    "random": (
        (
            "import torch\n\n\ndef clamp(module):\n    for p in module.parameters():\n"
            "        p.add_(torch.randn_like(p))\n"
        ),
        "own/latent.py:clamp draws random numbers, which differ on every rank",
        None,
    ),
    "Python's random": (
        (
            "import random\n\n\ndef clamp(module):\n    for p in module.parameters():\n"
            "        p.mul_(random.random())\n"
        ),
        "own/latent.py:clamp draws random numbers, which differ on every rank",
        None,
    ),
    "no function": (
        "clamp = 3\n",
        "own/latent.py:clamp is not callable",
        "name a function of a module",
    ),
}


@pytest.mark.parametrize(("clamp", "message", "hint"), refused.values(), ids=refused)
def test_refusals(tmp_path, monkeypatch, clamp, message, hint):
    monkeypatch.chdir(tmp_path)
    code = net("return self.b(self.a(x) * self.n)", 'self.register_buffer("n", torch.ones(8))')
    with pytest.raises(PpcError) as raised:
        compile(job(tmp_path, code, clamp, stages=2, cuts=["b"]), tmp_path / "out")
    assert raised.value.message == message
    assert raised.value.hint == hint


def test_a_large_model_is_tried_without_values(tmp_path, monkeypatch):
    monkeypatch.setattr("ppc.check.after.is_small", lambda *_: False)
    compile(job(tmp_path, stages=2, cuts=["b"]), tmp_path / "out")
    number = CLAMP.replace("BOUND)", "float(parameter.abs().max()) / 2)")
    compile(job(tmp_path, clamp=number, stages=2, cuts=["b"]), tmp_path / "out")
    path = "def clamp(module):\n    module.b.weight.clamp_(-0.1, 0.1)\n"
    with pytest.raises(PpcError, match="failed on stage 0: AttributeError"):
        compile(job(tmp_path, clamp=path, stages=2, cuts=["b"]), tmp_path / "out")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "args"),
    [
        pytest.param("spiking", {"width": 4, "steps": 2}, marks=pytest.mark.slow),
        ("binary", {"width": 4}),
    ],
)
def test_small_workloads(tmp_path, fork_server, name, args):
    """A surrogate gradient, and signs whose latent weights are clamped, over stages and data."""
    parallel = {"pipeline": 2, "data": 2, "microbatches": 2}
    spec = vary(tmp_path, name, args, train={"global_batch": 8}, parallel=parallel)
    prove(spec, fork_server, steps=2)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"pipeline": 2}, {"pipeline": 1, "data": 2}], ids=str)
@pytest.mark.parametrize("name", ["spiking", "binary"])
def test_workloads(tmp_path, fork_server, name, parallel):
    prove(vary(tmp_path, name, parallel=parallel), fork_server, steps=3)
