"""Datasets of the user's: workers, padding, what is refused; and the samples of one replica."""

import importlib
import sys
from collections import Counter
from dataclasses import asdict, replace
from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest
import torch
from emitted import emit
from readers import Reader, compare, forget, make, text_model

from ppc.emit.data import view_data
from ppc.emit.environment import environment
from ppc.errors import CaptureError, RunError
from ppc.frontend.capture.fields import read_fields
from ppc.frontend.samples import microbatches, read_samples, samples_of_step
from ppc.ir.plan import Mesh
from ppc.pipeline import lower

pytestmark = pytest.mark.torch

ROWS = """
import torch

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, i):
        size = 1 + i % 5
        tokens = torch.randint(0, 200, (size, 2)) + i
        return {"tokens": tokens[:, 0].tolist(), "labels": tokens[:, 1], "weight": 0.1 * i}
"""
PAD = {"pad": {"tokens": 0, "labels": -100}, "length": 6}
LOSS = {"loss": "net.py:loss", "coupled": "accept"}  # a mean of all weights
INTEGERS = {"dtype": "int64", "high": 200}
HEAD = "rank 0, stage 0, step {}: sample {} cannot be read: "
model = text_model.replace("def loss(logits, labels)", "def loss(logits, labels, weight)")
model = model.replace("cross_entropy(", "cross_entropy(weight.mean() * ")


def rows_spec(folder, data=PAD, rows=ROWS, **sections):
    (folder / "rows.py").write_text(rows)
    return make(folder, {"source": "rows.py:Rows"} | data, model, model=LOSS, **sections)


def changed(spec, rows: str) -> Reader:
    """The script's reader of rows that have changed since the script was made."""
    folder = spec.folder / "out"
    folder.mkdir()
    script = emit(spec).script()
    (folder / "rows.py").write_text(rows)
    forget()
    return Reader(spec, script, folder)


@pytest.mark.parametrize(
    ("workers", "last_batch", "device"),
    [(0, "keep", "cpu"), (1, "drop", "cpu"), (2, "keep", "cpu"), (0, "drop", "h100"),
     (2, "keep", "h100")],
)  # fmt: skip
def test_padded_samples_read_ahead(workers, last_batch, device, tmp_path):
    data = PAD | {"workers": workers, "last_batch": last_batch}
    train = {"steps": None, "epochs": 2}
    spec = rows_spec(tmp_path, data, stages=2, train=train, cluster={"device": device})
    scripts, gpu = compare(spec), device == "h100"
    assert all(("DataLoader" in script) is bool(workers) for script in scripts)
    assert all(("pin_memory=cuda" in script) is (gpu and workers > 0) for script in scripts)
    assert all(("def to_device(field)" in script) is gpu for script in scripts)


def test_padding_fills_up_to_the_length(tmp_path):
    spec = rows_spec(tmp_path)
    assert str(read_fields(spec)["tokens"]) == "i64[6]"
    tokens, labels = read_samples(spec).batch([2], ["tokens", "labels"], 0)
    assert tokens[0, 3:].tolist() == [0, 0, 0]
    assert labels[0, 3:].tolist() == [-100, -100, -100]
    assert tokens[0, :3].min() >= 2


@pytest.mark.parametrize("workers", [0, 1])
def test_a_longer_sample_is_refused(workers, tmp_path):
    spec = rows_spec(tmp_path, PAD | {"workers": workers})
    rows = ROWS.replace("1 + i % 5", "12 if i == 7 else 2")
    reader, step = changed(spec, rows), step_of(spec, 7)
    message = "ValueError: tokens has length 12; at most 6 is declared"
    refused(reader, step, HEAD.format(step + 1, 7) + message)
    with pytest.raises(RunError) as raised:
        read_samples(rows_spec(tmp_path, rows=rows)).read(7, 0)
    assert raised.value.message == "tokens of sample 7 has length 12; data.length is 6"
    assert raised.value.where.line


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_several_shapes_are_refused(workers, tmp_path):
    spec = rows_spec(tmp_path, {"workers": workers}, ROWS.replace("1 + i % 5", "4"))
    rows = ROWS.replace("1 + i % 5", "5 if i == 3 else 4")
    reader, step = changed(spec, rows), step_of(spec, 3)
    message = "ValueError: tokens has the shape [5], not [4]"
    refused(reader, step, HEAD.format(step + 1, 3) + message)
    with pytest.raises(RunError) as raised:
        read_samples(rows_spec(tmp_path, {}, rows)).read(3, 0)
    assert raised.value.message == "tokens of sample 3 has the shape [5], that of sample 0 [4]"
    assert raised.value.hint.endswith("pad: {tokens: 0}")


