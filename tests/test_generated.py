"""generated/ is what the compiler makes of specs/, to the byte, and reads as it should."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ppc import pipeline
from ppc.frontend.load import load
from ppc.pipeline import compile

root = Path(__file__).parent.parent
specs = sorted(path.stem for path in (root / "specs").glob("*.yaml"))
scripts = sorted((root / "generated").glob("*/*.py"))


@pytest.mark.torch
@pytest.mark.parametrize("checked", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", specs)
def test_golden(name, checked, monkeypatch):
    """Unchecked: without the comparisons of model, graph and text, half of a compilation, which
    `ppc verify` of these models goes beyond."""
    if not checked:
        for check in ("check_capture", "check_text", "check_after_step"):
            monkeypatch.setattr(pipeline, check, lambda *_: None)
    monkeypatch.chdir(root)
    files = compile(load(Path("specs") / f"{name}.yaml"), Path("generated") / name)
    for file in files:
        text = file.text if isinstance(file.text, bytes) else file.text.encode()
        committed = root / "generated" / name / file.path
        if file.path == "manifest.json":  # whatever versions are installed here
            texts = (committed.read_bytes(), text)
            found, expected = (json.loads(t) | {"versions": None} for t in texts)
            assert found == expected, f"{committed} is old: make golden"
            continue
        assert committed.read_bytes() == text, f"{committed} is old: make golden"


def test_every_folder_has_its_spec():
    assert sorted({path.parent.name for path in scripts}) == specs


def test_format():
    command = [sys.executable, "-m", "ruff", "format", "--check", "--line-length", "100"]
    done = subprocess.run(
        [*command, root / "generated"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", scripts, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_script_is_plain_torch(script):
    text = script.read_text()
    assert "torch.ops" not in text
    assert "transformers." not in text.replace("# transformers/", "")
    nodes = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    names = [getattr(node, "module", None) or node.names[0].name for node in nodes]
    modules = {name.split(".")[0] for name in names}
    beside = {path.stem for path in script.parent.glob("*.py")}  # copies of the user's own
    assert modules <= sys.stdlib_module_names | {"torch"} | beside
    assert max(map(len, text.splitlines())) <= 100


def test_the_quickstart_is_short():
    lines = (root / "generated/quickstart/rank0.py").read_text().splitlines()
    assert len(lines) < 250


def test_the_table_in_docs():
    sys.path.insert(0, str(root / "docs"))
    try:
        import scripts as table
    finally:
        sys.path.pop(0)
    rows = [
        row for folder in sorted((root / "generated").iterdir()) for row in table.rows_of(folder)
    ]
    assert (root / "docs/scripts.md").read_text() == table.head + "".join(rows)
