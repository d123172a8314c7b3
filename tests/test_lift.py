"""Stages are written as classes that their user would recognise."""

import re
from pathlib import Path

import pytest
import torch
from emitted import Emitted, emit
from jobs import make_spec

from ppc.emit.classes import Class, Draft, unify
from ppc.emit.expression import number
from ppc.frontend.capture.build import build_model

pytestmark = pytest.mark.torch

block = """
class Block(nn.Module):
    def __init__(self, width=6, hidden=12):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))
"""


def net(init: str, forward: str, classes: str = block, arguments: str = "x") -> str:
    """The text of a model: lines of __init__ and forward."""
    inner = "\n".join(f"        {line}" for line in init.strip().splitlines())
    body = "\n".join(f"        {line}" for line in forward.strip().splitlines())
    return f"""{classes}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
{inner}

    def forward(self, {arguments}):
{body}

def build():
    return Net()
"""


def compiled(folder: Path, code: str, stages: int = 1, **sections) -> Emitted:
    """A model that returns its loss, for samples of 6 numbers."""
    parallel = {"pipeline": stages, "microbatches": 2} | sections.pop("parallel", {})
    data = {"source": "random", "samples": 8, "fields": {"x": {"shape": [6]}}}
    spec = make_spec(
        folder,
        f"import torch.nn.functional as F\n{code}",
        model={"loss": "output"},
        data=sections.pop("data", data),
        cluster={"devices_per_node": stages},
        parallel=parallel,
        **sections,
    )
    return emit(spec)


chain = net(
    "self.blocks = nn.ModuleList(Block() for _ in range(6))\nself.head = nn.Linear(6, 1)",
    "for block in self.blocks:\n    x = block(x)\nreturn self.head(x).mean()",
)


def test_repeated_modules_are_one_class_in_a_loop(tmp_path):
    found = compiled(tmp_path, chain)
    assert list(found.classes()) == ["Block", "Stage"]
    assert found.forward("Block") == ["return x + self.down(self.up(x).tanh())"]
    assert found.init()[0] == "self.blocks = nn.ModuleList(Block() for _ in range(6))"
    assert found.forward() == [
        "for block in self.blocks:",
        "    x = block(x)",
        "return self.head(x).mean()",
    ]


def test_a_part_of_a_list_keeps_its_numbers(tmp_path):
    found = compiled(tmp_path, chain, 3, parallel={"cuts": ["blocks.2", "blocks.4"]})
    assert found.init("Stage", 0) == ["self.blocks = nn.ModuleList(Block() for _ in range(2))"]
    assert found.init("Stage", 1) == [
        "self.blocks = nn.ModuleDict({str(i): Block() for i in range(2, 4)})"
    ]
    assert found.forward("Stage", 1)[0] == "for block in self.blocks.values():"


def test_a_list_of_one(tmp_path):
    found = compiled(tmp_path, chain, 2, parallel={"cuts": ["blocks.5"]})
    assert found.init("Stage", 1)[0] == 'self.blocks = nn.ModuleDict({"5": Block()})'
    assert found.forward("Stage", 1) == [
        'x = self.blocks["5"](x)',
        "return self.head(x).mean()",
    ]


def test_numbers_that_differ_become_arguments(tmp_path):
    code = net(
        "self.blocks = nn.ModuleList(Block(6, 2 * n) for n in (1, 2, 3))",
        "for block in self.blocks:\n    x = block(x)\nreturn x.mean()",
    )
    found = compiled(tmp_path, code)
    assert found.classes()["Block"].splitlines()[1] == "    def __init__(self, out_features):"
    assert found.init("Block") == [
        "self.up = nn.Linear(6, out_features)",
        "self.down = nn.Linear(out_features, 6)",
    ]
    assert found.init() == ["self.blocks = nn.ModuleList([Block(2), Block(4), Block(6)])"]


def test_numbers_in_forward_are_kept_by_the_module(tmp_path):
    scale = """
class Scale(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return (x * self.weight).clamp(-self.by, self.by)
"""
    code = net(
        "self.a, self.b, self.c = Scale(1.5), Scale(2.5), Scale(float('inf'))",
        "return self.c(self.b(self.a(x))).mean()",
        scale,
    )
    found = compiled(tmp_path, code)
    assert found.init("Scale")[:2] == ["self.min = min", "self.max = max"]
    assert found.forward("Scale") == ["return (x * self.weight).clamp(self.min, self.max)"]
    assert found.init()[2] == 'self.c = Scale(float("-inf"), float("inf"))'


