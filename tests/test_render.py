"""Files come out the same each time, hold what they use, and no name breaks out of them."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from emitted import Emitted, emit
from formatted import ruff, unformatted
from jobs import make_spec

from ppc.emit.render import choose_imports, is_used
from ppc.emit.scope import script as script_names
from ppc.ir.spec import Spec
from ppc.pipeline import compile as compile_spec

pytestmark = pytest.mark.torch

net = """
class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(5, 1)

    def forward(self, x):
        skip = x
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(self.dropout(x) + skip)

def build(dropout=0.0):
    return Net(dropout)

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(5, 5) for _ in range(3))
        self.last.weight = self.first.weight
        self.norm = nn.LayerNorm(5)
        self.norm.requires_grad_(False)

    def forward(self, x):
        return self.last(self.norm(self.middle(self.first(x))))[:, :1]

def tied():
    return Tied()
"""
cosine = {"name": "cosine", "warmup": 2, "final": 0.1}
momentum = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True}
grouped = {
    "name": "adamw",
    "betas": [0.8, 0.9],
    "weight_decay": 0.123456,
    "groups": [
        {
            "params": ["*.bias"],
            "lr": 0.01,
            "weight_decay": 0,
            "amsgrad": True,
            "betas": [0.9, 0.95],
        },
        {"params": "*", "lr": 0.02, "foreach": True},
    ],
}
grouped_tied = {"name": "sgd", "groups": [{"params": "first.weight", "lr": 0.01}]}
drop = {"source": "random", "samples": 10, "last_batch": "drop",
        "fields": {"x": {"shape": [5]}, "y": {"shape": [1]}}}  # fmt: skip
kinds = {
    "one": {},
    "two": {"parallel": {"pipeline": 2}},
    "1f1b": {"parallel": {"pipeline": 3, "schedule": "1f1b", "microbatches": 4}},
    "dropout": {"model": {"args": {"dropout": 0.5}}, "parallel": {"pipeline": 2}},
    "tied": {"model": {"factory": "net.py:tied"}, "parallel": {"pipeline": 3}},
    "tied on one": {"model": {"factory": "net.py:tied"}},
    "clip": {"train": {"clip_norm": 1.0}, "parallel": {"pipeline": 2}},
    "clip tied": {
        "model": {"factory": "net.py:tied"},
        "train": {"clip_norm": 1.0},
        "parallel": {"pipeline": 3},
    },
    "clip on one": {"train": {"clip_norm": 1.0}},
    "cosine": {"train": {"lr_schedule": cosine}},
    "linear": {"train": {"lr_schedule": {"name": "linear"}}, "parallel": {"pipeline": 2}},
    "groups": {
        "train": {"optimizer": grouped, "lr_schedule": {"name": "one_cycle"}, "clip_value": 0.5},
        "parallel": {"pipeline": 2},
    },
    "groups tied": {
        "model": {"factory": "net.py:tied"},
        "train": {"optimizer": grouped_tied, "lr_schedule": "math:exp"},
        "parallel": {"pipeline": 3},
    },
    "step": {"train": {"lr_schedule": {"name": "step", "every": 2, "warmup": 1}}},
    "inverse_sqrt": {"train": {"lr_schedule": {"name": "inverse_sqrt", "warmup": 2}}},
    "momentum": {"train": {"optimizer": momentum}},
    "epochs": {"train": {"steps": None, "epochs": 2}, "parallel": {"pipeline": 3}},
    "drop": {"data": drop, "train": {"precision": "fp64"}, "parallel": {"pipeline": 3}},
}


def job(folder: Path, kind: str) -> Spec:
    sections = kinds[kind]
    devices = sections.get("parallel", {}).get("pipeline", 1)
    return make_spec(folder, net, cluster={"devices_per_node": devices}, **sections)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[str, Emitted]:
    return {kind: emit(job(tmp_path_factory.mktemp("job"), kind)) for kind in kinds}


@pytest.fixture(scope="module")
def folder(jobs, tmp_path_factory) -> Path:
    """Every file of every job."""
    folder = tmp_path_factory.mktemp("scripts")
    for kind, emitted in jobs.items():
        (folder / kind.replace(" ", "_")).mkdir()
        for name, text in emitted.files.items():
            (folder / kind.replace(" ", "_") / name).write_text(str(text))
    return folder


def test_scripts_are_formatted(folder):
    assert unformatted(folder) == []


def test_scripts_use_what_they_import_and_import_what_they_use(folder):
    """F401 unused import, F811 redefinition, F821 undefined name, F841 unused variable."""
    command = [ruff, "check", "--isolated", "--select=F", "--output-format=concise", "--no-cache"]
    found = subprocess.run([*command, folder], capture_output=True, check=False, encoding="utf-8")
    assert found.stdout == "All checks passed!\n"


def bound(script: str) -> set[str]:
    """Names that a script gives a meaning at its top, classes of the model's aside."""
    names = set()
    for node in ast.parse(script).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {node.name} & {"Edge", "Stage"}
        else:
            found = (n for n in ast.walk(node) if isinstance(n, ast.Name))
            names |= {n.id for n in found if isinstance(n.ctx, ast.Store)}
    return names


