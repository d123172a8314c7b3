"""What a compilation comes from: the user's files by their imports, the versions of the others'."""

import torch
from jobs import make_spec

from ppc.frontend.load import load
from ppc.frontend.origin import find_origin

FILES = {
    "layers.py": "import json, far.away, missing\nfrom nets import deep\n",
    "nets/__init__.py": "",
    "nets/deep.py": "from . import wide\nfrom .parts.one import two\nfrom ..above import x\n",
    "nets/wide.py": "import layers\n",
    "nets/parts/__init__.py": "from .. import narrow\n",
    "nets/parts/one.py": "def broken(:\n",
    "nets/narrow.py": "",
    "nets/unused.py": "",
    "losses.py": "import numpy as np\nfrom torch import nn\n",
    "far.py": "",
    "cycle.py": "import cycle, net\n",
}


def write(folder):
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    code = "from layers import a\nimport cycle\ndef build(): ...\n"
    loss = "losses.py:loss"
    (folder / "losses.py").write_text(FILES["losses.py"] + "def loss(): ...\n")
    return make_spec(folder, code, model={"loss": loss})


def test_files_that_are_imported(tmp_path):
    origin = find_origin(write(tmp_path))
    assert sorted(origin.sources) == sorted({"net.py", *FILES} - {"nets/unused.py"})
    assert all(len(digest) == 64 for digest in [origin.spec, *origin.sources.values()])


def test_versions(tmp_path):
    versions = find_origin(write(tmp_path)).versions
    assert list(versions) == ["numpy", "torch"]
    assert versions["torch"] == torch.__version__.partition("+")[0]


def test_an_edit_changes_one_digest(tmp_path):
    before = find_origin(write(tmp_path))
    (tmp_path / "nets/wide.py").write_text("import layers  # anew\n")
    after = find_origin(load(tmp_path / "job.yaml"))
    changed = {n for n in before.sources if before.sources[n] != after.sources[n]}
    assert changed == {"nets/wide.py"}
    assert before.spec == after.spec


def test_a_module_that_is_installed(tmp_path):
    spec = make_spec(tmp_path, model={"factory": "torch.nn:Linear"})
    assert find_origin(spec).sources == {}
    assert list(find_origin(spec).versions) == ["torch"]
