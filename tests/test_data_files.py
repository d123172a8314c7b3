"""Files of tokens and arrays of every kind: what scripts read of them, what is refused."""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from emitted import emit
from jobs import make_spec
from readers import Reader, compare, make, text_model
from safetensors.torch import save_file

from ppc.errors import CaptureError, SpecError
from ppc.frontend.capture.fields import read_fields
from ppc.pipeline import compile

pytestmark = pytest.mark.torch

token_model = text_model.replace("self.first(tokens)", "self.first(tokens % 256)").replace(
    "labels.flatten()", "labels.flatten() % 256"
)


def token_spec(folder: Path, files, dtype="uint16", sequence=5, **sections):
    data = {"source": "tokens", "files": files, "dtype": dtype, "sequence": sequence}
    return make(folder, data, token_model, model={"loss": "net.py:loss"}, **sections)


def opened(spec, script: str = "") -> Reader:
    folder = spec.folder / "out"
    folder.mkdir(exist_ok=True)
    return Reader(spec, script or emit(spec).script(), folder)


def write_tokens(folder: Path, dtype: str) -> dict[str, np.ndarray]:
    """Files whose samples do not fill them, with tokens that no signed integer holds."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    made = {}
    for name, count in (("b.bin", 31), ("a.bin", 17), ("c.tok", 6)):
        made[name] = rng.integers(0, np.iinfo(dtype).max, count, dtype, endpoint=True)
        made[name][1::2] = np.iinfo(dtype).max
        made[name].astype(np.dtype(dtype).newbyteorder("<")).tofile(folder / name)
    return made


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize(
    "files", ["data/b.bin", "data/*.bin", ["data/c.tok", "data/*.bin"], ["data/a.bin", "data/a*"]]
)
def test_tokens(files, dtype, tmp_path):
    write_tokens(tmp_path / "data", dtype)
    (tmp_path / "data" / "dir.bin").mkdir()
    scripts = compare(token_spec(tmp_path, files, dtype, stages=2))
    assert ("read_run" in scripts[0]) is (files != "data/b.bin")


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_the_tokens_are_those_of_the_file(dtype, tmp_path):
    """The reference apart: sample i of a file begins at token 5 * i of it."""
    files = write_tokens(tmp_path / "data", dtype)
    spec = token_spec(tmp_path, "data/*.bin", dtype)
    expected = [
        (name, files[name][5 * i : 5 * i + 6].astype(int).tolist())
        for name, count in (("a.bin", 3), ("b.bin", 6))
        for i in range(count)
    ]
    reader = opened(spec)
    steps = [reader.batch(step) for step in range(3)]  # an epoch of 9 samples in steps of 4
    found = [
        [*tokens.tolist(), labels[-1].item()]
        for step in steps
        for part in step
        for tokens, labels in zip(*part, strict=True)
    ]
    assert sorted(found) == sorted(run for _, run in expected)
    assert all(torch.equal(t[:, 1:], n[:, :-1]) for step in steps for t, n in step)


@pytest.mark.parametrize("name", ["run[1]", "it's", "ünïcode"])
def test_tokens_in_folders_with_odd_names(name, tmp_path):
    write_tokens(tmp_path / name, "uint16")
    compare(token_spec(tmp_path / name, "a.bin"))
    compare(token_spec(tmp_path / name, "*.bin"), tmp_path / "elsewhere")


def test_tokens_by_absolute_paths(tmp_path):
    write_tokens(tmp_path, "uint16")
    for files in (f"{tmp_path}/a.bin", f"{tmp_path}/*.bin"):
        assert str(tmp_path) in compare(token_spec(tmp_path, files))[0]


def test_a_large_file_is_not_read_whole(tmp_path):
    """4 GiB that take no room on the disk, and none in memory."""
    path = tmp_path / "large.bin"
    path.touch()
    os.truncate(path, 2**32)

    def held() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    spec, before = token_spec(tmp_path, "large.bin", sequence=2**12), held()
    reader = opened(spec)
    assert reader.scope["SAMPLES"] == 2**19 - 1
    assert len(reader.batch(0)) == 2
    assert held() - before < 2**29


def test_ranks_compare_the_ends_of_files(tmp_path):
    path = tmp_path / "a.bin"
    np.arange(2**20, dtype="<u2").tofile(path)  # two MiB
    spec = token_spec(tmp_path, "a.bin", sequence=2**10, stages=2)
    emitted = emit(spec)
    assert '"data": fingerprint(FOLDER / "../a.bin")' in emitted.script()
    take = opened(spec, emitted.script()).scope["fingerprint"]
    seen = [take(path)]
    for place in (0, -1):
        tokens = np.fromfile(path, "<u2")
        tokens[place] ^= 1
        tokens.tofile(path)
        seen.append(take(path))
    np.append(tokens, [1, 2]).astype("<u2").tofile(path)
    seen.append(take(path))
    assert len(set(seen)) == 4
    alone = emit(token_spec(tmp_path, "a.bin", sequence=2**10))
    assert "fingerprint" not in alone.script()


def test_ranks_compare_every_file(tmp_path):
    write_tokens(tmp_path, "uint16")
    spec = token_spec(tmp_path, "*.bin", stages=2)
    script = emit(spec).script()
    fact = "tuple(fingerprint(FOLDER / file) for file in files)"
    assert fact in script
    scope = opened(spec, script).scope
    assert [size for size, _ in eval(fact, scope)] == [34, 62]  # noqa: S307  # our own text


def test_tokens_that_make_no_batch(tmp_path):
    """Two samples of 5 tokens, and the token after them."""
    np.arange(11).astype("<u2").tofile(tmp_path / "a.bin")
    data = {"source": "tokens", "files": "a.bin", "dtype": "uint16", "sequence": 5}
    data["last_batch"] = "drop"
    with pytest.raises(SpecError, match="2 samples make no batch of 4, and last_batch drops them"):
        make(tmp_path, data, token_model, model={"loss": "net.py:loss"})


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (31, "a.bin has 31 bytes, no whole number of uint16 tokens"),
        (10, "a.bin has 5 tokens; a sample and its labels need 6"),
        (0, "a.bin has 0 tokens; a sample and its labels need 6"),
    ],
)
def test_files_that_hold_no_sample_are_refused(size, message, tmp_path):
    """When compiling, and when a script finds what has changed since."""
    write_tokens(tmp_path, "uint16")
    spec = token_spec(tmp_path, "a.bin")
    script = emit(spec).script()
    (tmp_path / "a.bin").write_bytes(bytes(size))
    with pytest.raises(SpecError) as raised:
        token_spec(tmp_path, "*.bin")
    assert raised.value.message == message
    with pytest.raises(SystemExit) as ended:
        opened(spec, script)
    found = tmp_path / "out" / ".." / "a.bin"
    assert ended.value.code == f"{found} has {size} bytes, not 6 or more tokens of 2"


def test_a_token_beyond_the_embedding_is_explained(tmp_path):
    write_tokens(tmp_path, "uint16")
    data = {"source": "tokens", "files": "a.bin", "dtype": "uint16", "sequence": 5}
    spec = make(tmp_path, data, text_model, model={"loss": "net.py:loss"})
    with pytest.raises(CaptureError, match="index out of range in self") as raised:
        compile(spec)
    assert raised.value.hint == "an embedding with more rows, or smaller numbers in the data"


# ------------------------------------------------------------------------------------ arrays

array_model = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        x = x.abs() if x.is_complex() else x
        x = x.to(self.first.weight.dtype).flatten(1)
        return self.last(torch.tanh(self.first(x)))

def build():
    return Net()
"""
integers = np.random.default_rng(0).integers(0, 2, (10, 1, 3, 2))
targets = np.random.default_rng(1).normal(size=(10, 6)).astype("f4")


