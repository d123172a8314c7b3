"""Workloads whose layers no trace shows, on stages and replicas, against the user's own model."""

import pytest
from jobs import prove, vary

pytestmark = pytest.mark.dist

TEXT = {"sequence": 8}
MOE = {"layers": 2, "width": 16, "hidden": 8, "experts": 2, "capacity": 5}
SPARSE = {**MOE, "capacity": None}
SERIES = {"layers": 3, "width": 8}


@pytest.mark.parametrize(
    ("name", "args", "data", "stages", "replicas"),
    [
        ("moe", MOE, TEXT, 2, 1),
        ("moe", MOE, TEXT, 1, 2),
        ("moe_sparse", SPARSE, TEXT, 2, 1),
        ("moe_sparse", SPARSE, TEXT, 1, 2),
        ("series", SERIES, {}, 2, 1),
        ("series", SERIES, {}, 1, 2),
    ],
)
def test_a_workload(tmp_path, fork_server, name, args, data, stages, replicas):
    parallel = {"pipeline": stages, "data": replicas, "microbatches": 2}
    spec = vary(tmp_path, name, args, data=data, train={"global_batch": 8}, parallel=parallel)
    prove(spec, fork_server, steps=2)