def test_classes_that_differ_are_named_by_their_role(tmp_path):
    code = net(
        "self.first = Part(True)\nself.last = Part(False)\nself.blocks = nn.ModuleList("
        "[Part(True), Part(False)])",
        "x = self.last(self.first(x))\nreturn self.blocks[1](self.blocks[0](x)).mean()",
        """
class Part(nn.Module):
    def __init__(self, tanh):
        super().__init__()
        self.tanh = tanh
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return torch.tanh(x * self.weight) if self.tanh else torch.sigmoid(x * self.weight)
""",
    )
    found = compiled(tmp_path, code)
    assert list(found.classes()) == ["Part", "PartLast", "Stage"]
    assert found.init() == [
        "self.first = Part()",
        "self.last = PartLast()",
        "self.blocks = nn.ModuleList([Part(), PartLast()])",
    ]


def test_a_users_class_may_be_called_stage(tmp_path):
    found = compiled(tmp_path, chain.replace("Block", "Stage"))
    assert list(found.classes()) == ["StageBlocks", "Stage"]


@pytest.mark.parametrize("name", ["Edge", "nn", "torch", "F", "Path", "print", "sum"])
def test_a_users_class_may_bear_any_name(name, tmp_path):
    code = chain.replace("Block", name)
    if name in ("nn", "torch", "F"):
        code = code.replace(f"class {name}", "class Other").replace(f"{name}() for", "Other() for")
        code += f"\nOther.__name__ = {name!r}\n"
    found = compiled(tmp_path, code, 2)
    (own,) = found.classes().keys() - {"Stage", "Edge"}
    assert own != name


def test_sequentials_are_written_in_place(tmp_path):
    found = compiled(
        tmp_path,
        net(
            "self.mlp = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Block(), nn.Linear(6, 1))",
            "return self.mlp(x).mean()",
        ),
    )
    assert found.init() == [
        "self.mlp = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Block(), nn.Linear(6, 1))"
    ]
    assert found.forward() == ["return self.mlp(x).mean()"]


def test_a_sequential_cut_in_the_middle(tmp_path):
    code = net(
        "self.mlp = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)))",
        "return self.mlp(x).mean()",
    )
    found = compiled(tmp_path, code, 2, parallel={"cuts": ["mlp.3"]})
    assert found.init("Stage", 0) == [
        "self.mlp = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))",
    ]
    assert found.init("Stage", 1) == [
        "self.mlp = nn.ModuleDict({str(i): nn.Linear(6, 6) for i in range(3, 6)})",
    ]
    assert found.forward("Stage", 1) == [
        "for layer in self.mlp.values():",
        "    x = layer(x)",
        "return x.mean()",
    ]


def test_nested_containers(tmp_path):
    code = net(
        "self.groups = nn.ModuleDict({'a': nn.ModuleList([Block(), Block()]), "
        "'b': nn.ModuleList([Block(), Block()])})\nself.head = nn.ModuleDict({'out': Block()})",
        "for group in self.groups.values():\n    for block in group:\n        x = block(x)\n"
        "return self.head['out'](x).mean()",
    )
    found = compiled(tmp_path, code, 2, parallel={"cuts": ["groups.b.1"]})
    assert found.init("Stage", 0) == [
        "self.groups = nn.ModuleDict()",
        'self.groups["a"] = nn.ModuleList(Block() for _ in range(2))',
        'self.groups["b"] = nn.ModuleList([Block()])',
    ]
    assert found.forward("Stage", 0) == [
        'for layer in self.groups["a"]:',
        "    x = layer(x)",
        'return self.groups["b"][0](x)',
    ]
    assert found.init("Stage", 1) == [
        "self.groups = nn.ModuleDict()",
        'self.groups["b"] = nn.ModuleDict({"1": Block()})',
        'self.head = nn.ModuleDict({"out": Block()})',
    ]


def test_a_module_called_twice(tmp_path):
    code = net("self.block = Block()", "y = self.block(x)\nreturn self.block(y).mean()")
    found = compiled(tmp_path, code)
    assert found.forward() == ["y = self.block(x)", "return self.block(y).mean()"]