def array_spec(folder: Path, files=None, **sections):
    files = files or {"x": "x.npy", "y": "y.npy"}
    sections = {"model": {"inputs": ["x"], "loss": "mse_loss"}} | sections
    return make(folder, {"source": "arrays", "files": files}, array_model, **sections)


@pytest.mark.parametrize(
    ("dtype", "order"),
    [("u2", "C"), ("u2", "F"), ("u4", "C"), ("u8", "F"), ("c8", "C"), ("c16", "F"), ("f2", "F"),
     ("b1", "C"), ("i2", "C")],
)  # fmt: skip
def test_npy_of_any_shape_and_dtype(dtype, order, tmp_path):
    np.save(tmp_path / "x.npy", np.array(integers * 3, dtype=dtype, order=order))
    np.save(tmp_path / "y.npy", targets)
    with (tmp_path / "x.npy").open("ab") as file:
        file.write(b"more")  # what follows an array is not read
    compare(array_spec(tmp_path))


@pytest.mark.parametrize(
    "dtype", ["uint16", "uint32", "uint64", "complex64", "bfloat16", "bool", "int8"]
)
def test_safetensors_of_any_shape_and_dtype(dtype, tmp_path):
    x = torch.from_numpy(integers * 3).to(getattr(torch, dtype))
    save_file({"x": x, "y": torch.from_numpy(targets)}, tmp_path / "xy.safetensors")
    compare(array_spec(tmp_path, "xy.safetensors"))


