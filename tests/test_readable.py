"""What a reader meets in scripts and plans: a model that is an nn.Sequential, fields and metrics by
their own names, and what a step waits for."""

import pytest
from emitted import emit
from jobs import make_spec, prove

from ppc.emit.plan_text import percent
from ppc.pipeline import compile, plan

pytestmark = pytest.mark.torch

CODE = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.inner(x)


def build():
    return nn.Sequential(nn.Linear(5, 8), Block(), Block(), Block(), nn.ReLU(), nn.Linear(8, 1))


class Own(nn.Sequential):
    def forward(self, x):
        return self[1](self[0](x) + 1) + self.more(x)


def own():
    model = Own(nn.Linear(5, 8), nn.Linear(8, 1))
    model.more = nn.Linear(5, 1)
    return model


def drops():
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Dropout(0.3), nn.Linear(8, 1))


def loss(output, y):
    mean = (output - y).abs().mean()
    return {"loss": (output - y).square().mean(), "mean": mean, 'a "{b}"': mean}
"""
LOSS = {"loss": "net.py:loss"}


def job(folder, factory="build", stages=1, cuts="auto", **model):
    return make_spec(
        folder,
        CODE,
        model={"factory": f"net.py:{factory}"} | model,
        cluster={"devices_per_node": stages},
        parallel={"pipeline": stages, "cuts": cuts},
    )


def test_a_sequential_is_a_dict_of_its_modules(tmp_path):
    spec = job(tmp_path, stages=2, cuts=["4"])
    first, last = (str(file.text) for file in compile(spec)[:2])
    assert "class Stage(nn.ModuleDict):" in first
    assert '        self["0"] = nn.Linear(5, 8)\n' in first
    assert "        self.update({str(i): Block() for i in range(1, 4)})\n" in first
    assert (
        "        for layer in self.values():\n            x = layer(x)\n        return x\n" in first
    )
    assert 'self["5"] = nn.Linear(8, 1)' in last
    assert "getattr" not in first + last
    assert '"""Each microbatch\'s x."""' in first


def test_other_attributes_stay_such(tmp_path):
    text = "\n".join(emit(job(tmp_path, "own")).forward())
    assert 'self["1"](self["0"](x) + 1) + self.more(x)' in text


@pytest.mark.dist
@pytest.mark.parametrize("factory", ["build", "own", "drops"])
def test_they_train(tmp_path, fork_server, factory):
    """In two stages; metrics whose names need care among the rest."""
    prove(job(tmp_path, factory, stages=2, **LOSS), fork_server, steps=2)


def test_a_metric_is_one_string(tmp_path):
    text = str(compile(job(tmp_path, **LOSS))[0].text)
    assert '    line += f" | mean {mean:.4f}"\n' in text
    assert "    line += f' | a \"{{b}}\" {a___b__:.4f}'\n" in text


def test_what_a_step_waits_for(tmp_path):
    """Two stages of next to no work: messages are all that takes time. One stage never waits."""
    page = plan(job(tmp_path, stages=2))
    assert 0 < page.bubble - page.waits < 0.005
    said = "of which the ranks are idle over 99%: under 1% by their schedule, over 99% for messages"
    assert said in str(page)
    assert "idle" not in str(plan(job(tmp_path)))


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0%"), (0.004, "under 1%"), (0.14, "14%"), (0.999, "over 99%")]
)
def test_shares(share, text):
    assert percent(share) == text