@pytest.mark.parametrize("workers", [0, 2])
def test_the_users_own_error_names_the_sample(workers, tmp_path):
    spec = rows_spec(tmp_path, PAD | {"workers": workers})
    rows = ROWS.replace("size = 1", "size = {5: 0}[i] if i == 4 else 1")
    reader, step = changed(spec, rows), step_of(spec, 4)
    refused(reader, step, HEAD.format(step + 1, 4) + "KeyError: 4")


def step_of(spec, sample: int) -> int:
    """The step of the first epoch that takes a sample."""
    return next(step for step in range(3) if sample in samples_of_step(spec, 11, step))


def refused(reader: Reader, step: int, message: str) -> None:
    """The steps before are read, this one is not."""
    for earlier in range(step):
        reader.batch(earlier)
    with pytest.raises(RuntimeError) as raised:
        reader.batch(step)
    assert str(raised.value).strip().endswith(message)
    reader.scope["ahead"] = None  # its workers end


wrong = {
    "no such field": ({"words": 0}, "the data has no field 'words'; it has tokens, labels, weight"),
    "one number": ({"weight": 0}, "a sample's weight is one number, with no length to fill up"),
    "a fraction": ({"labels": 0.5}, "labels is int64, which holds no 0.5"),
}


@pytest.mark.parametrize(("pad", "message"), wrong.values(), ids=wrong)
def test_padding_that_means_nothing(pad, message, tmp_path):
    with pytest.raises(CaptureError) as raised:
        read_fields(rows_spec(tmp_path, {"pad": pad, "length": 6}))
    assert raised.value.message == message


# ---------------------------------------------------------------------------------- replicas

tokens = {"source": "tokens", "dtype": "uint16", "sequence": 5}
random_fields = {"tokens": {"shape": [5], **INTEGERS}, "labels": {"shape": [5], **INTEGERS}}
sources = {
    "random": {"source": "random", "samples": 11, "fields": random_fields},
    "text": {"source": "text", "files": "a.txt", "sequence": 5},
    "tokens": tokens | {"files": "a.bin"},
    "several files": tokens | {"files": "*.tok"},
    "arrays": {"source": "arrays", "files": {"tokens": "tokens.npy", "labels": "labels.npy"}},
    "dataset": {"source": "rows.py:Rows"} | PAD,
    "workers": {"source": "rows.py:Rows", "workers": 1} | PAD,
}


def write_sources(folder: Path) -> None:
    """11 samples of every kind."""
    np.arange(56, dtype="<u2").tofile(folder / "a.bin")
    np.arange(31, dtype="<u2").tofile(folder / "b.tok")
    np.arange(26, dtype="<u2").tofile(folder / "c.tok")
    np.save(folder / "tokens.npy", np.arange(55).reshape(11, 5))
    np.save(folder / "labels.npy", np.arange(55).reshape(11, 5))
    (folder / "rows.py").write_text(ROWS)
    (folder / "a.txt").write_bytes(bytes(range(56)))


