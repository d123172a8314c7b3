"""Workloads of other fields than the first ones: graphs, several modalities, diffusion, several
tasks; each with replicas and with stages, and what is particular to it."""

import pytest
from emitted import emit
from jobs import prove, vary

from ppc.errors import Complaints, PpcError
from ppc.pipeline import lower

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("name", "args", "stages", "replicas"),
    [
        ("graphsage", {}, 1, 2),
        ("graphsage", {}, 2, 1),
        ("gcn_gru", {}, 1, 2),
        pytest.param("gcn_gru", {}, 2, 1, marks=pytest.mark.slow),
        ("mllm", {"layers": 1, "width": 16}, 1, 2),
        ("mllm", {"layers": 1, "width": 16}, 2, 1),
        ("dit", {"layers": 2, "width": 16}, 1, 2),
        ("dit", {"layers": 2, "width": 16}, 3, 1),
        ("multimodel", {"layers": 1, "width": 16}, 1, 2),
        pytest.param("multimodel", {"layers": 1, "width": 16}, 2, 1, marks=pytest.mark.slow),
    ],
)
def test_a_workload(tmp_path, fork_server, name, args, stages, replicas):
    parallel = {"pipeline": stages, "data": replicas, "microbatches": 2, "cuts": "auto"}
    spec = vary(tmp_path, name, args, train={"global_batch": 8}, parallel=parallel)
    prove(spec, fork_server, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["graphsage", "gcn_gru", "mllm", "dit", "multimodel"])
@pytest.mark.parametrize(("stages", "replicas"), [(2, 2), (3, 1)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_workload_under_other_layouts(tmp_path, fork_server, name, stages, replicas, schedule):
    parallel = {"pipeline": stages, "data": replicas, "microbatches": 2, "schedule": schedule}
    spec = vary(tmp_path, name, train={"global_batch": 10}, parallel=parallel | {"cuts": "auto"})
    prove(spec, fork_server, steps=3)


def test_towers_of_a_multimodal_model_are_stages(tmp_path):
    """W7: one value goes over, the image's prefix; who has an image is read where it is used."""
    job = lower(vary(tmp_path, "mllm", {"layers": 1}, parallel={"data": 1}), tmp_path)
    (vision, language) = ({held.fqn.split(".")[0] for held in u.state} for u in job.units)
    assert (vision, language) == ({"vision", "projector"}, {"language"})
    assert [[i.name for i in unit.inputs] for unit in job.units] == [
        ["images"],
        ["tokens", "has_image", "labels"],
    ]
    assert [len(unit.sends) for unit in job.units] == [1, 0]


def test_a_frozen_encoder_under_a_diffusion_model(tmp_path):
    """W9: nothing goes back to its stage, which has no optimizer; the time goes to the last."""
    compiled = emit(vary(tmp_path, "dit", {"layers": 2, "width": 16}))
    text = compiled.job.units[0]
    assert all(not held.trainable for held in text.state)
    assert not text.has_backward
    assert not [t for t in text.sends if t.gradient]
    assert {(t.source, t.target) for t in text.sends} == {(0, 1), (0, 2)}
    first, second, third = compiled.scripts
    assert "optimizer" not in first
    assert "def backward(" not in first
    assert "torch.optim.AdamW(" in second
    assert "t (int64[batch])" in " ".join(third.split())


def test_a_net_without_a_task_waits_for_no_gradient(tmp_path, fork_server):
    """W14: it is saved as it came, and replicas sum what there is."""
    spec = vary(tmp_path, "multimodel", {"layers": 1, "width": 16}, train={"global_batch": 8})
    found = prove(spec, fork_server, steps=2)
    graph = lower(spec, tmp_path).graph
    unread = [fqn for fqn in graph.parameters if "audio" in fqn]
    gradients = {row.compared for row in found.rows if row.kind == "gradient"}
    assert gradients == {2 * (len(graph.parameters) - len(unread))}
    assert len(unread) == 4


def sparse_dlrm(folder, **parallel):
    spec = vary(folder, "dlrm", train={"global_batch": 8}, parallel=parallel)
    path = folder / "models" / "dlrm.py"
    path.write_text(path.read_text().replace('mode="sum"', 'mode="sum", sparse=True'))
    return spec


def test_sparse_gradients_of_embedding_bags(tmp_path, fork_server):
    """W5: plain SGD takes them, on the stages that hold the tables."""
    spec = sparse_dlrm(tmp_path, pipeline=3)
    prove(spec, fork_server, steps=2)


def test_sparse_gradients_that_replicas_would_sum(tmp_path):
    """W5: refused by the tables' names."""
    with pytest.raises((PpcError, Complaints)) as raised:
        lower(sparse_dlrm(tmp_path, pipeline=1, data=2), tmp_path)
    assert "a sparse gradient cannot be summed over ranks, as that of tables.0.weight" in str(
        raised.value
    )
    assert "sparse=False in the embedding" in str(raised.value)