def test_a_module_called_on_other_sizes_is_dissolved(tmp_path):
    code = net(
        "self.mix = Mix()",
        "short = self.mix(x)\nlong = self.mix(torch.cat((x, x), dim=1))\n"
        "again = self.mix(short)\nreturn (short + again).mean() + long.mean()",
        """
class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return (x * self.weight).view(x.shape[0], x.shape[1] // 2, 2).mean(dim=-1).repeat(1, 2)
""",
    )
    found = compiled(tmp_path, code)
    forward = "\n".join(found.forward())
    assert forward.count("self.mix(") == 2
    assert "self.mix.weight" in forward


def test_the_users_names_are_kept(tmp_path):
    code = net(
        "self.q, self.k = nn.Linear(6, 6), nn.Linear(6, 6)",
        """
query, key = self.q(x), self.k(x)
scores = query @ key.T
weights = torch.softmax(scores, dim=-1)
query = weights @ x
return (query * key).mean()
""",
    )
    found = compiled(tmp_path, code, parallel={"microbatches": 1})
    assert found.forward() == [
        "query = self.q(x)",
        "key_ = self.k(x)",
        "scores = query @ key_.T",
        "weights = scores.softmax(dim=-1)",
        "query = weights @ x",
        "return (query * key_).mean()",
    ]


def test_no_name_hides_another(tmp_path):
    code = net(
        "self.blocks = nn.ModuleList(Gate() for _ in range(3))\n"
        "self.dropouts = nn.ModuleList(nn.Dropout(0.5) for _ in range(3))",
        """
block = x.mean(dim=1, keepdim=True)
i = block * 2
device = i + 1
for gate in self.blocks:
    x = gate(x, block)
for dropout in self.dropouts:
    x = dropout(x)
return (x + i + block * device).mean()
""",
        """
class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x, self_):
        return x * self.up(x) + self_
""",
    )
    found = compiled(tmp_path, code)
    assert found.forward() == [
        "block = x.mean(dim=1, keepdim=True)",
        "i_ = block * 2",
        "device_ = i_ + 1",
        "for block_2 in self.blocks:",
        "    x = block_2(x, block)",
        "for i, dropout in enumerate(self.dropouts):",
        '    seed_layer(key, f"dropouts.{i}")',
        "    x = dropout(x)",
        "return (x + i_ + block * device_).mean()",
    ]


def test_values_that_cross_a_cut_hide_nothing_of_a_step(tmp_path):
    code = net(
        "self.blocks = nn.ModuleList(Block() for _ in range(4))",
        """
stage = self.blocks[0](x)
loss = self.blocks[1](stage)
live = loss + stage
step = self.blocks[2](live)
return (self.blocks[3](step) + loss * live).mean()
""",
    )
    found = compiled(tmp_path, code, 2, parallel={"cuts": ["blocks.2"]})
    assert "    loss_, live_ = stage(x)\n" in found.script(0)
    assert "    loss_, live_ = activations_from_0.take(mb)\n" in found.script(1)
    assert "    loss = stage(loss_, live_)\n" in found.script(1)


def test_arguments_by_keyword_and_several_results(tmp_path):
    code = net(
        "self.pair = Pair()",
        "high, low = self.pair(x, scale=x.mean(1, True))\nreturn (high - low).mean()",
        """
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x, unused=None, *, scale):
        x = self.up(x)
        return x * scale, x.flip(1)
""",
    )
    found = compiled(tmp_path, code)
    assert found.classes()["Pair"].count("def forward(self, x, scale):") == 1
    assert found.forward()[:1] == ["high, low = self.pair(x, scale=x.mean(dim=1, keepdim=True))"]


def test_frozen_parts_run_without_gradients(tmp_path):
    code = net(
        "self.fixed = nn.ModuleList(Block() for _ in range(2))\nself.block = Block()",
        "with torch.no_grad():\n    for block in self.fixed:\n        x = block(x)\n"
        "return self.block(x).mean()",
    )
    found = compiled(tmp_path, code)
    assert list(found.classes()) == ["Block", "Stage"]
    assert found.forward() == [
        "with torch.no_grad():",
        "    for layer in self.fixed:",
        "        x = layer(x)",
        "return self.block(x).mean()",
    ]


def test_a_module_that_sees_no_sample_is_told_their_number(tmp_path):
    code = net(
        "self.state = State()\nself.up = nn.Linear(6, 6)",
        "return (self.up(x) + self.state(x.shape[0])).mean()",
        """
class Start(nn.Module):
    def forward(self, number):
        return torch.ones(number, 6)

class State(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.start = Start()

    def forward(self, number):
        return self.start(number) * self.scale
""",
    )
    found = compiled(tmp_path, code)
    assert found.forward("Start") == ["return torch.ones((batch, 6), device=device)"]
    assert found.forward("State") == ["return self.start(batch=batch) * self.scale"]
    assert found.forward() == [
        "batch = x.shape[0]",
        "return (self.up(x) + self.state(batch=batch)).mean()",
    ]


