"""What a script reads is what the language promises, sample for sample."""

import ast
import random
import sysconfig
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from emitted import emit
from readers import compare, make, model, text_model
from safetensors.torch import save_file

from ppc.emit.source_made import spell_value
from ppc.frontend.sources import copied_modules, data_paths
from ppc.ir.spec import Spec

pytestmark = pytest.mark.torch

fields = {"x": {"shape": [6]}, "y": {"shape": [6]}}
spreads = {
    "even": ({}, {"last_batch": "drop"}),
    "a short last batch": ({"samples": 11}, {}),
    "dropped": ({"samples": 11}, {"last_batch": "drop"}),
    "fewer samples than microbatches": ({"samples": 9}, {}),
    "one short batch": ({"samples": 3}, {}),
}


@pytest.mark.parametrize(("stages", "precision"), [(1, "fp64"), (2, "fp32")])
@pytest.mark.parametrize("spread", spreads)
def test_random(spread, precision, stages, tmp_path):
    changed, data = spreads[spread]
    data = {"source": "random", "samples": 12, "fields": fields} | changed | data
    spec = make(tmp_path, data, stages=stages, train={"precision": precision})
    scripts = compare(spec)
    uneven = data.get("last_batch") != "drop"
    assert ("def samples_of(step)" in scripts[0]) is uneven


@pytest.mark.parametrize("last_batch", ["keep", "drop"])
def test_epochs(last_batch, tmp_path):
    data = {"source": "random", "samples": 11, "fields": fields, "last_batch": last_batch}
    spec = make(tmp_path, data, train={"steps": None, "epochs": 3})
    (script,) = compare(spec)
    assert "EPOCHS, GLOBAL_BATCH, SEED = 3, 4, 0\n" in script


def test_more_microbatches_than_some_batches_have_samples(tmp_path):
    data = {"source": "random", "samples": 10, "fields": fields}
    compare(make(tmp_path, data, parallel={"microbatches": 3}))


kinds = {
    "x": {"shape": [6], "dtype": "float64"},
    "y": {"shape": [], "dtype": "int64", "low": -3, "high": 6},
}


def test_random_integers(tmp_path):
    code = model.replace("self.last(torch", "self.last(torch").replace("nn.Module", "nn.Module")
    data = {"source": "random", "samples": 8, "fields": {**fields, "y": kinds["y"]}}
    data["fields"]["y"]["low"] = 0
    spec = make(tmp_path, data, code, model={"loss": "cross_entropy"})
    assert "torch.randint, 0, 6, (), dtype=torch.int64" in compare(spec)[0]


def text_spec(folder: Path, files, **sections) -> Spec:
    data = {"source": "text", "files": files, "sequence": 5}
    return make(folder, data, text_model, model={"loss": "net.py:loss"}, **sections)


def write_texts(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    rng = random.Random(0)
    for name, size in (("b.txt", 31), ("a.txt", 17), ("c.md", 9), ("deep.txt", 0)):
        (folder / name).write_bytes(rng.randbytes(size))
    (folder / "dir.txt").mkdir(exist_ok=True)
    (folder / "sub" / "deeper").mkdir(exist_ok=True, parents=True)
    (folder / "sub" / "deeper" / "d.txt").write_bytes(rng.randbytes(40))


@pytest.mark.parametrize(
    ("files", "stages"),
    [
        ("data/*.txt", 1),
        ("data/**/*.txt", 2),
        (["data/c.md", "data/*.txt"], 2),
        (["data/*", "data/a.txt"], 2),
    ],
)
def test_text(files, stages, tmp_path):
    write_texts(tmp_path / "data")
    compare(text_spec(tmp_path, files, stages=stages))


def test_text_by_absolute_paths(tmp_path):
    write_texts(tmp_path / "data")
    (script,) = compare(text_spec(tmp_path, f"{tmp_path}/data/*.txt"))
    assert "root_dir" not in script


def test_text_of_the_standard_library(tmp_path):
    (script,) = compare(text_spec(tmp_path, ["{stdlib}/json/*.py", "{stdlib}/this.py"]))
    assert sysconfig.get_path("stdlib") not in script


@pytest.mark.parametrize("name", ["it's", 'a "b"', "run[1]/back\\slash/{x}/ünïcode/*"])
def test_text_in_folders_with_odd_names(name, tmp_path):
    """The folder's name is no pattern; the file's name here is itself one, escaped."""
    (tmp_path / name).mkdir(parents=True)
    write_texts(tmp_path / name / "data")
    spec = text_spec(tmp_path / name, "data/*.txt")
    compare(spec)
    compare(spec, tmp_path / "elsewhere")


def test_long_paths_stay_formatted(tmp_path):
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    write_texts(folder / "data")
    compare(text_spec(folder, ["data/*.txt", "data/*.md"]), tmp_path / "elsewhere")
    compare(text_spec(folder, "data/*.txt"), tmp_path / "elsewhere")


def arrays(count: int = 10) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(count, 6)).astype("f4"), "y": rng.normal(size=(count, 6))}


@pytest.mark.parametrize(
    ("version", "order", "stages"),
    [((1, 0), "C", 2), ((1, 0), "F", 1), ((2, 0), "C", 1), ((3, 0), "F", 2)],
)
def test_npy(order, version, stages, tmp_path):
    for name, array in arrays().items():
        with (tmp_path / f"{name}.npy").open("wb") as file:
            np.lib.format.write_array(file, np.array(array, order=order), version)
    data = {"source": "arrays", "files": {"x": "x.npy", "y": "y.npy"}}
    scripts = compare(make(tmp_path, data, stages=stages, train={"precision": "fp64"}))
    assert scripts[0].count(" = read_npy(") == 3 - stages  # only what a stage reads