@pytest.mark.parametrize("source", sources)
def test_replicas_share_each_batch(source, tmp_path):
    """Each part of a batch goes to its replica, also where a short batch has none for some."""
    write_sources(tmp_path)
    code = model if source in ("dataset", "workers") else text_model
    spec = make(tmp_path, sources[source], code, model=LOSS)
    job, samples = lower(spec, tmp_path), read_samples(spec)
    fields, expected = [i.field for i in job.units[0].inputs], 0
    for replicas, count in ((2, 2), (3, 1), (4, 1)):
        readers = [replica_reader(spec, job, i, replicas, count) for i in range(replicas)]
        for step in range(3):
            numbers = samples_of_step(spec, samples.count, step)
            parts = torch.tensor(numbers).tensor_split(count * replicas)
            for replica, reader in enumerate(readers):
                found = reader(step)
                assert len(found) == count
                for part, batch in zip(parts[replica::replicas], found, strict=True):
                    if len(part):
                        expected += len(part)
                        assert all(map(torch.equal, batch, samples.batch(part.tolist(), fields, 0)))
    assert expected == 3 * 11


def replica_reader(spec, job, replica: int, replicas: int, count: int):
    """get_batch of one replica, of a plan with so many and with `count` microbatches each."""
    mesh = Mesh((("data", replicas),), tuple(range(replicas)))
    stages = tuple(replace(stage, mesh=mesh) for stage in job.plan.stages)
    plan = replace(job.plan, stages=stages, microbatches=count)
    view = asdict(view_data(spec, plan, job.units[0], job.paths))
    text = environment().get_template("data.j2").render(data=view, saved=False)
    modules = ["ast", "bisect", "functools", "glob", "itertools", "math", "os", "random"]
    modules += ["struct", "sys", "torch", "zlib"]
    scope = {name: importlib.import_module(name) for name in modules} | {"Path": Path}
    scope |= {"REPLICA": replica, "REPLICAS": replicas, "MICROBATCHES": count, "SAMPLES": 11}
    scope |= {"GLOBAL_BATCH": 4, "SEED": 0, "STEPS": 3, "HERE": "here", "device": "cpu"}
    scope["FOLDER"] = spec.folder
    if view["modules"]:
        forget()
        sys.path.insert(0, str(spec.folder))
        try:
            scope["make_dataset"] = importlib.import_module("rows").Rows
        finally:
            sys.path.remove(str(spec.folder))
    exec(text, scope)  # noqa: S102  # our own text
    return scope["get_batch"]


def test_a_replica_reads_its_own_samples_alone(tmp_path):
    """Of a Dataset, which may be slow."""
    write_sources(tmp_path)
    spec = rows_spec(tmp_path)
    job, read = lower(spec, tmp_path), []
    for replica in range(2):
        get_batch = replica_reader(spec, job, replica, 2, 2)
        dataset = get_batch.__globals__["dataset"]

        class Noted:
            def __getitem__(self, i, dataset=dataset):
                read.append(i)
                return dataset[i]

        get_batch.__globals__["dataset"] = Noted()
        for step in range(3):
            get_batch(step)
    assert Counter(read) == Counter(range(11))


def test_the_parts_of_a_replica_split_as_they_were():
    """What get_batch relies on: end to end, they are cut into microbatches in the same places."""
    for size, replicas, count in product(range(1, 25), (1, 2, 3, 5), (1, 2, 4)):
        parts, seen = torch.arange(size).tensor_split(count * replicas), Counter()
        for replica in range(replicas):
            mine = parts[replica::replicas]
            assert all(map(torch.equal, mine, torch.cat(mine).tensor_split(count)))
            seen.update(torch.cat(mine).tolist())
        assert seen == Counter(range(size))
        assert list(chain(*microbatches(range(size), count * replicas))) == list(range(size))


@pytest.mark.parametrize(
    "draws",
    ["self.seen = getattr(self, 'seen', 0) + 1", "self.seen = next(self.generator)"],
    ids=["a count", "a generator"],
)
def test_samples_that_are_others_when_they_are_read_again(tmp_path, draws):
    rows = ROWS.replace("size = 1 + i % 5", f"{draws}\n        size = 1 + i % 5").replace(
        "+ i\n", "+ i + self.seen\n"
    )
    rows = rows.replace(
        "    def __len__", "    generator = iter(range(10**9))\n\n    def __len__", 1
    )
    with pytest.raises(CaptureError, match=r"sample 0 of rows.py:Rows is another when it is read"):
        read_fields(rows_spec(tmp_path, rows=rows))