def test_layers_that_are_no_calls_are_written_out(tmp_path):
    code = net(
        "self.weight = nn.Parameter(torch.ones(6))\nself.block = Block()",
        "x = x * self.weight\nreturn (self.block(x) * self.weight).mean()",
    )
    found = compiled(tmp_path, code, 2, parallel={"cuts": ["block"]})
    assert found.init("Stage", 0) == ["self.weight = nn.Parameter(torch.empty(6))"]
    assert found.init("Stage", 1) == [
        "self.weight = nn.Parameter(torch.empty(6))",
        "self.block = Block()",
    ]


def test_long_statements_are_taken_apart(tmp_path):
    code = net(
        "self.first_projection, self.second_projection = nn.Linear(6, 6), nn.Linear(6, 6)",
        "return (self.first_projection(torch.tanh(x) * 2.0 + 1.0)"
        " * self.second_projection(torch.sigmoid(x) * 3.0 + 2.0)).clamp(-1.0, 1.0).mean()",
    )
    found = compiled(tmp_path, code)
    assert len(found.forward()) > 1
    assert all(len(line) <= 92 for line in found.forward())


models = {
    "chain": chain,
    "uneven": chain.replace("range(6)", "range(7)"),
    "tied": net(
        "self.blocks = nn.ModuleList(Block() for _ in range(5))\n"
        "self.head = nn.Linear(6, 6)\nself.head.weight = self.blocks[0].up.weight",
        "for block in self.blocks:\n    x = block(x)\nreturn self.head(x).mean()",
        block.replace("hidden=12", "hidden=6"),
    ),
    "skips": net(
        "self.down = nn.ModuleList(Block() for _ in range(3))\n"
        "self.up = nn.ModuleList(Block() for _ in range(3))\n"
        "self.register_buffer('scale', torch.ones(6))",
        "kept = []\nfor block in self.down:\n    x = block(x)\n    kept.append(x)\n"
        "for block in self.up:\n    x = block(x + kept.pop()) * self.scale\nreturn x.mean()",
    ),
}


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", models)
def test_c22_no_parameter_is_lost(name, stages, tmp_path):
    found = compiled(tmp_path, models[name], stages)
    model = build_model(found.spec)
    expected = {n: tuple(t.shape) for n, t in model.state_dict().items()}
    parts = [found.stage(rank).state_dict() for rank in range(stages)]
    union = {n: tuple(t.shape) for part in parts for n, t in part.items()}
    assert union == expected
    layers = [i for stage in found.job.plan.stages for i in stage.layers]
    assert layers == list(range(len(found.job.graph.layers)))
    if name == "uneven":
        held = [n for part in parts for n in part if re.fullmatch(r"blocks\.\d\.up\.weight", n)]
        assert sorted(held) == [f"blocks.{i}.up.weight" for i in range(7)]


@pytest.mark.parametrize("name", models)
def test_a_whole_state_loads(name, tmp_path):
    found = compiled(tmp_path, models[name])
    model, stage = build_model(found.spec), found.stage()
    stage.load_state_dict(model.state_dict(), strict=True)
    x = torch.ones(2, 6)
    assert torch.equal(stage(x), model(x))


def draft(path: str, *texts: str) -> Draft:
    return Draft(path, "Part", "net.py:1", texts, ("x",), (), "nn.Module")


def test_equal_columns_share_an_argument():
    def text(*values):
        return ", ".join(number(value, "size").text for value in values)

    classes, instances = unify([draft("a", text(1, 2, 1, 7)), draft("b", text(3, 4, 3, 7))], [])
    assert classes == [Class("Part", "net.py:1", ("size", "size_2"), ("size, size_2, size, 7",),
                             ("x",), (), "nn.Module")]  # fmt: skip
    assert {
        path: re.sub("\0|\\|[a-z_0-9]*", "", made.text) for path, made in instances.items()
    } == {
        "a": "Part(1, 2)",
        "b": "Part(3, 4)",
    }


def test_names_taken_by_others_are_avoided():
    classes, _ = unify([draft("model.part", "a"), draft("model.other_part.1", "b")], {"Part"})
    assert [c.name for c in classes] == ["PartPart", "PartOtherPart"]