def local(script: str) -> set[str]:
    """Variables of comprehensions, which hide nothing."""
    found = (n for n in ast.walk(ast.parse(script)) if isinstance(n, ast.comprehension))
    return {
        n.id for found_in in found for n in ast.walk(found_in.target) if isinstance(n, ast.Name)
    }


def test_no_class_of_a_users_can_take_a_scripts_name(jobs):
    for emitted in jobs.values():
        for script in emitted.scripts:
            names = {
                n for n in bound(script) if not re.fullmatch(r"[a-z]+_(to|from)_\d+|group_\d+", n)
            }
            assert names - local(script) <= script_names


def test_constants_are_those_used(jobs):
    for emitted in jobs.values():
        for script in emitted.scripts:
            constants = {name for name in bound(script) if name.isupper() and len(name) > 1}
            unused = {n for n in constants if len(re.findall(rf"\b{n}\b", script)) < 2}
            alone = {"HERE", "COMPILATION"} if len(emitted.scripts) == 1 else set()
            assert unused <= {"MICROBATCHES"} | alone


def test_all_ranks_bear_one_compilation(jobs):
    marks = set()
    for emitted in jobs.values():
        found = {re.search(r'COMPILATION = \d+, "(\w+)"', text)[1] for text in emitted.scripts}
        assert found == {json.loads(emitted.files["manifest.json"])["compilation"]}
        marks |= found
    assert len(marks) == len(jobs)


def test_compiling_again_gives_the_same_bytes(jobs):
    for emitted in jobs.values():
        again = compile_spec(emitted.spec, emitted.spec.folder / "out")
        assert {file.path: file.text for file in again} == emitted.files


def test_the_hash_seed_changes_nothing(tmp_path):
    spec = job(tmp_path, "clip tied")
    outputs = []
    for seed in ("1", "2"):
        command = [
            sys.executable,
            "-m",
            "ppc",
            "compile",
            str(spec.path),
            "-o",
            str(tmp_path / seed),
        ]
        subprocess.run(
            command, check=True, capture_output=True, env=os.environ | {"PYTHONHASHSEED": seed}
        )
        outputs.append({path.name: path.read_bytes() for path in (tmp_path / seed).iterdir()})
    assert outputs[0] == outputs[1]


def test_imports_are_sorted_and_chosen_by_use():
    body = "math.pi\ntorch.ones(3)\njson.dumps(x)\nx.time.y\n_os.path\nF.relu(x)\n"
    assert choose_imports(body, ["from points import Points as make_dataset"]) == [
        "import json", "import math", "from pathlib import Path", "", "import torch",
        "import torch.nn.functional as F", "", "from points import Points as make_dataset",
    ]  # fmt: skip


def test_a_constant_is_used_where_its_name_stands_alone():
    line = "STEPS, SEED = 3, 0"
    assert is_used(line, f"{line}\nrange(STEPS)")
    assert not is_used(line, f"{line}\nWARMUP_STEPS = 3\nSEEDS = 1")


odd = [
    '"',
    '"""',
    "'",
    "\\",
    '\\"',
    "\n",
    "\r",
    "\t",
    "%s",
    "#",
    "\u2028",
    "é",
    "\x1b",
]


