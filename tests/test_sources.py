"""Where models and data come from: files beside the spec and their siblings, installed modules,
datasets, arrays."""

import sys

import numpy as np
import pytest
from bindings import bound
from jobs import make_spec
from nets import net
from safetensors.numpy import save_file

from ppc.errors import CaptureError
from ppc.frontend.capture.capture import capture

pytestmark = pytest.mark.torch


def test_a_file_with_siblings(tmp_path):
    (tmp_path / "layers.py").write_text(
        "import torch.nn as nn\n\nclass Wide(nn.Linear):\n    pass\n"
    )
    code = net(before="from layers import Wide").replace("self.a = nn.Linear", "self.a = Wide")
    bound(tmp_path, code)
    assert str(tmp_path) not in sys.path


def test_an_edit_counts(tmp_path):
    assert bound(tmp_path, net())[1]["x"] == "f32[batch, 5]"
    graph = capture(make_spec(tmp_path, net("return self.b(self.a(x).sin())")))
    assert "aten.sin.default" in [op.target for op in graph.ops]


def test_an_edit_of_a_sibling_counts(tmp_path):
    code = net("return self.b(act(self.a(x)))", before="from layers import act")
    for name in ("sin", "cos"):
        (tmp_path / "layers.py").write_text(f"def act(x):\n    return x.{name}()  # {name * 9}\n")
        graph = capture(make_spec(tmp_path, code))
        assert f"aten.{name}.default" in [op.target for op in graph.ops]


def test_siblings_of_one_name_in_two_folders(tmp_path):
    code = net("return self.b(act(self.a(x)))", before="from layers import act")
    for name in ("sin", "cos"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "layers.py").write_text(f"def act(x):\n    return x.{name}()\n")
        graph = capture(make_spec(folder, code))
        assert f"aten.{name}.default" in [op.target for op in graph.ops]


def test_an_installed_module(tmp_path, monkeypatch):
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    code = f"import torch\nimport torch.nn as nn\n{net()}"
    (tmp_path / "my_package" / "nets.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    bound(tmp_path, "", model={"factory": "my_package.nets:build"})
    bound(tmp_path, "", model={"factory": "my_package.nets:Net"})


def test_arguments_of_the_factory(tmp_path):
    code = """
import types

def config(width):
    return types.SimpleNamespace(width=width)

def build(config, sizes, extra=None):
    assert sizes == [1, {"a": 2.5}]
    return nn.Sequential(nn.Linear(5, config.width), nn.Linear(config.width, 1))
"""
    args = {"config": {"factory": "net.py:config", "args": {"width": 6}}, "sizes": [1, {"a": 2.5}]}
    spec = make_spec(tmp_path, code, model={"args": args})
    assert capture(spec).parameters["0.weight"].meta.shape == (6, 5)


dataset = """
import numpy as np

class Data:
    def __init__(self, scale=1.0):
        self.scale = scale
    def __len__(self):
        return 6
    def __getitem__(self, i):
        x, y = torch.full((5,), self.scale * i), np.float32([i])
        return {sample}
"""


@pytest.mark.parametrize(("sample", "fields"), [
    ("x, y", ["x", "y"]),
    ("[x, y]", ["x", "y"]),
    ("{'y': y, 'x': x}", []),
])  # fmt: skip
def test_datasets(sample, fields, tmp_path):
    (tmp_path / "data.py").write_text("import torch\n" + dataset.replace("{sample}", sample))
    data = {"source": "data.py:Data", "args": {"scale": 2.0}, "fields": fields}
    _, found = bound(tmp_path, net(), data=data)
    assert found == {"x": "f32[batch, 5]", "y": "f32[batch, 1]"}


def test_a_dataset_of_single_tensors(tmp_path):
    (tmp_path / "data.py").write_text("import torch\n" + dataset.replace("{sample}", "x"))
    data = {"source": "data.py:Data", "fields": ["x"]}
    code = net("return self.b(self.a(x)).pow(2).mean()")
    _, found = bound(tmp_path, code, data=data, model={"loss": "output"})
    assert found == {"x": "f32[batch, 5]"}


def test_a_dataset_with_other_fields(tmp_path):
    (tmp_path / "data.py").write_text("import torch\n" + dataset.replace("{sample}", "x, y, y"))
    with pytest.raises(
        CaptureError, match=r"a sample of data.py:Data has 3 elements, data.fields na"
    ):
        capture(make_spec(tmp_path, net(), data={"source": "data.py:Data", "fields": ["x", "y"]}))


def test_a_dataset_that_fails(tmp_path):
    (tmp_path / "data.py").write_text("import torch\n" + dataset.replace("{sample}", "x, 1 / i"))
    with pytest.raises(
        CaptureError, match=r"data.py:\d+: data.py:Data: reading sample 0 failed: Zer"
    ):
        capture(make_spec(tmp_path, net(), data={"source": "data.py:Data", "fields": ["x", "y"]}))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_arrays(dtype, tmp_path):
    arrays = {"x": np.ones((7, 5), dtype), "y": np.zeros((7, 1), dtype)}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    save_file(arrays, tmp_path / "data.safetensors")
    for files in ({"x": "x.npy", "y": "y.npy"}, "data.safetensors"):
        _, found = bound(tmp_path, net(), data={"source": "arrays", "files": files})
        assert found == {"x": "f32[batch, 5]", "y": "f32[batch, 1]"}


def test_arrays_of_different_lengths(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((7, 5)))
    np.save(tmp_path / "y.npy", np.ones((6, 1)))
    data = {"source": "arrays", "files": {"x": "x.npy", "y": "y.npy"}}
    with pytest.raises(CaptureError, match="count different numbers of samples: x 7, y 6"):
        capture(make_spec(tmp_path, net(), data=data))


broken = {
    "no array at all": (b"not an array", "cannot be read: "),
    "cut short": (b"", "cannot be read: "),
    "objects": (np.array([{}, {}], dtype=object), "cannot be read: "),
    "strings": (
        np.array(["a", "b"]),
        "cannot be read: can't convert np.ndarray of type numpy.str_",
    ),
}


@pytest.mark.parametrize(("content", "text"), broken.values(), ids=broken)
def test_files_that_hold_no_numbers(content, text, tmp_path):
    np.save(tmp_path / "y.npy", np.zeros((2, 1), np.float32))
    if isinstance(content, bytes):
        (tmp_path / "x.npy").write_bytes(content)
    else:
        np.save(tmp_path / "x.npy", content)
    data = {"source": "arrays", "files": {"y": "y.npy", "x": "x.npy"}}
    with pytest.raises(CaptureError) as raised:
        capture(make_spec(tmp_path, net(), data=data))
    assert raised.value.message.startswith("x.npy ")
    assert text in raised.value.message
    assert raised.value.where.file.endswith("job.yaml")


def test_a_broken_safetensors_file(tmp_path):
    (tmp_path / "all.safetensors").write_bytes(b"nothing of the kind")
    data = {"source": "arrays", "files": "all.safetensors"}
    with pytest.raises(CaptureError, match=r"job\.yaml:.*all.safetensors cannot be read"):
        capture(make_spec(tmp_path, net(), data=data))
