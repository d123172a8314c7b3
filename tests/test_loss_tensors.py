"""Losses that hold tensors: class weights, buffers of a module, globals of a function. The stage of
the loss has them; what they weigh counts as in one batch; what cannot be kept is refused."""

from pathlib import Path

import pytest
from jobs import make_spec, prove

from ppc.errors import CaptureError
from ppc.frontend.capture.capture import capture
from ppc.pipeline import compile, lower

pytestmark = pytest.mark.dist

NET = """
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(5, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.up(x)))


def build():
    return Net()


W = torch.tensor([0.1, 2.3, 0.7, 1.1])
TABLE = torch.linspace(0.5, 1.5, 40)


def weight(y):
    return W.to(y.device)[y].sum()


criterion = nn.CrossEntropyLoss(W)
even = nn.CrossEntropyLoss(torch.full((4,), 0.3))
each = nn.BCEWithLogitsLoss(pos_weight=W)


def function(output, y):
    return {"loss": F.cross_entropy(output, y, W), "table": (output.mean(1) * TABLE[y]).mean()}


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.randn(4))
        self.register_buffer("table", torch.linspace(0.0, 1.0, 40), persistent=False)
        self.scale = torch.tensor([0.5, 1.5, 1.0, 3.0])
        self.fixed = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, output, y):
        far = self.fixed(output - self.center).square().mean(1) * self.table[y]
        return far.mean() + F.cross_entropy(output * self.scale, y)


class Given(nn.Module):
    def __init__(self, weight):
        super().__init__()


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, output, y):
        return F.cross_entropy(output / self.temperature, y)


class State(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = 1
        self.register_buffer("center", torch.zeros(4))

    def forward(self, output, y):
        {step}
        return F.cross_entropy(output - self.center * self.steps, y)


class Whole(nn.Module):
    def __init__(self, criterion):
        super().__init__()
        self.net, self.criterion = Net(), criterion

    def forward(self, x, y):
        return self.criterion(self.net(x), y)


def whole_trained():
    return Whole(Trained())


def whole_state():
    return Whole(State())
"""
LABELS = {"dtype": "int64", "high": 4}
SHARES = {"shape": [4]}


def job(folder: Path, loss: str, weight: str = "samples", y: dict = LABELS, step="pass", **more):
    model = {"factory": "net.py:build", "loss": f"net.py:{loss}", "weight": weight}
    train = {"global_batch": 7, "steps": 3, "optimizer": {"name": "sgd", "lr": 0.1}}
    parallel = {"pipeline": 2, "data": 2, "microbatches": 3} | more.pop("parallel", {})
    return make_spec(
        folder,
        NET.replace("{step}", step),
        model=model | more.pop("model", {}),
        data={"source": "random", "samples": 20, "fields": {"x": {"shape": [5]}, "y": y}},
        train=train | more.pop("train", {}),
        cluster={"devices_per_node": parallel["pipeline"] * parallel["data"]},
        parallel=parallel,
    )


def last_stage(spec) -> str:
    return str(compile(spec)[spec.parallel.data * (spec.parallel.pipeline - 1)].text)


@pytest.mark.parametrize(
    ("loss", "weight", "y"),
    [
        ("criterion", "net.py:weight", LABELS),
        ("function", "net.py:weight", LABELS),
        ("even", "samples", LABELS),
        ("each", "samples", SHARES),
        ("Mixed", "samples", LABELS),
    ],
)
def test_the_training_is_the_users(tmp_path: Path, fork_server, loss, weight, y) -> None:
    """Over microbatches of one and of two samples and two replicas; and all 7 samples at once."""
    found = prove(job(tmp_path, loss, weight, y), fork_server)
    assert "whole" in {row.kind for row in found.rows} or loss == "function"  # whose table differs


