"""The text of the initialisation gives exactly what the recorded recipes give."""

import zlib
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from formatted import format_text
from jobs import make_spec
from torch import Tensor, nn

from ppc.emit.environment import environment
from ppc.emit.weights import condition, spell_weights
from ppc.frontend.capture.build import Built, build_fake, default_dtype, state_tensors
from ppc.frontend.capture.replay import replay
from ppc.frontend.load import load
from ppc.ir.graph import Recipe
from ppc.ir.spec import Spec
from ppc.ir.unit import Held

pytestmark = pytest.mark.torch
specs = sorted((Path(__file__).parent.parent / "specs").glob("*.yaml"))


class Stage:
    """Tensors by name, as init_weights asks for them."""

    def __init__(self, tensors: dict[str, Tensor], buffers: set[str]) -> None:
        self.tensors, self.buffers = tensors, buffers

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        return ((n, t) for n, t in self.tensors.items() if n not in self.buffers)

    def named_buffers(self) -> Iterable[tuple[str, Tensor]]:
        return ((n, t) for n, t in self.tensors.items() if n in self.buffers)


def weights_text(built: Built, names: Iterable[str]) -> str:
    """The section `weights` of a stage that holds some of a model's tensors."""
    parameters = {
        name: SimpleNamespace(recipe=recipe, buffer=name in dict(built.model.named_buffers()))
        for name, recipe in built.recipes.items()
    }
    state = tuple(Held(name, name, (), (0,), trainable=True) for name in names)
    found = spell_weights(SimpleNamespace(parameters=parameters), SimpleNamespace(state=state))
    return (
        environment()
        .get_template("weights.j2")
        .render(draws=found.draws, saved=False, init=found.lines, init_doc="...")
    )


def run_text(text: str, tensors: dict[str, Tensor], buffers: set[str], seed: int) -> None:
    names = {"torch": torch, "nn": nn, "zlib": zlib, "SEED": seed}
    exec(text, names)  # noqa: S102  # our own text
    names["init_weights"](Stage(tensors, buffers))


def compare(spec: Spec, parts: int = 1) -> str:
    """Run the text of each part of the model's tensors, and compare; the text of the first."""
    with default_dtype(spec.train.precision):
        built = build_fake(spec)
        shapes = {name: (tuple(t.shape), t.dtype) for name, t in state_tensors(built.model)}
        shapes = {n: shape for n, shape in shapes.items() if not built.recipes[n].saved}
        buffers = set(dict(built.model.named_buffers()))
        texts = []
        for part in range(parts):
            names = list(shapes)[part * len(shapes) // parts : (part + 1) * len(shapes) // parts]
            texts.append(weights_text(built, names))
            assert format_text(texts[-1]).strip() == texts[-1].strip()
            tensors = {n: torch.full(shapes[n][0], 77, dtype=shapes[n][1]) for n in names}
            run_text(texts[-1], tensors, buffers, spec.train.seed)
            for name, tensor in tensors.items():
                expected = replay(built.recipes[name], *shapes[name], spec.train.seed)
                assert torch.equal(tensor, expected), name
    return texts[0]


@pytest.mark.parametrize("path", specs, ids=lambda path: path.stem)
@pytest.mark.parametrize("parts", [1, 3])
def test_every_spec(path, parts):
    compare(load(path), parts)


def filled(line: str) -> str:
    return f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 4))
        with torch.no_grad():
            self.weight.zero_()
            {line}

    def forward(self, x):
        return x @ self.weight

def build():
    return Net()