def test_safetensors_that_lie_at_odd_places(tmp_path):
    x = np.arange(60, dtype="u1")
    head = {
        "x": {"dtype": "U8", "shape": [10, 6], "data_offsets": [0, 60]},
        "y": {"dtype": "F32", "shape": [10, 6], "data_offsets": [60, 300]},
    }
    text = json.dumps(head).encode()
    text += b" " * (3 - len(text) % 4)  # so that the numbers begin where no float may
    body = x.tobytes() + targets.tobytes()
    (tmp_path / "xy.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    compare(array_spec(tmp_path, "xy.safetensors"))


refused = {
    "big-endian": (
        np.zeros((10, 6), ">f4"),
        "x.npy cannot be read: its numbers are big-endian, >f4, not <f4",
    ),
    "one number": (
        np.float32(3),
        "x is one number; an array's first dimension counts the samples",
    ),
    "another count": (
        np.zeros((9, 6)), "the arrays count different numbers of samples: x 9, y 10"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("array", "message"), refused.values(), ids=refused)
def test_arrays_that_are_refused(array, message, tmp_path):
    np.save(tmp_path / "x.npy", array)
    np.save(tmp_path / "y.npy", targets)
    with pytest.raises(CaptureError) as raised:
        read_fields(array_spec(tmp_path))
    assert raised.value.message == message
    assert raised.value.where.file.endswith("job.yaml")


def test_floats_of_eight_bits_are_refused(tmp_path):
    x = torch.zeros(10, 6).to(torch.float8_e4m3fn)
    save_file({"x": x, "y": torch.from_numpy(targets)}, tmp_path / "xy.safetensors")
    with pytest.raises(CaptureError) as raised:
        read_fields(array_spec(tmp_path, "xy.safetensors"))
    assert raised.value.message == "x has the dtype float8_e4m3fn, which scripts do not read"


def test_specs_of_tokens_and_padding(tmp_path):
    """What `pad` and `length` say of each other is checked before anything runs."""
    (tmp_path / "d.py").write_text("class D: ...")
    cases = {
        '{"pad": {"x": 0}}': "data.pad needs data.length, what to fill up to",
        '{"length": 4}': "data.length is that of padded fields; data.pad names none",
        '{"length": 4, "pad": {"z": 0}}': "the data has no field 'z'",
        '{"length": 4, "pad": {"x": "a"}}': "data.pad.x is 'a', not a number",
        '{"workers": -1}': "data.workers is -1; it must be at least 0",
    }
    for keys, message in cases.items():
        data = {"source": "d.py:D", "fields": ["x", "y"], **json.loads(keys)}
        with pytest.raises(SpecError) as raised:
            make_spec(tmp_path, data=data)
        assert raised.value.message == message
