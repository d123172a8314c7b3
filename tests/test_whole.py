"""Fields without a batch dimension: they go whole to every microbatch of every rank that reads
them, and where nothing else is there to divide, microbatches and replicas are refused."""

import numpy as np
import pytest
import torch
from emitted import emit
from jobs import make_spec, prove, vary
from safetensors.torch import save_file

from ppc.errors import CaptureError, Complaints, SpecError
from ppc.frontend.capture.capture import capture
from ppc.frontend.samples import read_samples
from ppc.pipeline import lower

pytestmark = pytest.mark.dist

CODE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x, *, scale):
        x = torch.tanh(self.a(x)) * scale
        x = torch.tanh(self.b(x)) * scale.sum(0)
        return self.c(x)

def build():
    return Net()
"""
X, Y, SCALE = {"shape": [5]}, {"shape": [1]}, {"shape": [3, 1]}


def scaled(folder, data, stages=2, code=CODE, **sections):
    parallel = {"pipeline": stages, "microbatches": 2} | sections.pop("parallel", {})
    devices = {"devices_per_node": stages * parallel.get("data", 1)}
    return make_spec(folder, code, data=data, parallel=parallel, cluster=devices, **sections)


def write_npy(folder):
    generator = np.random.default_rng(0)
    for name, shape in {"x": (11, 5), "scale": (5,), "y": (11, 1)}.items():
        np.save(folder / f"{name}.npy", generator.random(shape))
    return {"source": "arrays", "files": {n: f"{n}.npy" for n in ("scale", "x", "y")}}


def write_safetensors(folder):
    tensors = {"scale": torch.rand(5), "x": torch.rand(11, 5), "y": torch.rand(11, 1)}
    save_file(tensors, folder / "all.safetensors")
    return {"source": "arrays", "files": "all.safetensors"}


def write_random(_):
    return {"source": "random", "samples": 11, "fields": {"x": X, "scale": {"shape": [5]}, "y": Y}}


dataset = """
import torch

class Points:
    def __init__(self):
        self.scale = [0.5, 1.0, 2.0, 0.25, 3.0]

    def __len__(self):
        return 11

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return torch.rand(5, generator=generator), torch.rand(1, generator=generator)
"""


def write_dataset(folder):
    (folder / "points.py").write_text(dataset)
    return {"source": "points.py:Points", "fields": ["x", "y"]}


def write_dataset_with_workers(folder):
    return write_dataset(folder) | {"workers": 1}


@pytest.mark.parametrize(
    "write", [write_npy, write_safetensors, write_random, write_dataset, write_dataset_with_workers]
)
@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_c7_a_scale_for_all_samples(tmp_path, fork_server, write, stages):
    """Of batches that divide unevenly; the middle stage of three reads nothing else."""
    data = write(tmp_path) | {"whole": ["scale"]}
    spec = scaled(tmp_path, data, stages, train={"global_batch": 5, "steps": 4})
    prove(spec, fork_server)


@pytest.mark.parametrize("write", [write_npy, write_dataset_with_workers])
def test_replicas_take_it_whole(tmp_path, fork_server, write):
    """A short last batch leaves none of its one sample for the second replica."""
    data = write(tmp_path) | {"whole": ["scale"]}
    parallel = {"data": 2, "microbatches": 1}
    train = {"global_batch": 5, "steps": 4}
    prove(scaled(tmp_path, data, parallel=parallel, train=train), fork_server)


def test_samples(tmp_path):
    spec = scaled(tmp_path, write_dataset(tmp_path) | {"whole": ["scale"]})
    x, scale = read_samples(spec).batch([3, 4], ["x", "scale"], 0)
    assert (x.shape, scale.tolist()) == ((2, 5), [0.5, 1.0, 2.0, 0.25, 3.0])
    graph = capture(spec)
    assert [(i.name, str(i.meta), i.whole) for i in graph.inputs] == [
        ("x", "f32[batch, 5]", False),
        ("scale", "f32[5]", True),
        ("y", "f32[batch, 1]", False),
    ]


def test_a_rank_that_reads_nothing_else_draws_no_order(tmp_path):
    data = write_random(tmp_path) | {"whole": ["scale"], "samples": 12}
    parallel = {"cuts": ["b", "c"]}
    script = emit(scaled(tmp_path, data, 3, parallel=parallel)).script(1)
    assert "    return [whole_fields()] * MICROBATCHES\n" in script
    assert "def order(" not in script


GRAPH = {"features": {"shape": [9, 16]}, "edges": {"shape": [2, 20], "dtype": "int64", "high": 9}}
LABELS = {"labels": {"shape": [9], "dtype": "int64", "high": 4}}


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_whole_graph(tmp_path, fork_server, stages):
    parallel = {"pipeline": stages, "schedule": "1f1b"}
    prove(
        vary(tmp_path, "gcn", data={"fields": GRAPH | LABELS}, parallel=parallel),
        fork_server,
        steps=3,
    )


def test_a_whole_graph_has_no_rows_to_divide(tmp_path):
    """W6: neither for microbatches nor for replicas."""
    what = (
        "no input has a batch dimension to divide: features, edges and labels go whole to each of"
    )
    hint = "hint: parallel: {data: 1, microbatches: 1}: stages still divide the model"
    spec = vary(tmp_path, "gcn", train={"global_batch": 4}, parallel={"microbatches": 4})
    with pytest.raises(CaptureError) as raised:
        capture(spec)
    assert f"{what} 4 microbatches, all of which would compute the same\n{hint}" in str(
        raised.value
    )
    spec = vary(tmp_path, "gcn", train={"global_batch": 2}, parallel={"data": 2})
    with pytest.raises(CaptureError) as raised:
        capture(spec)
    assert f"{what} 1 microbatch of each of 2 replicas, all of which" in str(raised.value)


def test_a_batch_of_nodes_of_a_whole_graph(tmp_path, fork_server):
    """Divided by what the loss takes."""
    code = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, features, near):
        return self.b(near @ torch.relu(self.a(near @ features)))

def loss(logits, nodes, labels):
    return nn.functional.cross_entropy(logits[nodes], labels)

def build():
    return Net()
"""
    fields = {"features": {"shape": [9, 16]}, "near": {"shape": [9, 9]}}
    fields |= {"nodes": {"dtype": "int64", "high": 9}, "labels": {"dtype": "int64", "high": 4}}
    data = {"source": "random", "samples": 16, "fields": fields, "whole": ["features", "near"]}
    sections = {"parallel": {"data": 2}, "model": {"loss": "net.py:loss"}}
    prove(scaled(tmp_path, data, 2, code, **sections), fork_server)


