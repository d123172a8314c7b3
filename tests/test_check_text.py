"""check_text finds what the text computes that the graph does not, and what a cut loses."""

from dataclasses import replace

import pytest
from emitted import emit
from jobs import make_spec

from ppc.check import outcome, text
from ppc.errors import InternalError

pytestmark = pytest.mark.torch

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(8, eps=1e-3)
        self.second = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.3)
        self.still = nn.BatchNorm1d(8).eval()
        self.head = nn.Linear(32, 11)

    def forward(self, tokens):
        q, k = self.first(self.embed(tokens)).chunk(2, dim=-1)
        x = self.norm((k - q * 2).softmax(dim=-1))
        y = self.drop(self.second(x)) + x
        y = self.still(y.transpose(1, 2)).transpose(1, 2)
        return self.head(y.reshape(len(y), -1))

def build():
    return Net()
"""

faults = {
    "swapped operands": (0, "(k - q * 2)", "(q * 2 - k)"),
    "operands of others": (0, "(k - q * 2)", "(q - k * 2)"),
    "a scalar": (0, "q * 2", "q * 7"),
    "a dimension": (0, "softmax(dim=-1)", "softmax(dim=0)"),
    "eps": (0, "eps=0.001", "eps=0.1"),
    "padding_idx": (0, ", padding_idx=0", ""),
    "another variable": (1, "drop + x", "drop + drop"),
    "a dropped operation": (1, "self.drop(self.second(x))", "self.drop(x)"),
    "no eval()": (1, 'stage.get_submodule("still").eval()', "pass"),
    "no seed": (1, 'seed_layer(key, "drop")', "pass"),
    "another seed": (1, 'seed_layer(key, "drop")', 'seed_layer(key, "drip")'),
    "what fails": (1, ".transpose(1, 2))", ".transpose(1, 5))"),
}


@pytest.fixture(scope="module")
def emitted(tmp_path_factory):
    fields = {
        "tokens": {"shape": [4], "dtype": "int64", "high": 3},
        "labels": {"shape": [], "dtype": "int64", "high": 11},
    }
    return emit(
        make_spec(
            tmp_path_factory.mktemp("text"),
            NET,
            model={"loss": "cross_entropy"},
            data={"source": "random", "samples": 23, "fields": fields, "last_batch": "drop"},
            train={"global_batch": 5},
            cluster={"devices_per_node": 2},
            parallel={"pipeline": 2, "microbatches": 2, "cuts": ["second"]},
        )
    )


def check(emitted, scripts=None, units=None):
    """Check scripts and units, the job's own by default, at its two sizes of microbatch."""
    job = emitted.job
    scripts = scripts or emitted.scripts
    text.check_text(emitted.spec, job.graph, units or job.units, scripts, 3, 2)


def spoilt(emitted, rank, right, wrong):
    scripts = emitted.scripts
    assert right in scripts[rank]
    scripts[rank] = scripts[rank].replace(right, wrong)
    return scripts


@pytest.fixture(params=["lists", "numbers"])
def way(request, monkeypatch):
    """Whether faults are to be found without numbers, or by numbers alone."""
    if request.param == "lists":
        monkeypatch.setattr(outcome, "max_elements", 0)
    else:
        monkeypatch.setattr(text, "compare_listings", lambda *_: iter(()))


@pytest.mark.usefixtures("way")
class TestEitherWay:
    def test_no_fault_none_found(self, emitted):
        check(emitted)

    @pytest.mark.parametrize("fault", faults)
    def test_fault(self, emitted, fault):
        with pytest.raises(InternalError, match="the emitted text is not the model"):
            check(emitted, spoilt(emitted, *faults[fault]))

    def test_another_width(self, emitted):
        scripts = spoilt(emitted, 1, "nn.Linear(8, 8)", "nn.Linear(8, 9)")
        with pytest.raises(InternalError, match=r"makes second.weight .*\[9, 8\], not .*\[8, 8\]"):
            check(emitted, scripts)


def test_a_cut_that_brings_no_gradient_back(emitted):
    """The first stage would never train. Where nothing has numbers, verify_units finds it."""
    lost = [
        replace(
            unit,
            sends=tuple(replace(t, gradient=False) for t in unit.sends),
            receives=tuple(replace(t, gradient=False) for t in unit.receives),
        )
        for unit in emitted.job.units
    ]
    with pytest.raises(InternalError, match=r"the gradient of embed\.weight is missing"):
        check(emitted, units=lost)


def test_a_cut_that_should_bring_one_and_has_none(emitted):
    first, last = emitted.job.units
    unread = replace(last, receives=tuple(replace(t, gradient=False) for t in last.receives))
    with pytest.raises(InternalError, match="there is no gradient to send back: layer_norm"):
        check(emitted, units=[first, unread])


@pytest.mark.parametrize("limit", [0, 10**9])
def test_a_size_that_stands_for_the_batch(emitted, limit, monkeypatch):
    """It is right in the largest microbatch, and wrong in the others."""
    monkeypatch.setattr(outcome, "max_elements", limit)
    scripts = spoilt(emitted, 1, "batch = x.shape[0]", "batch = 3")
    with pytest.raises(InternalError, match=r"in a microbatch of 2|it fails"):
        check(emitted, scripts)


TAIL = """
class Tail(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.Linear(15, 1)

    def forward(self, y):
        return self.b(y.transpose(1, 2).view(len(y), 15))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.tail = nn.Linear(5, 15), Tail()

    def forward(self, x):
        return self.tail(self.a(x).view(-1, 3, 5).transpose(1, 2) * 2)

def build():
    return Net()
"""


def test_a_transfer_that_loses_its_order_of_memory(tmp_path):
    """What is sent as it lies in memory comes back so: the next stage may view it."""
    cut = {"pipeline": 2, "cuts": ["tail"]}
    emitted = emit(make_spec(tmp_path, TAIL, cluster={"devices_per_node": 2}, parallel=cut))
    first, last = emitted.job.units
    (transfer,) = last.receives
    assert transfer.meta.order == (0, 2, 1)
    plain = replace(transfer, meta=replace(transfer.meta, order=()))
    with pytest.raises(InternalError, match=r"it fails: .*view"):
        check(emitted, units=[first, replace(last, receives=(plain,))])
