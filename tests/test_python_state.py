"""What forward keeps in Python, or draws outside torch, is refused where a script would bake it in,
and a capture leaves no trace of itself."""

import os
import random
from pathlib import Path

import pytest
import torch
from jobs import make_spec, prove
from nets import net

from ppc.errors import CaptureError, Complaints
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
    assert line == step


classes = """
import itertools, os, threading
from dataclasses import dataclass
from types import SimpleNamespace
import helper

@dataclass
class Config:
    n: int = 0

class Slots:
    __slots__ = ("n",)

    def __init__(self): self.n = 0

    def step(self):
        self.n += 1
        return self.n

class Base(nn.Module):
    calls = 0

class Calls:
    calls = 0

CONFIG, COUNT = Config(), 0

def closure():
    n = 0
    def step():
        nonlocal n
        n += 1
        return n
    return step

def attribute():
    attribute.n += 1
    return attribute.n

attribute.n = 0

def default(seen=[]):
    seen.append(1)
    return len(seen)

def forever():
    n = 0
    while True:
        n += 1
        yield n

class Hook:
    n = 0

    def __call__(self, *_):
        self.n += 1

class Kind(dict):
    n = 0

STEP, FOREVER, LOCAL = closure(), forever(), threading.local()
"""
# What the factory makes, what forward does, whose number then changes, and the line.
deep = {
    "a global": ("", "global COUNT\nCOUNT += 1\nn = COUNT", "COUNT of net.py", "COUNT += 1"),
    "a namespace": ("self.c = SimpleNamespace(n=0)", "self.c.n += 1\nn = self.c.n", "c.n of Net",
                    ""),
    "in a dict": ("self.c = {1: [Slots()]}", "n = self.c[1][0].step()", "c[1][0].n of Net",
                  "self.n += 1"),
    "a global's": ("", "CONFIG.n += 1\nn = CONFIG.n", "CONFIG.n of net.py", ""),
    "a method": ("self.c = Slots().step", "n = self.c()", "c.n of Net", "self.n += 1"),
    "a closure": ("self.c = closure()", "n = self.c()", "n of the function step", "n += 1"),
    "a global closure": ("", "n = STEP()", "n of the function step", "n += 1"),
    "a function's": ("", "n = attribute()", "n of the function attribute", "attribute.n += 1"),
    "a default": ("", "n = default()", "seen of the function default", "seen.append(1)"),
    "a class": ("", "Calls.calls += 1\nn = Calls.calls", "calls of the class Calls", ""),
    "its own class": ("", "type(self).calls += 1\nn = self.calls", "calls of the class Net", ""),
    "another file": ("", "n = helper.step()", "n of helper.py", "n += 1"),
    "itertools": ("self.c = itertools.count()", "n = next(self.c)", "c of Net", ""),
    "an iterator": ("self.c = iter([*range(99)])", "n = next(self.c)", "c of Net", ""),
    "a cycle": ("self.c = itertools.cycle([3, 4])", "n = next(self.c)", "c of Net", ""),
    "a generator": ("", "n = next(FOREVER)", "FOREVER of net.py", ""),
    "numpy": ("self.c = np.zeros(2)", "self.c[0] += 1\nn = int(self.c[0])", "c of Net", ""),
    "a hook": ("def count(*_): CONFIG.n += 1\nself.a.register_forward_hook(count)", "n = CONFIG.n",
               "CONFIG.n of net.py", "def count(*_): CONFIG.n += 1"),
    "a hook's own": ("self.a.register_forward_hook(Hook())", "n = self.a.weight.ndim",
                     "n of a", "self.n += 1"),
    "a thread's": ("LOCAL.n = 0", "LOCAL.n += 1\nn = LOCAL.n", "LOCAL.n of net.py", ""),
    "of a dict's kind": ("self.c = Kind()", "self.c.n += 1\nn = self.c.n", "c.n of Net", ""),
    "the environment": ("", "n = int(os.environ.get('N', 0)) + 1\nos.environ['N'] = str(n)",
                        "N of os.environ", "os.environ['N'] = str(n)"),
}  # fmt: skip