@pytest.mark.parametrize("text", odd)
def test_file_patterns_cannot_break_out(text, tmp_path):
    code = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 256)

    def forward(self, tokens):
        return self.table(tokens).flatten(0, 1)

def build():
    return Net()

def loss(logits, labels):
    return nn.functional.cross_entropy(logits, labels.flatten())
"""
    (tmp_path / f"ab{text}c.txt").write_text("some text " * 9)
    files = [f"a*{text}*.txt", f"{tmp_path}/*{text}*"]
    spec = make_spec(
        tmp_path,
        code,
        model={"loss": "net.py:loss"},
        data={"source": "text", "files": files, "sequence": 4},
    )
    emitted = emit(spec)
    tree = ast.parse(emitted.script())
    strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    assert any(isinstance(s, str) and s.endswith(f"a*{text}*.txt") for s in strings)
    assert len(ast.get_docstring(tree).splitlines()) > 8
    assert "Generated by ppc" in ast.get_docstring(tree)
    (tmp_path / "rank0.py").write_text(emitted.script(), newline="")
    assert unformatted(tmp_path / "rank0.py") == []


@pytest.mark.parametrize("text", [*odd, "{x}", "{{x}}", "}"])
def test_files_of_arrays_cannot_break_out(text, tmp_path):
    files = {"x": f"x{text}.npy", "y": f"{text}y.npy"}
    np.save(tmp_path / files["x"], np.ones((4, 5), dtype="f4"))
    np.save(tmp_path / files["y"], np.ones((4, 1), dtype="f4"))
    script = emit(make_spec(tmp_path, net, data={"source": "arrays", "files": files})).script()
    strings = [n.value for n in ast.walk(ast.parse(script)) if isinstance(n, ast.Constant)]
    assert {f"../x{text}.npy", f"../{text}y.npy"} <= {s for s in strings if isinstance(s, str)}
    assert "Generated by ppc" in ast.get_docstring(ast.parse(script))


@pytest.mark.parametrize("text", ['it\'s "x"', '"""', "a\\b", "{x}", "two  words", "é"])
def test_paths_cannot_break_out(text, tmp_path, monkeypatch):
    (tmp_path / text).mkdir()
    monkeypatch.chdir(tmp_path)
    emitted = emit(make_spec(tmp_path / text, net))
    assert "Generated by ppc" in ast.get_docstring(ast.parse(emitted.script()))


named = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({'it\\'s': nn.Linear(5, 5), 'say "x"': nn.Linear(5, 5)})
        self.add_module("0", nn.Linear(5, 5))
        self.add_module("class", nn.Linear(5, 5))
        self.add_module("{x}", nn.Dropout(0.5))
        self.add_module("more", nn.ModuleList(nn.Dropout(0.5) for _ in range(2)))
        self.add_module("a b", nn.ModuleDict({"{i}": nn.Dropout(0.5), "{": nn.Dropout(0.5)}))
        self.register_buffer("b-c", torch.ones(5))

    def forward(self, x):
        for part in self.parts.values():
            x = part(x)
        x = getattr(self, "class")(getattr(self, "0")(x)) * getattr(self, "b-c")
        x = getattr(self, "{x}")(x)
        for layer in [*self.more, *getattr(self, "a b").values()]:
            x = layer(x)
        return x[:, :1]

def build():
    return Net()
"""


@pytest.mark.parametrize("stages", [1, 3])
def test_names_of_modules_cannot_break_out(stages, tmp_path):
    """`check_text` has run all of it."""
    sections = {"cluster": {"devices_per_node": stages}, "parallel": {"pipeline": stages}}
    emitted = emit(make_spec(tmp_path, named, **sections))
    for rank, script in enumerate(emitted.scripts):
        path = tmp_path / f"rank{rank}.py"
        path.write_text(script)
        assert unformatted(path) == []


def test_run_starts_the_right_number(jobs):
    assert "--nproc-per-node 3 run.py" in jobs["1f1b"].files["run.py"]
    assert "compiled for 1 rank, not" in jobs["one"].files["run.py"]