@pytest.mark.parametrize("dtype", ["f2", "f8", "i1", "i2", "i4", "i8", "u1", "b1"])
def test_npy_dtypes(dtype, tmp_path):
    np.save(tmp_path / "x.npy", arrays()["x"].astype(dtype))
    np.save(tmp_path / "y.npy", arrays()["y"])
    code = model.replace("self.first(x)", "self.first(x.to(self.first.weight.dtype))")
    data = {"source": "arrays", "files": {"x": "x.npy", "y": "y.npy"}}
    compare(make(tmp_path, data, code))


def test_npy_of_one_number_a_sample(tmp_path):
    np.save(tmp_path / "x.npy", arrays()["x"])
    np.save(tmp_path / "y.npy", np.arange(10) % 6)
    data = {"source": "arrays", "files": {"x": "x.npy", "y": "y.npy"}}
    compare(make(tmp_path, data, model={"loss": "cross_entropy"}))


@pytest.mark.parametrize("stages", [1, 2])
def test_safetensors(stages, tmp_path):
    tensors = {name: torch.from_numpy(array) for name, array in arrays(11).items()}
    save_file(tensors, tmp_path / "train.safetensors", metadata={"made": "here"})
    compare(make(tmp_path, {"source": "arrays", "files": "train.safetensors"}, stages=stages))


@pytest.mark.parametrize("field", ["arrays", "samples", "text", "step", "i", "torch", "class_"])
def test_fields_may_bear_any_name(field, tmp_path):
    """Also one that the script itself uses."""
    np.save(tmp_path / "x.npy", arrays()["x"])
    np.save(tmp_path / "y.npy", arrays()["y"].astype("f4"))
    data = {"source": "arrays", "files": {field: "x.npy", "rows": "y.npy"}}
    compare(make(tmp_path, data, model={"loss": "mse_loss", "inputs": [field]}))


datasets = {
    "tuple": ("return self.x[i], self.y[i]", ["x", "y"]),
    "list": ("return [self.x[i], self.y[i].numpy()]", ["x", "y"]),
    "dict": ('return {"y": self.y[i], "x": self.x[i]}', []),
    "numbers": ("return self.x[i], i % 6", ["x", "y"]),
}


def dataset_spec(folder: Path, body: str, names: list[str], **sections) -> Spec:
    (folder / sections.pop("file", "points.py")).write_text(f"""
{sections.pop("header", "")}
import torch

class Points(torch.utils.data.Dataset):
    def __init__(self, count, scale=1.0, names=(), extra=None):
        generator = torch.Generator().manual_seed(3)
        self.x, self.y = (torch.randn(count, 6, generator=generator) * scale for _ in range(2))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        {body}
""")
    data = {
        "source": sections.pop("source", "points.py:Points"),
        "args": {
            "count": 11,
            "scale": 0.5,
            "names": ["a", 'b"'],
            "extra": {"deep": [1, None, True]},
        },
    }
    return make(folder, data | ({"fields": names} if names else {}), **sections)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", datasets)
def test_dataset(kind, stages, tmp_path):
    body, names = datasets[kind]
    loss = "cross_entropy" if kind == "numbers" else "mse_loss"
    scripts = compare(dataset_spec(tmp_path, body, names, stages=stages, model={"loss": loss}))
    assert "from points import Points as make_dataset\n" in scripts[0]


def test_dataset_of_single_tensors(tmp_path):
    code = model.replace("torch.tanh(self.first(x)))", "torch.tanh(self.first(x))).mean()")
    spec = dataset_spec(tmp_path, "return self.x[i]", ["x"], code=code, model={"loss": "output"})
    compare(spec)


def test_a_file_may_bear_any_name_and_import_its_neighbours(tmp_path):
    (tmp_path / "shapes.py").write_text("import colours\nwidth = 6\n")
    (tmp_path / "colours.py").write_text("import shapes\n")
    body = "return self.x[i][:shapes.width], self.y[i]"
    for number, file in enumerate(["my-data.py", "random.py", "1st.py", "class.py", "rank0.py"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in ("shapes.py", "colours.py"):
            (folder / name).write_text((tmp_path / name).read_text())
        named = {"file": file, "source": f"{file}:Points", "header": "import shapes"}
        spec = dataset_spec(folder, body, ["x", "y"], **named)
        (module,) = data_paths(spec, folder / "out")
        assert module.removesuffix(".py").isidentifier()
        assert list(copied_modules(spec)) == [module, "shapes.py", "colours.py"]
        script = emit(spec).script()
        ast.parse(script)
        assert f"from {module.removesuffix('.py')} import Points as make_dataset\n" in script


@pytest.mark.parametrize(
    "value",
    [1, -2.5, 1e-9, float("inf"), True, None, 'it\'s\n"x"', (1, ("a", {"b": None})), {"k": (1.0,)}],
)
def test_values_of_the_spec_come_back(value):
    def plain(item):
        if isinstance(item, tuple):
            return [plain(part) for part in item]
        return {k: plain(v) for k, v in item.items()} if isinstance(item, dict) else item

    assert eval(spell_value(value)) == plain(value)  # noqa: S307  # our own text


def test_ranks_agree_on_the_data(tmp_path):
    """What they compare before the first message covers what each of them reads."""
    write_texts(tmp_path / "data")
    scripts = compare(text_spec(tmp_path, "data/*.txt", stages=2))
    assert all('"data": zlib.crc32(raw)' in script for script in scripts)
    for one, other in pairwise(scripts):
        assert one.count("def order(epoch)") == other.count("def order(epoch)") == 1
