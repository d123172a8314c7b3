"""Embeddings whose rows hang on other samples."""

import pytest
from jobs import make_spec, prove

from ppc.errors import CaptureError
from ppc.frontend.capture.capture import capture

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.head = nn.Embedding(20, 8, {options}), nn.Linear(8, 1)

    def forward(self, x):
        return self.head({rows}.mean(1))

def build():
    return Net()
"""
limited = """(lambda r: r * (1.0 / r.norm(dim=-1, keepdim=True)).clamp(max=1))(self.rows(x))"""


def spec_of(folder, options="", rows="self.rows(x)", **parallel):
    fields = {"x": {"shape": [6], "dtype": "int64", "high": 20}, "y": {"shape": [1]}}
    return make_spec(
        folder,
        NET.format(options=options, rows=rows),
        model={"loss": "mse_loss"},
        data={"source": "random", "samples": 16, "fields": fields},
        train={"global_batch": 8},
        cluster={"devices_per_node": parallel.get("pipeline", 1) * parallel.get("data", 1)},
        parallel={"microbatches": 2, **parallel},
    )


def refused(spec):
    with pytest.raises(CaptureError) as raised:
        capture(spec)
    assert "net.py:" in str(raised.value.where)
    return str(raised.value)


def test_rows_scaled_by_each_replica(tmp_path):
    message = refused(spec_of(tmp_path, "max_norm=1.0", data=2))
    assert "max_norm scales the rows of rows.weight that a replica meets" in message


@pytest.mark.dist
def test_rows_scaled_after_they_are_looked_up(tmp_path, fork_server):
    prove(spec_of(tmp_path, rows=limited, data=2), fork_server)


@pytest.mark.dist
def test_rows_scaled_in_one_replica(tmp_path, fork_server):
    prove(spec_of(tmp_path, "max_norm=1.0", pipeline=2), fork_server)


def test_gradients_divided_by_how_often_a_row_occurs(tmp_path):
    assert "scale_grad_by_freq divides" in refused(spec_of(tmp_path, "scale_grad_by_freq=True"))