@pytest.mark.parametrize(("init", "step", "whose", "line"), deep.values(), ids=deep)
def test_a_count_that_tells_late(init, step, whose, line, tmp_path):
    """All steps of a trace are alike; the model's hundredth step is another. It lies where no
    module's own attribute is."""
    (tmp_path / "helper.py").write_text(
        "n = 0\ndef step():\n    global n\n    n += 1\n    return n\n"
    )
    late = f"{step}\nif n > 100:\n    x = 2 * x\nreturn self.b(self.a(x))"
    code = net(late, init, before=imports + classes).replace("Net(nn.Module)", "Net(Base)")
    code = code.replace("class Net(Base):", "class Net(Base):\n    calls = 0")
    message, found = refusal(tmp_path, code)
    assert message.startswith(f"forward changes {whose}, a Python value")
    assert found == (line or step.splitlines()[0])
    assert "N" not in os.environ


far = "self.c = SimpleNamespace(n=torch.zeros(()), t={'n': torch.zeros(())})"
tensors = {
    "an object's": ("self.c.n = self.c.n + 1\nn = self.c.n", "c.n of Net"),
    "in a dict": ("self.c.t['n'] = self.c.t['n'] + 1\nn = self.c.t['n']", "c.t['n'] of Net"),
}


@pytest.mark.parametrize(("step", "whose"), tensors.values(), ids=tensors)
def test_a_tensor_that_no_module_keeps(step, whose, tmp_path):
    (tmp_path / "helper.py").touch()
    late = f"{step}\nx = x * torch.where(n > 100, 2.0, 1.0)\nreturn self.b(self.a(x))"
    message, line = refusal(tmp_path, net(late, far, before=imports + classes))
    assert message.startswith(f"{whose} is a tensor that each call computes from the last one's")
    assert line == "def forward(self, x):"


def test_every_count_is_named(tmp_path):
    step = "self.n += 1\nself.c.n += 1\nreturn self.b(self.a(x))"
    code = net(step, "self.n, self.c = 0, Slots()", before=imports + classes)
    (tmp_path / "helper.py").touch()
    with pytest.raises(Complaints) as raised:
        capture(make_spec(tmp_path, code))
    messages = [error.message.partition(",")[0] for error in raised.value.errors]
    assert messages == ["forward changes n of Net", "forward changes c.n of Net"]


LOSS = """
import functools
import torch
from torch import nn

step = 0

def counting(out, y):
    global step
    step += 1
    return (out - y).square().mean() * (2 if step > 100 else 1)

def run(state, out, y):
    state["n"] += 1
    return (out - y).square().mean() * (2 if state["n"] > 100 else 1)

partial = functools.partial(run, {"n": 0})

class Loss(nn.Module):
    n = 0

    def forward(self, out, y):
        self.n += 1
        return (out - y).square().mean() * (2 if self.n > 100 else 1)

module = Loss()
"""
losses = {
    "counting": ("step of losses.py", "step += 1"),
    "partial": ("args of the loss", 'state["n"] += 1'),
    "module": ("n of the loss", "self.n += 1"),
}


@pytest.mark.parametrize(
    ("name", "whose", "line"), [(k, *v) for k, v in losses.items()], ids=losses
)
def test_a_loss_that_counts(name, whose, line, tmp_path):
    (tmp_path / "losses.py").write_text(LOSS)
    with pytest.raises(CaptureError) as raised:
        capture(make_spec(tmp_path, net(), model={"loss": f"losses.py:{name}"}))
    error = raised.value
    assert error.message.startswith(f"the loss changes {whose}, a Python value")
    assert Path(error.where.file).read_text().splitlines()[error.where.line - 1].strip() == line


BUFFER = 'self.register_buffer("n", torch.tensor(0))'
remedies = {
    "a buffer": (
        net(
            "self.n += 1\nx = x * torch.where(self.n > 3, 2.0, 1.0)\nreturn self.b(self.a(x))",
            BUFFER,
        ),
        {},
    ),
    "handed to the loss": (
        net(
            "out = self.b(self.a(x))\nself.n += 1\nreturn out, self.n.clone()", BUFFER,
            before="def loss(out, y):\n    out, n = out\n"
            "    return (out - y).square().mean() * torch.where(n > 3, 2.0, 1.0)\n",
        ),
        {"loss": "net.py:loss"},
    ),
    "the loss in the model": (
        net(
            "loss = (self.b(self.a(x)) - y).square().mean()\nself.n += 1\n"
            "return loss * torch.where(self.n > 3, 2.0, 1.0)", BUFFER, args="x, y",
        ),
        {"loss": "output"},
    ),
}  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize(("code", "model"), remedies.values(), ids=remedies)
def test_the_remedies(code, model, tmp_path, fork_server):
    spec = make_spec(
        tmp_path, code, model=model, cluster={"devices_per_node": 2},
        parallel={"pipeline": 2, "cuts": ["b"]},
    )  # fmt: skip
    prove(spec, fork_server, steps=3)


