"""What cutting a batch into microbatches does to the loss is told, not hidden."""

import pytest
from jobs import make_spec

from ppc.pipeline import lower

pytestmark = pytest.mark.torch

NET = """
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(5, 8), nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head({body})

def build():
    return Net()

def mean(output, y):
    return F.cross_entropy(output, y)

def summed(output, y):
    return F.cross_entropy(output, y, reduction="sum")

def some(output, y):
    return F.cross_entropy(output, y, ignore_index=0)
"""
FIELDS = {"x": {"shape": [5]}, "y": {"dtype": "int64", "high": 3}}


def messages(folder, body="torch.tanh(self.layer(x))", loss="mean", microbatches=2, before=""):
    spec = make_spec(
        folder,
        before + NET.replace("{body}", body),
        model={"loss": f"net.py:{loss}"},
        data={"source": "random", "samples": 12, "fields": FIELDS},
        train={"global_batch": 6},
        parallel={"microbatches": microbatches},
    )
    return lower(spec, folder).graph.messages


def test_a_mean_over_samples_is_the_same(tmp_path):
    assert messages(tmp_path) == ()


@pytest.mark.parametrize("loss", ["summed", "some"])
def test_other_losses_are_not(tmp_path, loss):
    (message,) = messages(tmp_path, loss=loss)
    assert message.startswith("the loss of 6 samples at once is ")
    assert ", the mean over 2 microbatches " in message


def test_a_batch_norm_is_not(tmp_path):
    (message,) = messages(tmp_path, "self.norm(self.layer(x))")
    assert "a batch norm" in message


def test_one_microbatch_is_the_batch(tmp_path):
    assert messages(tmp_path, loss="summed", microbatches=1) == ()


def test_what_draws_at_random_is_not_compared(tmp_path):
    noise = "self.layer(x) * torch.rand_like(self.layer(x))"
    (message,) = messages(tmp_path, noise, loss="summed")
    assert message.startswith(
        "whether cutting a batch changes the loss is not known: forward draws"
    )


def test_dropout_hides_nothing(tmp_path):
    (message,) = messages(tmp_path, body="self.drop(torch.tanh(self.layer(x)))", loss="some")
    assert message.startswith("the loss of 6 samples at once is ")


def test_dropout_of_attention_hides_nothing(tmp_path):
    h = "F.scaled_dot_product_attention(h := self.layer(x)[:, None], h, h, None, 0.5)[:, 0]"
    (message,) = messages(tmp_path, body=h, loss="some")
    assert message.startswith("the loss of 6 samples at once is ")
    assert messages(tmp_path, body=h) == ()


def test_a_backward_that_looks_at_several_samples(tmp_path):
    norm = """
class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g / (g.norm() + 1e-6)

"""
    (message,) = messages(tmp_path, body="Norm.apply(torch.tanh(self.layer(x)))", before=norm)
    assert message.startswith("the gradient of layer.")
    assert "A backward looks at several samples" in message
