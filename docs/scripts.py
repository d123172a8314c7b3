"""Writes docs/scripts.md: how long the committed scripts are beside the models they came from.

    python docs/scripts.py

`make golden` runs it, after the scripts are made anew.
"""

import ast
import json
from pathlib import Path

root = Path(__file__).parent.parent
head = """# The scripts in generated/

Made by `docs/scripts.py` (`make golden` runs it). Lines are those of the files as they are, blank
ones and docstrings included; classes are the modules that a script defines, `Stage` and `Edge`
apart, and what is written out in `Stage` needs none. The last column is the user's file; those of
gpt2 and llama only call transformers, whose own modules the classes were lifted from.

| spec | rank | lines | classes | lines of classes | model |
|---|---|---|---|---|---|
"""


def main() -> None:
    rows = [row for folder in sorted((root / "generated").iterdir()) for row in rows_of(folder)]
    (root / "docs" / "scripts.md").write_text(head + "".join(rows))


def rows_of(folder: Path) -> list[str]:
    """A row for each rank."""
    if not (folder / "manifest.json").exists():
        return []
    model = json.loads((folder / "manifest.json").read_text())["model"]
    path = root / "specs" / model
    own = len(path.read_text().splitlines()) if path.is_file() else 0
    scripts = sorted(folder.glob("rank*.py"))
    return [row(folder.name, script, f"{model}, {own} lines") for script in scripts]


def row(name: str, script: Path, model: str) -> str:
    text = script.read_text()
    classes = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name not in ("Stage", "Edge")
    ]
    inside = sum(node.end_lineno - node.lineno + 1 for node in classes)
    rank = script.stem.removeprefix("rank")
    return f"| {name} | {rank} | {len(text.splitlines())} | {len(classes)} | {inside} | {model} |\n"


if __name__ == "__main__":
    main()
