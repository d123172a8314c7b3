"""What the scripts import is as its file says: a factory that changes a class, a global or a
function which a leaf, an autograd function or an operation reads is refused."""

from pathlib import Path

import pytest
import torch
from jobs import make_spec
from nets import net

from ppc.errors import CaptureError
from ppc.frontend.capture.capture import capture
from ppc.pipeline import lower

pytestmark = pytest.mark.torch

PICK = """
import factors
import torch
from factors import half
from torch import nn

FACTOR, TABLE, MADE = 2.0, {"k": 1.0}, {}
other = lambda x: -x


class Config:
    def __init__(self):
        self.power = 1


CONFIG = Config()


def double(x):
    return FACTOR * x**CONFIG.power


class Base(nn.Module):
    gain = 1.0


class Pick(Base):
    bias = 0.0

    def __init__(self, width, bias=0.0):
        super().__init__()
        self.up = nn.Linear(width, width)
        self.own = bias
        MADE.setdefault(width, len(MADE))

    def forward(self, x):
        rows = (x[:, 0] > MADE[x.shape[1]]).nonzero().squeeze(1)
        made = half(double(self.up(x[rows]))) * self.gain + self.bias + self.own
        made = torch.nn.functional.gelu(made) * TABLE["k"] + factors.third(made)
        return x.index_add(0, rows, made)
"""
FACTORS = "SHARE = 2\ndef half(x):\n    return x / SHARE\ndef third(x):\n    return x / 3\n"
before = "import factors, pick\nfrom pick import Pick\nfrom torch.nn import functional as F\n"


def job(folder, change, leaf="Pick(4)"):
    (folder / "pick.py").write_text(PICK)
    (folder / "factors.py").write_text(FACTORS)
    layers = f"self.p, self.q, self.c = {leaf}, Pick(8), nn.Linear(8, 4)"
    code = net(
        "return self.b(self.q(self.a(x))) + self.p(self.c(self.a(x))).sum(1, True)",
        layers,
        before=before,
    )
    return make_spec(
        folder,
        code.replace("return Net()", f"{change}\n    return Net()"),
        model={"leaf": ["Pick"]},
    )


changes = {
    "a class": ("Pick.bias = 1.0", "Pick.bias"),
    "its base": ("pick.Base.gain = 3.0", "Base.gain"),
    "a method": ("Pick.forward = lambda self, x: self.up(x)", "Pick.forward"),
    "a number": ("pick.FACTOR = 3.0", "pick.FACTOR"),
    "in a dict": ("pick.TABLE['k'] = 2.0", "pick.TABLE"),
    "an object's": ("pick.CONFIG.power = 2", "pick.CONFIG.power"),
    "a function": ("pick.double = pick.other", "pick.double"),
    "an import": ("pick.half = pick.other", "pick.half"),
    "of a file that it imports": ("factors.SHARE = 4", "factors.SHARE"),
    "two": ("factors.SHARE = 4; factors.third = pick.other", "factors.SHARE, factors.third"),
    "torch's": ("F.gelu = pick.other", "torch.nn.functional.gelu"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "what"), changes.values(), ids=changes)
def test_a_leaf_whose_file_was_changed(change, what, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "gelu", torch.nn.functional.gelu)
    with pytest.raises(CaptureError) as raised:
        capture(job(tmp_path, change))
    assert raised.value.message == (
        f"the leaf p reads {what}, changed after pick.py was imported; a script imports the file "
        "as it is"
    )
    assert raised.value.hint.endswith("what the factory chooses is an argument of __init__")


harmless = {
    "nothing": ("pass", "Pick(4)"),
    "what no leaf reads": ("pick.UNREAD, factors.UNREAD = 1, 2", "Pick(4)"),
    "the remedy": ("pass", "Pick(4, bias=1.0)"),
}


@pytest.mark.parametrize(("change", "leaf"), harmless.values(), ids=harmless)
def test_a_leaf_that_reads_what_its_file_says(change, leaf, tmp_path):
    """Its constructor fills a dict of the file, as it does in every rank."""
    capture(job(tmp_path, change, leaf))


OWN = """
import torch

FACTOR, THING = {"k": 2.0}, object()

def scale(x):
    assert THING
    return x * FACTOR["k"]

def other(x):
    return 5 * x
"""
FUNCTION = f"""{OWN}
class Up(torch.autograd.Function):
    slope = 1.0

    @staticmethod
    def forward(ctx, x):
        return scale(x) * Up.slope

    @staticmethod
    def backward(ctx, grad):
        return grad * FACTOR["k"]

up = Up.apply
"""
OPERATION = f"""{OWN}
@torch.library.custom_op("fresh::up", mutates_args=())
def up(x: torch.Tensor) -> torch.Tensor:
    return scale(x)

@up.register_fake
def _(x):
    return torch.empty_like(x)

up.register_autograd(lambda ctx, grad: grad, setup_context=lambda ctx, inputs, output: None)
"""
read = {
    "a number": ("own.FACTOR['k'] = 3.0", "own.FACTOR"),
    "a function": ("own.scale = own.other", "own.scale"),
}


@pytest.mark.parametrize(("change", "what"), [*read.values(), ("own.Up.slope = 2.0", "Up.slope")])
def test_an_autograd_function_that_is_imported(change, what, tmp_path):
    refuse(tmp_path, FUNCTION, change, f"Up reads {what}, changed after own.py was imported")


@pytest.mark.parametrize(("change", "what"), read.values(), ids=read)
def test_an_operation(change, what, tmp_path):
    text = OPERATION.replace("fresh", f"fresh_{what[4:]}")
    name = f"fresh_{what[4:]}::up"
    refuse(tmp_path, text, change, f"{name} reads {what}, changed after own.py was imported")


late = """FACTOR['n'] = FACTOR.get('n', 0) + 1
        if FACTOR['n'] > 100:
            grad = 2 * grad"""


def test_a_backward_that_counts(tmp_path):
    """Which no trace runs."""
    text = FUNCTION.replace("return grad", f"{late}\n        return grad")
    counting(tmp_path, text, "Up changes FACTOR of own.py, a Python value: every rank has its own")


def test_an_operation_that_counts(tmp_path):
    text = OPERATION.replace("fresh", "fresh_count")
    text = text.replace("return scale", "FACTOR['n'] = FACTOR.get('n', 0) + 1\n    return scale")
    name = "fresh_count::up"
    counting(tmp_path, text, f"{name} changes FACTOR of own.py, a Python value: every rank has")


def counting(folder, text, message):
    (folder / "own.py").write_text(text)
    code = net("return self.b(own.up(self.a(x)))", before="import own")
    with pytest.raises(CaptureError) as raised:
        lower(make_spec(folder, code), folder / "out")
    assert raised.value.message.startswith(message)
    line = text.splitlines()[raised.value.where.line - 1].strip()
    assert line == "FACTOR['n'] = FACTOR.get('n', 0) + 1"


def refuse(folder, text, change, message):
    """Only after the change."""
    (folder / "own.py").write_text(text)
    code = net("return self.b(own.up(self.a(x)))", before="import own")
    capture(make_spec(folder, code))
    code = code.replace("return Net()", f"{change}\n    return Net()")
    with pytest.raises(CaptureError) as raised:
        capture(make_spec(folder, code))
    assert raised.value.message.startswith(message)
    lines = Path(raised.value.where.file).read_text().splitlines()
    assert lines[raised.value.where.line - 1].strip() == "return self.b(own.up(self.a(x)))"
