"""Text that is legal and looks like code: it comes out of the scripts as it went into the spec, and
runs nowhere."""

import ast
import json

import pytest
from jobs import make_spec, prove

from ppc import pipeline
from ppc.errors import PpcError, SpecError, visible
from ppc.frontend.load import load

pytestmark = pytest.mark.torch

TEXTS = {
    "quotes": "\"\"\" ''' \" '",
    "backslashes": "\\ \\\\ \\n \\",
    "line ends": "a\nimport os\r\n\u2028b\u0085c",
    "braces": "{x!r} {{ 7 * 7 }} {% raw %} {0} %s ${HOME} `id`",
    "controls": "\x1b[2J \x07 \u202e \u200f \ufeff",
    "letters": "j\u043eb na\u00efve \u65e5\u672c \U0001f600",
    "code": '"); __import__("os").system("touch pwned"); ("',
    "long": "x" * 5000,
    "nothing": "",
}
ROWS = """
import torch

class Rows(torch.utils.data.Dataset):
    def __init__(self, **texts):
        pass

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.ones(5) * i, torch.ones(1)
"""


def rows_spec(folder, args, **sections):
    (folder / "rows.py").write_text(ROWS)
    data = {"source": "rows.py:Rows", "fields": ["x", "y"], "args": args}
    return make_spec(folder, data=data, **sections)


def scripts(spec):
    return {f.path: f.text for f in pipeline.compile(spec, spec.folder / "out")}


def spelled(script: str) -> dict[str, object]:
    """What the Dataset is made with, as Python reads it."""
    calls = [n for n in ast.walk(ast.parse(script)) if isinstance(n, ast.Call)]
    (call,) = [c for c in calls if getattr(c.func, "id", "") == "make_dataset"]
    return {k.arg: ast.literal_eval(k.value) for k in call.keywords}


def test_arguments_of_a_dataset(tmp_path):
    args = {f"text_{i}": text for i, text in enumerate(TEXTS.values())}
    args |= {"nested": [{text[:99]: [text, 1, None, True, -0.5]} for text in TEXTS.values()]}
    script = scripts(rows_spec(tmp_path, args))["rank0.py"]
    assert spelled(script) == args
    plain = scripts(rows_spec(tmp_path, {"a": 1}))["rank0.py"]
    assert shape(script) == shape(plain)


def shape(script: str) -> list[str]:
    """The kinds of a script's statements: text that became code would be one more."""
    return [
        type(node).__name__ for node in ast.walk(ast.parse(script)) if isinstance(node, ast.stmt)
    ]


names = ["quotes", "backslashes", "line ends", "braces", "controls", "letters", "code"]


@pytest.mark.parametrize("name", names)
def test_the_spec_s_own_file(name, tmp_path, monkeypatch):
    """Its name stands in the docstring of each script."""
    monkeypatch.chdir(tmp_path)
    plain = make_spec(tmp_path)
    text = json.loads(plain.path.read_text()) | {"name": "job"}
    path = tmp_path / f"{TEXTS[name].replace('/', '')}.yaml"
    path.write_text(json.dumps(text))
    expected, found = scripts(plain), scripts(load(path))
    for file in ("rank0.py", "run.py"):
        assert shape(found[file]) == shape(expected[file])
        assert all(visible(line) == line for line in found[file].split("\n"))
    assert json.loads(found["manifest.json"])["spec"] == path.name
    path.rename(tmp_path / "again.yaml")


@pytest.mark.parametrize("name", names)
def test_a_model_s_own_file(name, tmp_path, monkeypatch):
    """It stands in a comment on its classes."""
    monkeypatch.chdir(tmp_path)
    plain = make_spec(tmp_path, NAMED)
    file = f"a{TEXTS[name].replace('/', '').replace(':', '')}b.py"
    (tmp_path / file).write_text((tmp_path / "net.py").read_text())
    spec = make_spec(tmp_path, NAMED, model={"factory": f"{file}:build"})
    assert imports(scripts(spec)["rank0.py"]) == imports(scripts(plain)["rank0.py"])


def imports(script: str) -> list[str]:
    nodes = ast.walk(ast.parse(script))
    return [ast.unparse(n) for n in nodes if "import" in type(n).__name__.lower()] + [
        ast.unparse(n) for n in ast.walk(ast.parse(script)) if getattr(n, "id", "") == "__import__"
    ]


NAMED = """
class Block(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(5, 5) for name in names})

    def forward(self, x):
        for part in self.parts.values():
            x = torch.tanh(part(x))
        return x

class Net(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.block, self.head = Block(names), nn.Linear(5, 1)

    def forward(self, x):
        return self.head(self.block(x))

def build(names=("a", "b")):
    return Net(names)

def loss(output, y):
    error = nn.functional.mse_loss(output, y)
    return {"loss": error, TEXT: error.detach().sqrt()}
"""


@pytest.mark.dist
def test_names_of_modules_and_of_metrics(tmp_path, fork_server):
    texts = [text for name, text in TEXTS.items() if name in names]
    texts = [text.replace(".", "") for text in texts]  # which torch forbids
    code = NAMED.replace("TEXT", repr("".join(TEXTS[name] for name in names)))
    model = {"args": {"names": texts}, "loss": "net.py:loss"}
    prove(make_spec(tmp_path, code, model=model), fork_server, steps=1)


def test_patterns_and_paths_that_name_nothing(tmp_path):
    """Complaints quote them on one line each."""
    for text in TEXTS.values():
        if not text:
            continue
        groups = [{"params": text, "lr": 0.5}]
        sections = [
            {"train": {"optimizer": {"name": "sgd", "lr": 0.1, "groups": groups}}},
            {"parallel": {"pipeline": 2, "cuts": [text]}, "cluster": {"devices_per_node": 2}},
            {"parallel": {"pipeline": 1, "microbatches": 2, "recompute": [text]}},
            {"model": {"weight": {"kind": "tokens", "field": text}}},
        ]
        for section in sections:
            spec = make_spec(tmp_path, NAMED.replace("TEXT", "'a'"), **section)
            with pytest.raises(PpcError) as raised:
                pipeline.plan(spec)
            assert all(line.isprintable() for line in str(raised.value).split("\n"))


@pytest.mark.parametrize("taken", ["rank0", "run"])
def test_a_module_of_the_user_s_takes_no_script_s_place(taken, tmp_path):
    (tmp_path / f"{taken}.py").write_text("value = 1\n")
    (tmp_path / "rows.py").write_text(f"import {taken}\n{ROWS}")
    data = {"source": "rows.py:Rows", "fields": ["x", "y"]}
    spec = make_spec(tmp_path, data=data)
    with pytest.raises(SpecError, match=rf"imports a module {taken}, whose file would take"):
        pipeline.compile(spec, tmp_path / "out")
