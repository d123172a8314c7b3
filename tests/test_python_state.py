"""What forward keeps in Python, or draws outside torch, is refused where a script would bake it in,
and a capture leaves no trace of itself."""

import random
from pathlib import Path

import pytest
import torch
from jobs import make_spec
from nets import net

from ppc.errors import CaptureError
from ppc.frontend.capture.build import build_fake
from ppc.frontend.capture.capture import capture
from ppc.frontend.capture.export import export
from ppc.frontend.capture.fields import bind, read_fields
from ppc.frontend.capture.python_state import numpy_state
from ppc.frontend.capture.training import make_training

pytestmark = pytest.mark.torch

imports = "import functools, random\nfrom random import random as chance\nimport numpy as np\n"


def refusal(folder, code):
    with pytest.raises(CaptureError) as raised:
        capture(make_spec(folder, code))
    error = raised.value
    line = Path(error.where.file).read_text().splitlines()[error.where.line - 1]
    return error.message, line.strip()


drawn = {
    "random": ("if random.random() < 2:\n    x = x * 2", "draws from Python's random"),
    "by name": ("x = x * chance()", "draws from Python's random"),
    "numpy": ("x = x * np.random.rand()", "draws from numpy.random"),
    "seeded": ("torch.manual_seed(3)\nx = x + torch.randn(5)", "seeds torch's generator"),
}


@pytest.mark.parametrize(("step", "what"), drawn.values(), ids=drawn)
def test_draws(step, what, tmp_path):
    code = net(f"{step}\nreturn self.b(self.a(x))", before=imports)
    message, line = refusal(tmp_path, code)
    assert message.startswith(f"forward of Net {what}: ")
    assert line == "def forward(self, x):"


def test_the_module_that_draws(tmp_path):
    inner = "class Noise(nn.Module):\n    def forward(self, h): return h * random.random()\n"
    code = net("return self.b(self.m(self.a(x)))", "self.m = Noise()", before=imports + inner)
    message, line = refusal(tmp_path, code)
    assert message.startswith("forward of Noise draws from Python's random")
    assert line.startswith("def forward(self, h)")


def test_a_loss_that_draws(tmp_path):
    code = net(before=f"{imports}def loss(out, y):\n    return (out - y).mean() * chance()\n")
    with pytest.raises(CaptureError, match=r"job\.yaml:.*: the loss draws from Python's random"):
        capture(make_spec(tmp_path, code, model={"loss": "net.py:loss"}))


kept = {
    "a count": ("self.n = 0", "self.n += 1", "n"),
    "a new count": ("", "self.n = getattr(self, 'n', 0) + 1", "n"),
    "a flag": ("self.n = False", "self.n = not self.n", "n"),
    "a list": ("self.n = []", "self.n.append(len(self.n))", "n"),
    "in a dict": ("self.n = {'steps': 0}", "self.n['steps'] += 1", "n"),
    "a generator": ("self.n = random.Random(0)", "x = x * self.n.random()", "n"),
    "numpy's": ("self.n = np.random.default_rng(0)", "x = x * self.n.random()", "n"),
}  # fmt: skip


@pytest.mark.parametrize(("init", "step", "name"), kept.values(), ids=kept)
def test_values_that_forward_keeps(init, step, name, tmp_path):
    code = net(f"{step}\nreturn self.b(self.a(x))", init, before=imports)
    message, line = refusal(tmp_path, code)
    assert message.startswith(f"forward changes {name} of Net, a Python value")
    assert line == "def forward(self, x):"


def test_a_count_of_the_file(tmp_path):
    code = net("global steps\nsteps += 1\nreturn self.b(self.a(x))", before="steps = 0")
    with pytest.raises(CaptureError, match=r"forward changes steps of net_\w+, a Python value"):
        capture(make_spec(tmp_path, code))


harmless = {
    "the last shape": ("self.n = None", "self.n = x.shape"),
    "computed once": ("self.n = 0", "self.n = self.n or 3\nx = x * self.n"),
    "a lazy tensor": ("", "self.n = getattr(self, 'n', torch.arange(5.0))\nx = x + self.n"),
    "a cached table": ("", "x = x + table(5)"),
    "a table cached in the factory": ("table(5)", "x = x + table(5)"),
    "a cache of the file": ("", "x = x + CACHE.setdefault(5, torch.ones(5))"),
}  # fmt: skip


@pytest.mark.parametrize(("init", "step"), harmless.values(), ids=harmless)
def test_what_is_computed_once(init, step, tmp_path):
    table = "@functools.cache\ndef table(n):\n    return torch.arange(1.0 * n)\n"
    before = f"{imports}CACHE = {{}}\n{table}"
    capture(make_spec(tmp_path, net(f"{step}\nreturn self.b(self.a(x))", init, before=before)))


def test_all_is_as_before(tmp_path):
    step = "self.n, self.k = 3, torch.ones(5)\nself.seen[:] = [x]\nx = x + self.k"
    spec = make_spec(
        tmp_path, net(f"{step}\nreturn self.b(self.a(x))", "self.n, self.seen = 1, []")
    )
    built, fields = build_fake(spec), read_fields(spec)
    training = make_training(spec, built.model, bind(spec, built.model, fields))
    before = (random.getstate(), numpy_state(), torch.random.initial_seed())
    export(training, built, fields, 3)
    assert (built.model.n, built.model.seen, hasattr(built.model, "k")) == (1, [], False)
    assert before == (random.getstate(), numpy_state(), torch.random.initial_seed())
