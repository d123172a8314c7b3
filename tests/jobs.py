"""Small jobs for tests: a spec and its model, written to a folder and loaded from there."""

import json
from pathlib import Path

from ppc.frontend.load import load
from ppc.ir.spec import Spec

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
        tree[name] = section if name == "data" else {**tree[name], **section}
    path = folder / "job.yaml"
    path.write_text(json.dumps(tree))
    return load(path)
