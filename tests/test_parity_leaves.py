"""Workloads whose layers no trace shows, on stages and replicas, against the user's own model."""

import functools
import re

import pytest
import torch
from jobs import SPECS, make_spec, prove, vary
from nets import net

from ppc.errors import CaptureError, PlanError
from ppc.frontend.capture.capture import capture
from ppc.frontend.capture.user import import_file
from ppc.pipeline import lower

pytestmark = pytest.mark.dist

CTC = """
class CTC(nn.Module):  # has no constructor of its own
    def forward(self, h, labels, lengths):
        steps = torch.full((len(h),), h.shape[1])
        return nn.functional.ctc_loss(h.log_softmax(2).transpose(0, 1), labels, steps, lengths)
"""
LENGTHS = "self.w, self.c = nn.Parameter(torch.zeros(4)), CTC()"

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


def test_lengths_of_ctc_that_are_data(tmp_path, fork_server):
    code = net("return self.c(self.b(self.a(x)) + self.w, y, z)", LENGTHS, "x, y, z", CTC)
    spec = make_spec(
        tmp_path,
        code,
        model={"loss": "output", "leaf": ["c"]},
        data={
            "source": "random",
            "samples": 10,
            "fields": {
                "x": {"shape": [9, 5]},
                "y": {"shape": [3], "dtype": "int64", "low": 1, "high": 4},
                "z": {"shape": [], "dtype": "int64", "low": 1, "high": 4},
            },
        },
        cluster={"devices_per_node": 2},
        parallel={"pipeline": 2, "microbatches": 2},
    )
    prove(spec, fork_server, steps=2)


def test_forces_on_replicas(tmp_path, fork_server):
    """A model that is one leaf, which goes back in its own forward."""
    spec = vary(
        tmp_path,
        "atoms",
        {"width": 8},
        train={"global_batch": 8},
        parallel={"pipeline": 1, "data": 2, "microbatches": 2},
    )
    prove(spec, fork_server, steps=2)


def test_forces_are_not_cut(tmp_path):
    spec = vary(tmp_path, "atoms", parallel={"pipeline": 2, "data": 1, "microbatches": 2})
    with pytest.raises(PlanError, match="the whole model is a leaf, and a leaf is never cut: 2"):
        lower(spec, tmp_path)


def test_forces_are_not_compiled(tmp_path):
    """Torch would say so in the first backward alone."""
    compiled = {"global_batch": 8, "compile": True}
    spec = vary(tmp_path, "atoms", train=compiled, parallel={"pipeline": 1, "data": 2})
    with pytest.raises(CaptureError) as raised:
        lower(spec, tmp_path)
    message = r".*goes back by torch\.autograd \(.*atoms\.py:\d+\), and torch\.compile does not .*"
    assert re.fullmatch(message, raised.value.message)
    assert (raised.value.where, raised.value.hint) == (spec.at("train.compile"), "compile: false")


def test_forces_have_right_gradients():
    """In double precision, of energies to forces, and of both to the weights."""
    torch.manual_seed(0)
    potential = import_file(SPECS / "models/atoms.py").Potential
    model = potential(width=4, gaussians=5).double()
    species, positions = torch.randint(4, (2, 3)), torch.randn(2, 3, 3, dtype=torch.float64)
    energies = functools.partial(model.energies, species)
    assert torch.autograd.gradcheck(energies, positions.requires_grad_())
    (gradient,) = torch.autograd.grad(energies(positions).sum(), positions)
    torch.testing.assert_close(model(species, positions)[1], -gradient)

    def outputs(*weights):
        named = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(model, named, (species, positions.detach()))

    names = [name for name, _ in model.named_parameters()]
    assert torch.autograd.gradcheck(outputs, tuple(model.parameters()))


@pytest.mark.parametrize(
    ("name", "leaf", "place"),
    [("moe_sparse", "blocks.0.experts", "experts.py"), ("series", "layers.0", "packed.py")],
)
def test_without_the_leaf_it_is_named(tmp_path, name, leaf, place):
    spec = vary(tmp_path, name, model={"leaf": None})
    with pytest.raises(CaptureError) as raised:
        capture(spec)
    assert raised.value.where.file.endswith(place)
    assert raised.value.hint.endswith(f"; or keep the module whole: model: {{leaf: [{leaf}]}}")
