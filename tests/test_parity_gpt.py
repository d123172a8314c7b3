"""A GPT with tied embeddings trains alike on every layout: the grid of stages and schedules.

26 samples in batches of 8: the fourth step has 2, so that of 3 or 8 microbatches some are empty.
"""

import pytest
from jobs import prove, vary
from thin import half_slow

pytestmark = pytest.mark.dist

SMALL = {"layers": 3, "width": 16, "heads": 2, "context": 8, "vocab": 32, "tied": True}
FIELD = {"shape": [8], "dtype": "int64", "high": 32}
DATA = {"samples": 26, "fields": {"tokens": FIELD, "labels": FIELD}}
STEPS = 4


@pytest.mark.parametrize(
    ("stages", "schedule", "microbatches", "dropout"),
    half_slow([1, 2, 3, 4], ["gpipe", "1f1b"], [1, 3, 8], [0.0, 0.1]),
)
def test_gpt(tmp_path, fork_server, stages, schedule, microbatches, dropout):
    spec = vary(
        tmp_path,
        "gpt_tied",
        SMALL | {"dropout": dropout},
        data=DATA,
        train={"global_batch": 8, "steps": STEPS},
        parallel={"pipeline": stages, "schedule": schedule, "microbatches": microbatches},
    )
    found = prove(spec, fork_server)
    compared = {(row.kind, row.step): row.compared for row in found.rows}
    assert compared["loss", STEPS - 1] == 1
    tensors = 2 + 3 * 12 + 2
    tied = stages > 1  # then two ranks hold it, and each is compared
    assert compared["gradient", STEPS - 1] == tensors + tied