"""


lines = {
    "self.weight.normal_(0.0, 0.5)": "draw(tensor, name, torch.Tensor.normal_, 0.0, 0.5)",
    "self.weight.uniform_(-0.5, 0.5)": "draw(tensor, name, torch.Tensor.uniform_, -0.5, 0.5)",
    "nn.init.trunc_normal_(self.weight, std=0.02)": (
        "draw(tensor, name, nn.init.trunc_normal_, 0.0, 0.02, -2.0, 2.0)"
    ),
    "nn.init.zeros_(self.weight)": "tensor.zero_()",
    "nn.init.constant_(self.weight, 1.5)": "tensor.fill_(1.5)",
    "nn.init.constant_(self.weight, float('inf'))": 'tensor.fill_(float("inf"))',
    "nn.init.orthogonal_(self.weight)": "torch.linalg.qr(",
    "nn.init.eye_(self.weight)": "torch.eye(",
    "self.weight.copy_(torch.linspace(0, 1, 24).view(6, 4))": "torch.linspace(0, 1, 24)",
    "self.weight.normal_(); self.weight[2].zero_()": "value = tensor[2]\n",
    "self.weight.normal_(); self.weight[:, 1:3] *= 2": "draw(tensor, name, torch.Tensor.normal_",
    "self.weight.normal_(); self.weight[..., -1].fill_(3)": "draw(tensor, name",
    "self.weight.copy_(torch.randn(6, 4) + torch.randn(6, 4))": 'name + "#1"',
    "self.weight.normal_(); self.weight.div_(self.weight.norm())": ".div_(",
    "self.weight.exponential_(2.0)": "draw(tensor, name, torch.Tensor.exponential_, 2.0)",
    "self.weight.bernoulli_(0.25)": "draw(tensor, name, torch.Tensor.bernoulli_, 0.25)",
    "self.weight.random_(0, 10)": "draw(tensor, name, torch.Tensor.random_, 0, 10)",
    "self.weight.copy_(torch.arange(24.0).view(6, 4).flip(0) ** 2 / 3)": "value = value / 3\n",
    "self.weight.copy_(torch.arange(24).float().view(6, 4))": ".to(torch.float32)\n",
    "self.weight = nn.Parameter(torch.rand(2**20 + 24))": "draw(tensor, name",
    "self.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))": "torch.tensor([[1.0, 2.",
    "self.register_buffer('mask', torch.ones(4, 4, dtype=torch.bool).tril())": ".tril()",
    "self.register_buffer('steps', torch.zeros((), dtype=torch.int64))": "tensor.zero_()",
}


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("line", lines)
def test_ways_to_fill(line, precision, tmp_path):
    spec = make_spec(tmp_path, filled(line), train={"precision": precision, "seed": 5})
    assert lines[line] in compare(spec)


def test_equal_recipes_share_a_branch(tmp_path):
    code = """
def build():
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(12)), nn.LayerNorm(5))
    for module in model[:12]:
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
    return model
"""
    text = compare(make_spec(tmp_path, code))
    _, _, body = text.partition("in stage.named_parameters():\n")
    assert body.strip().splitlines() == [
        'if name == "12.weight":',
        "            tensor.fill_(1.0)",
        '        elif name.endswith("bias"):',
        "            tensor.zero_()",
        "        else:",
        "            draw(tensor, name, torch.Tensor.normal_, 0.0, 0.02)",
    ]


def test_saved_values_are_found_by_the_name_they_are_saved_under():
    recipes = {"emb.weight": Recipe(saved=True), "bias": Recipe(saved=True)}
    parameters = {n: SimpleNamespace(recipe=r, buffer=False) for n, r in recipes.items()}
    state = (
        Held("head.weight", "emb.weight", (), (0, 1), trainable=True),
        Held("bias", "bias", (), (1,), trainable=True),
    )
    found = spell_weights(SimpleNamespace(parameters=parameters), SimpleNamespace(state=state))
    assert found.saved
    assert [line.strip() for line in found.lines[1:]] == [
        'if name == "bias":',
        "tensor.copy_(saved[name])",
        "else:",
        'tensor.copy_(saved["emb.weight"])',
    ]


def test_a_stage_without_parameters():
    built = SimpleNamespace(recipes={}, model=nn.ReLU())
    assert weights_text(built, []).strip().endswith("pass  # this stage has no parameters")


@pytest.mark.parametrize(
    ("members", "others", "text"),
    [
        (["a.bias", "b.bias"], ["a.weight"], 'name.endswith("bias")'),
        (["bias"], ["a.bias"], 'name == "bias"'),
        (["x.a.bias"], ["bias"], 'name.endswith("a.bias")'),
        (["bias", "b.bias"], ["a.bias"], 'name in ("bias", "b.bias")'),
        (["a.0.weight", "a.1.weight"], ["b.weight"], None),
        (["x.weight", "y.weight"], ["ax.weight"], None),
        (["g"], ["g_2", "x.g"], None),
    ],
)
def test_conditions_tell_members_from_others(members, others, text):
    found = condition(members, others)
    assert text in (None, found)
    for name in [*members, *others]:
        assert eval(found, {"name": name}) is (name in members)  # noqa: S307  # our own text
