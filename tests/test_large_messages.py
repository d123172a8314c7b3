"""Messages so large that they go in gloo's own threads, as broadcasts in groups of two."""

import pytest
from jobs import make_spec, prove

from ppc import pipeline

pytestmark = pytest.mark.dist

BLOCKS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
"""
ONE = """
    def forward(self, x):
        x = x.unsqueeze(1).expand(-1, 9000, -1)  # 1.2 MB of 2 samples in float64
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.mean(1)
"""
THREE = """
    def forward(self, x):
        noise = torch.rand(len(x), 9000, 16, dtype=x.dtype)  # is not computed twice
        x, mask, number = x.unsqueeze(1) + noise, noise > 0.5, (noise * 8).KIND()
        for block in self.blocks:
            x = torch.where(mask, torch.tanh(block(x)), x) + number / 16
        return x.mean(1)
"""
BUILD = """
def build():
    return Net()
"""


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("forward", "call"),
    [
        (ONE, "broadcast"),
        (THREE.replace("KIND", "long"), "broadcast"),
        (THREE.replace("KIND", "short"), "isend"),
    ],
    ids=["one", "three", "of a dtype that gloo cannot broadcast"],
)
def test_large_messages(tmp_path, fork_server, schedule, forward, call):
    row = {"shape": [16]}
    spec = make_spec(
        tmp_path,
        BLOCKS + forward + BUILD,
        data={"source": "random", "samples": 14, "fields": {"x": row, "y": row}},
        train={"global_batch": 8, "steps": 3},
        cluster={"devices_per_node": 3},
        parallel={"pipeline": 3, "microbatches": 4, "schedule": schedule},
    )
    files = pipeline.compile(spec, tmp_path / "out")
    (middle,) = [file.text for file in files if file.path == "rank1.py"]
    assert middle.count(f"dist.{call}, ") == (2 if call == "broadcast" else 1)
    prove(spec, fork_server)
