"""Small jobs for tests: a spec and its model, written to a folder and loaded from there."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from ruamel.yaml import YAML

from ppc.frontend.load import load
from ppc.ir.spec import Spec
from ppc.run.compare import Comparison
from ppc.run.launch import ForkServer
from ppc.run.verify import verify

SPECS = Path(__file__).parents[1] / "specs"

linear = """
def build():
    return nn.Linear(5, 1)
"""


def make_spec(folder: Path, code: str = linear, **sections) -> Spec:
    """The spec of the model in `code`, Python text with a function `build`.

    Sections are merged over a training of 4 samples a step in 2 microbatches, on one CPU.
    """
    (folder / "net.py").write_text(f"import torch\nimport torch.nn as nn\n\n{code}")
    tree = {
        "model": {"factory": "net.py:build", "loss": "mse_loss"},
        "data": {
            "source": "random",
            "samples": 10,
            "fields": {"x": {"shape": [5]}, "y": {"shape": [1]}},
        },
        "train": {"global_batch": 4, "steps": 3, "optimizer": {"name": "sgd", "lr": 0.1}},
        "cluster": {"devices_per_node": 1, "device": "cpu"},
        "parallel": {"pipeline": 1, "microbatches": 2},
    }
    for name, section in sections.items():
        tree[name] = section if name == "data" else {**tree.get(name, {}), **section}
    if "epochs" in tree["train"]:
        del tree["train"]["steps"]
    path = folder / "job.yaml"
    path.write_text(json.dumps(tree))
    return load(path)


def vary(folder: Path, name: str, args: Mapping[str, object] | None = None, **sections) -> Spec:
    """The spec specs/NAME.yaml with other arguments of its model and other keys in its sections,
    None for one that goes, and on as many devices as its ranks need."""
    tree = YAML(typ="safe").load(SPECS / f"{name}.yaml")
    tree["model"]["args"] = tree["model"].get("args", {}) | (args or {})
    for key, section in sections.items():
        merged = tree[key] | section
        tree[key] = {name: value for name, value in merged.items() if value is not None}
    parallel = tree["parallel"]
    tree["cluster"]["devices_per_node"] = parallel["pipeline"] * parallel.get("data", 1)
    shutil.copytree(SPECS / "models", folder / "models", dirs_exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(tree))
    return load(path)


def prove(
    spec: Spec, server: ForkServer | None, *, steps: int | None = None, exact: bool = True
) -> Comparison:
    """The scripts of a spec do what the user's model does in one process."""
    found = verify(spec.path, steps=steps, exact=exact, timeout_s=60, fork_server=server)
    assert found.ok, str(found)
    return found


def plant(script: Path, right: str, wrong: str) -> None:
    """A fault in an emitted script."""
    text = script.read_text()
    assert right in text, f"{right!r} is no longer in {script.name}"
    script.write_text(text.replace(right, wrong))


def failed(comparison: Comparison) -> set[tuple[str, int | None]]:
    """Kind and step of what is not equal, if anything is."""
    assert not comparison.ok
    return {(row.kind, row.step) for row in comparison.rows if not row.ok}