def test_a_graph_cut_into_rows(tmp_path):
    """The complaint about shapes says what to declare."""
    for name, shape in {"features": (9, 5), "near": (9, 9), "y": (9, 1)}.items():
        np.save(tmp_path / f"{name}.npy", np.ones(shape, np.float32))
    code = CODE.replace("x, *, scale", "features, near").replace("* scale.sum(0)", "")
    code = code.replace("torch.tanh(self.a(x)) * scale", "near @ self.a(features)")
    files = {name: f"{name}.npy" for name in ("features", "near", "y")}
    with pytest.raises(CaptureError) as raised:
        capture(scaled(tmp_path, {"source": "arrays", "files": files}, code=code))
    assert raised.value.hint == (
        "if near is one whole, such as a graph's edges, and no sample has a row of it: "
        "data: {whole: [features, near, y]}, for those of them that are so"
    )


def test_arrays_of_different_lengths(tmp_path):
    with pytest.raises(CaptureError, match=r"hint: data: \{whole: \[scale\]\} if it has no batch"):
        capture(scaled(tmp_path, write_npy(tmp_path)))


complaints = {
    "unknown": ({"whole": ["scal"]}, "the data has no field 'scal'", "did you mean scale?"),
    "of the samples": (
        {"source": "points.py:Points", "fields": ["x", "y"], "whole": ["x"]},
        "x is a field of the samples, and whole fields are the dataset's own",
        "self.x in the dataset, or leave it out of whole",
    ),
}


@pytest.mark.parametrize(("data", "message", "hint"), complaints.values(), ids=complaints)
def test_what_is_whole_is_a_field(tmp_path, data, message, hint):
    write_dataset(tmp_path)
    with pytest.raises((SpecError, Complaints)) as raised:
        scaled(tmp_path, (write_random(tmp_path) if "source" not in data else {}) | data)
    assert f"{message}\n" in f"{raised.value}\n"
    assert f"hint: {hint}" in str(raised.value)


def test_a_dataset_without_the_attribute(tmp_path):
    data = write_dataset(tmp_path) | {"whole": ["mask"]}
    with pytest.raises(CaptureError, match=r"points\.py:Points has no attribute of that name"):
        capture(scaled(tmp_path, data))


def test_no_edge_carries_it(tmp_path):
    spec = vary(tmp_path, "gcn_gru")
    edges = {edge for program in lower(spec, tmp_path).programs for edge in program.edges}
    assert {len(edge.values) for edge in edges} == {1}
