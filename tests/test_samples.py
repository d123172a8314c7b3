"""Each source gives the samples that the language promises; each epoch takes each of them once."""

import sysconfig
import zlib
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import make_spec
from safetensors.torch import save_file

from ppc.errors import RunError
from ppc.frontend.samples import (
    microbatches,
    read_samples,
    samples_of_step,
    steps_per_epoch,
    total_steps,
)
from ppc.ir.plan import Mesh, Plan, Stage

pytestmark = pytest.mark.torch


def test_text_is_bytes_and_the_labels_are_one_further_on(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"efg")
    (tmp_path / "a.txt").write_bytes(b"abcd")
    (tmp_path / "c.txt").mkdir()
    (tmp_path / "first.md").write_bytes(b"01")
    data = {"source": "text", "files": ["*.md", "*.txt"], "sequence": 3}
    samples = read_samples(make_spec(tmp_path, data=data, train={"global_batch": 2}))
    assert samples.count == 2  # of 9 bytes the last is only a label
    tokens, labels = samples.batch([0, 1], ["tokens", "labels"], 0)
    assert tokens.dtype == labels.dtype == torch.int64
    assert [bytes(row.tolist()) for row in tokens] == [b"01a", b"bcd"]
    assert [bytes(row.tolist()) for row in labels] == [b"1ab", b"cde"]


def test_stdlib_stands_for_its_folder(tmp_path):
    data = {"source": "text", "files": "{stdlib}/this.py", "sequence": 16}
    spec = make_spec(tmp_path, data=data, train={"global_batch": 2})
    (tokens,) = read_samples(spec).batch([0], ["tokens"], 0)
    text = Path(sysconfig.get_path("stdlib"), "this.py").read_bytes()
    assert bytes(tokens[0].tolist()) == text[:16]


@pytest.mark.parametrize("file_format", ["npy", "safetensors"])
def test_arrays_count_samples_first_and_floats_get_the_precision(tmp_path, file_format):
    x, y = np.arange(12, dtype=np.float32).reshape(6, 2) / 7, np.arange(6, dtype=np.int32)
    if file_format == "npy":
        np.save(tmp_path / "x.npy", x)
        np.save(tmp_path / "y.npy", y)
        files = {"x": "x.npy", "y": "y.npy"}
    else:
        save_file({"x": torch.tensor(x), "y": torch.tensor(y)}, tmp_path / "all.safetensors")
        files = "all.safetensors"
    data = {"source": "arrays", "files": files}
    samples = read_samples(make_spec(tmp_path, data=data, train={"precision": "fp64"}))
    assert samples.count == 6
    got_x, got_y = samples.batch([5, 1], ["x", "y"], 0)
    assert got_x.dtype == torch.float64
    assert torch.equal(got_x, torch.tensor(x[[5, 1]]).double())
    assert torch.equal(got_y, torch.tensor([5, 1], dtype=torch.int32))


def test_a_random_sample_depends_on_seed_field_and_number_alone(tmp_path):
    fields = {"x": {"shape": [2, 3]}, "y": {"shape": [4], "dtype": "int32", "low": 5, "high": 9}}
    data = {"source": "random", "samples": 9, "fields": fields}
    spec = make_spec(tmp_path, data=data, train={"precision": "fp64", "seed": 3})
    x, y = read_samples(spec).batch([7, 2], ["x", "y"], 0)
    generator = torch.Generator().manual_seed(zlib.crc32(b"3 x 7"))
    assert torch.equal(x[0], torch.randn(2, 3, generator=generator).double())
    generator = torch.Generator().manual_seed(zlib.crc32(b"3 y 2"))
    expected = torch.randint(5, 9, (4,), generator=generator, dtype=torch.int32)
    assert torch.equal(y[1], expected)
    assert y.dtype == torch.int32


@pytest.mark.parametrize(
    "sample", ["(i, np.full(2, i, np.float32))", "{'y': np.full(2, i), 'n': i}"]
)
def test_a_dataset_gives_tuples_or_dicts_of_numbers_and_arrays(tmp_path, sample):
    code = f"""
import numpy as np

class Squares:
    def __init__(self, size):
        self.size = size
    def __len__(self):
        return self.size
    def __getitem__(self, i):
        return {sample}
"""
    (tmp_path / "squares.py").write_text(code)
    data = {"source": "squares.py:Squares", "args": {"size": 5}}
    if sample.startswith("("):
        data["fields"] = ["n", "y"]
    samples = read_samples(make_spec(tmp_path, data=data))
    assert samples.count == 5
    n, y = samples.batch([4, 0], ["n", "y"], 0)
    assert torch.equal(n, torch.tensor([4, 0]))
    assert y.tolist() == [[4, 4], [0, 0]]


def test_too_few_samples_for_a_batch_are_a_complaint(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(3))
    data = {"source": "arrays", "files": {"x": "x.npy"}, "last_batch": "drop"}
    with pytest.raises(RunError, match="3 samples make no batch of 4"):
        read_samples(make_spec(tmp_path, data=data))


@pytest.mark.parametrize("name", ["short.txt", "gone/*.txt", ""])
def test_texts_that_are_not_there_or_too_short(tmp_path, name):
    """An absolute pattern is looked for when the data is read; so is a file's length."""
    (tmp_path / "short.txt").write_text("a" * 8)
    files = f"{tmp_path}/{name}"
    with pytest.raises(RunError) as raised:
        read_samples(make_spec(tmp_path, data={"source": "text", "files": files, "sequence": 8}))
    assert str(raised.value).endswith(
        f": the files of {files} hold no run of 9, a sample and what follows it\n"
        "hint: name files that are there, and long enough"
    )


@pytest.mark.parametrize(("last_batch", "steps", "last"), [("keep", 3, 2), ("drop", 2, 4)])
def test_an_epoch_takes_each_sample_once(tmp_path, last_batch, steps, last):
    fields = {"x": {}, "y": {}}
    data = {"source": "random", "samples": 10, "fields": fields, "last_batch": last_batch}
    spec = make_spec(tmp_path, data=data, train={"seed": 1})
    assert steps_per_epoch(spec, 10) == steps
    epochs = [
        [samples_of_step(spec, 10, epoch * steps + step) for step in range(steps)]
        for epoch in range(2)
    ]
    for epoch in epochs:
        assert [len(batch) for batch in epoch] == [4] * (steps - 1) + [last]
        assert max(Counter(list(chain(*epoch))).values()) == 1
    assert epochs[0] != epochs[1]
    generator = torch.Generator().manual_seed(zlib.crc32(b"1 epoch 1"))
    assert list(chain(*epochs[1])) == torch.randperm(10, generator=generator).tolist()[: steps * 4]


def test_the_length_in_epochs(tmp_path):
    spec = make_spec(tmp_path)
    assert total_steps(spec, 10) == 3
    train = replace(spec.train, steps=None, epochs=3)
    assert total_steps(replace(spec, train=train), 10) == 9


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 4))
def test_microbatches_have_the_sizes_of_the_plan(samples, count, replicas):
    runs = microbatches(list(range(samples)), count * replicas)
    assert list(chain(*runs)) == list(range(samples))
    stages = (Stage(0, (), Mesh((("data", replicas),), tuple(range(replicas)))),)
    plan = Plan(stages=stages, placements={}, global_batch=samples, microbatches=count, even=False)
    assert [len(run) for run in runs] == [size for size in plan.sizes(samples) if size]