def test_the_stage_of_the_loss_has_them(tmp_path: Path) -> None:
    text = last_stage(job(tmp_path, "criterion", "net.py:weight"))
    assert 'self.register_buffer("loss_weight", torch.empty(4), persistent=False)' in text
    assert "F.cross_entropy(head, y, self.loss_weight)" in text
    assert "torch.tensor([0.1, 2.3, 0.7, 1.1], dtype=torch.float32)" in text
    text = last_stage(job(tmp_path, "function", "net.py:weight"))
    assert "F.cross_entropy(head, y, self.W)" in text
    assert "self.TABLE[y]" in text


def test_large_ones_are_saved(tmp_path: Path) -> None:
    messages = lower(job(tmp_path, "function", "net.py:weight"), tmp_path).graph.messages
    assert any(m.startswith("the first values of TABLE are in") for m in messages)


def test_in_bfloat16_they_are_as_they_were(tmp_path: Path) -> None:
    """Where operations are listed, not computed."""
    train = {"precision": "bf16"}
    assert "self.loss_weight" in last_stage(
        job(tmp_path, "criterion", "net.py:weight", train=train)
    )


@pytest.mark.parametrize("loss", ["criterion", "function"])
@pytest.mark.parametrize("weight", ["samples", "tokens"])
def test_class_weights_want_a_weight(tmp_path: Path, loss: str, weight: str) -> None:
    with pytest.raises(CaptureError) as raised:
        capture(job(tmp_path, loss, weight))
    assert raised.value.message == (
        "cross_entropy with class weights divides by the sum of the weights in each microbatch, so "
        f"a mean over {weight} is not that of the global batch"
    )
    assert "def weight(labels): return W.to(labels.device)[labels].sum()" in raised.value.hint
    one = {"pipeline": 1, "data": 1, "microbatches": 1}
    capture(job(tmp_path, loss, weight, parallel=one))


def test_accepted_class_weights_are_told(tmp_path: Path) -> None:
    text = last_stage(job(tmp_path, "criterion", model={"coupled": "accept"}))
    assert "net.py:criterion couples samples, as the spec accepts" in " ".join(text.split())


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            "self.center = self.center * 0.9 + output.detach().mean(0)",
            "the loss changes its center",
        ),
        ("self.center.mul_(0.9).add_(output.detach().mean(0))", "the loss changes its loss_center"),
        ("self.steps += 1", "the loss changes steps of the loss, a Python value"),
    ],
)
def test_a_loss_keeps_nothing(tmp_path: Path, step: str, message: str) -> None:
    with pytest.raises(CaptureError) as raised:
        capture(job(tmp_path, "State", step=step))
    assert raised.value.message.startswith(message)
    place = raised.value.where
    line = Path(place.file).read_text().splitlines()[place.line - 1].strip()
    assert line in (step, "def forward(self, output, y):")
    if "center" in step:
        assert "returns what it gives: model: {loss: output}" in raised.value.hint


@pytest.mark.parametrize(
    ("loss", "message", "hint"),
    [
        ("Trained", "is a module with temperature to train, and only the model is", "loss: output"),
        ("Given", r"net.py:Given\(\) failed: TypeError", "criterion = nn.CrossEntropyLoss"),
    ],
)
def test_modules_that_are_no_loss(tmp_path: Path, loss: str, message: str, hint: str) -> None:
    with pytest.raises(CaptureError, match=message) as raised:
        capture(job(tmp_path, loss))
    assert hint in raised.value.hint


@pytest.mark.parametrize("factory", ["whole_trained", "whole_state"])
def test_what_the_hints_say(tmp_path: Path, fork_server, factory: str) -> None:
    """The model holds the loss, trains it, and keeps what it changes."""
    step = "self.center = self.center * 0.9 + 0.1"
    model = {"factory": f"net.py:{factory}", "loss": "output"}
    alone = {"data": 1, "microbatches": 2}
    prove(job(tmp_path, "", step=step, model=model, parallel=alone), fork_server)