changing = {
    "the clock": "x = x * time.time()",
    "the system": "x = x * os.urandom(1)[0] + os.urandom(2)[1]",
    "its own generator": "x = x * random.SystemRandom().random()",
}


@pytest.mark.parametrize("step", changing.values(), ids=changing)
def test_what_no_two_traces_agree_on(step, tmp_path):
    code = net(f"{step}\nreturn self.b(self.a(x))", before=f"{imports}import os, time\n")
    message, line = refusal(tmp_path, code)
    assert message == (
        "the model computes something else each time it runs: aten.mul.Tensor gets other arguments"
    )
    assert line == step


def test_a_loss_of_the_clock(tmp_path):
    code = net(before="import time\ndef loss(out, y):\n    return (out - y).mean() * time.time()\n")
    with pytest.raises(CaptureError, match="something else each time it runs") as raised:
        capture(make_spec(tmp_path, code, model={"loss": "net.py:loss"}))
    assert raised.value.where.file.endswith("net.py")


harmless = {
    "the last shape": ("self.n = None", "self.n = x.shape"),
    "computed once": ("self.n = 0", "self.n = self.n or 3\nx = x * self.n"),
    "a lazy tensor": ("", "self.n = getattr(self, 'n', torch.arange(5.0))\nx = x + self.n"),
    "a cached table": ("", "x = x + table(5)"),
    "a table cached in the factory": ("table(5)", "x = x + table(5)"),
    "a cache of the file": ("", "x = x + CACHE.setdefault(5, torch.ones(5))"),
    "a registry": ("", "helped.last = SimpleNamespace(shape=x.shape)"),
    "what the loss reads": (
        "self.c = SimpleNamespace(n=torch.ones(5))", "self.c.n = 2 * x\nx = x + self.c.n"
    ),
    "a closed cache": ("self.n = cache()", "x = x * self.n(2)"),
}  # fmt: skip


helped = """
from types import SimpleNamespace

def cache():
    known = {}
    return lambda n: known.setdefault(n, n + 1)

def helped(): pass
"""


@pytest.mark.parametrize(("init", "step"), harmless.values(), ids=harmless)
def test_what_is_computed_once(init, step, tmp_path):
    table = "@functools.cache\ndef table(n):\n    return torch.arange(1.0 * n)\n"
    before = f"{imports}{helped}CACHE = {{}}\n{table}"
    capture(make_spec(tmp_path, net(f"{step}\nreturn self.b(self.a(x))", init, before=before)))


HELD = """
def holder():
    n = 0
    def held(value):
        nonlocal n
        n = value
    return held

held = holder()
"""


def test_all_is_as_before(tmp_path):
    step = """
self.n, self.k = 3, torch.ones(5)
self.seen[:] = [x]
self.far["in"].clear()
self.far["in"].append(x)
self.c.n, self.c.k = 4, x
self.slots.n = 5
self.array[0] = 6
held(7)
Net.calls = 8
x = x + self.k
return self.b(self.a(x))"""
    init = """
self.n, self.seen, self.far, self.array = 1, [], {"in": deque()}, np.zeros(2)
self.c, self.slots, self.held = SimpleNamespace(n=2), Slots(), held"""
    before = f"{imports}{classes}from collections import deque\n{HELD}"
    spec = make_spec(tmp_path, net(step, init, before=before))
    (tmp_path / "helper.py").touch()
    built, fields = build_fake(spec), read_fields(spec)
    training = make_training(spec, built.model, bind(spec, built.model, fields))
    before = (random.getstate(), numpy_state(), torch.random.initial_seed())
    export(training, built, fields, 3)
    model = built.model
    assert (model.n, model.seen, hasattr(model, "k"), hasattr(type(model), "calls")) == (
        1, [], False, False,
    )  # fmt: skip
    assert (vars(model.c), model.slots.n, [*model.array]) == ({"n": 2}, 0, [0, 0])
    assert ([*model.far["in"]], model.held.__closure__[0].cell_contents) == ([], 0)
    assert before == (random.getstate(), numpy_state(), torch.random.initial_seed())
