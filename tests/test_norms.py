"""Batch norms: by the microbatch, of each replica or of all together; what cannot be is refused."""

import pytest
from jobs import make_spec, prove

pytestmark = pytest.mark.dist

BLOCKS = """
class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = norm
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return self.drop(torch.relu(self.norm(self.linear(x)))) + x

class Net(nn.Module):
    def __init__(self, norms):
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, norms))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def build():
    return Net([NORMS])
"""
PLAIN = "nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=0.3, eps=0.1)"
FROZEN = "nn.BatchNorm1d(6), nn.BatchNorm1d(6).eval().requires_grad_(False)"
BARE = "nn.BatchNorm1d(6, affine=False), nn.BatchNorm1d(6), nn.BatchNorm1d(6, bias=False)"
UNTRACKED = "nn.BatchNorm1d(6, track_running_stats=False), nn.BatchNorm1d(6, affine=False)"
LENGTHS = "nn.BatchNorm1d(4), nn.BatchNorm1d(4)"


def blocks(folder, norms=PLAIN, *, shape=(6,), train=None, data=None, **parallel):
    """Two or three blocks, on 40 samples in batches of 14: the last of an epoch has 12."""
    parallel = {"pipeline": 1, "data": 2, "microbatches": 2, "sync_batch_norm": True} | parallel
    fields = {"x": {"shape": list(shape)}, "y": {"shape": [*shape[:-1], 2]}}
    return make_spec(
        folder,
        BLOCKS.replace("NORMS", norms),
        data={"source": "random", "samples": 40, "fields": fields} | (data or {}),
        train={"global_batch": 14, "steps": 4} | (train or {}),
        cluster={"devices_per_node": parallel["pipeline"] * parallel["data"]},
        parallel=parallel,
    )


@pytest.mark.parametrize(
    ("norms", "parallel"),
    [
        (PLAIN, {}),
        (PLAIN, {"pipeline": 2}),
        (PLAIN, {"data": 3}),
        (PLAIN, {"pipeline": 2, "schedule": "gpipe", "recompute": "stage"}),
        (PLAIN, {"recompute": ["blocks"]}),
        (FROZEN, {"pipeline": 2, "recompute": "stage"}),
        (BARE, {"pipeline": 2}),
        (UNTRACKED, {}),
        (PLAIN, {"sync_batch_norm": False, "pipeline": 2}),
    ],
)
def test_replicas_normalise_together(tmp_path, fork_server, norms, parallel):
    """14 samples in 2 x 2 microbatches are 4, 4, 3 and 3, in 2 x 3 they are 3, 3, 2, 2, 2, 2."""
    prove(blocks(tmp_path, norms, **parallel), fork_server)
