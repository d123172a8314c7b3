"""Regions of forward under torch.autocast and torch.no_grad, kept as they are."""

from textwrap import dedent

import pytest
from emitted import emit
from jobs import make_spec, prove
from nets import net

from ppc.frontend.capture.capture import capture

pytestmark = pytest.mark.torch

NESTED = """
with torch.autocast(DEVICE, torch.bfloat16):
    h = self.a(x)
    with torch.no_grad():
        still = h * 2
    with torch.autocast(DEVICE, enabled=False):
        h = torch.tanh(h.float())
    h = h @ torch.ones(8, 8)
with torch.autocast(OTHER, enabled=False):
    y = self.b(h.float() + still.float())
return y
"""


def code(device="cpu", forward=NESTED):
    other = {"cpu": "cuda", "cuda": "cpu"}[device]
    text = forward.replace("OTHER", f"'{other}'")
    return net(text.replace("DEVICE", f"'{device}'"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_op_knows_its_region(tmp_path, device):
    """A region for the device that scripts are for; one for another does nothing."""
    where = {"devices_per_node": 1, "device": "cpu" if device == "cpu" else "h100"}
    graph = capture(make_spec(tmp_path, code(device), cluster=where))
    found = [(op.target.split(".")[1], op.autocast, op.grad) for op in graph.ops[:7]]
    assert found == [
        ("linear", "bfloat16", True),
        ("mul", "bfloat16", False),
        ("to", None, True),
        ("tanh", None, True),
        ("ones", "bfloat16", True),
        ("matmul", "bfloat16", True),
        ("to", None, True),
    ]
    assert graph.values[graph.ops[0].outputs[0]].dtype == "bfloat16"
    assert not graph.values[graph.ops[1].outputs[0]].requires_grad


def test_a_region_of_another_device_is_none(tmp_path):
    graph = capture(make_spec(tmp_path, code("cuda")))
    assert {op.autocast for op in graph.ops} == {None}


def test_a_users_line_runs_as_without_an_export(tmp_path):
    forward = """
    h = self.a(x) if torch.compiler.is_compiling() else self.a(x) * 2
    return self.b(h)
    """
    graph = capture(make_spec(tmp_path, net(dedent(forward))))
    assert "aten.mul.Tensor" in [op.target for op in graph.ops]


def test_it_is_written_around_its_statements(tmp_path):
    lines = emit(make_spec(tmp_path, code())).forward()
    cast = "with torch.autocast(device.type, torch.bfloat16):"
    assert lines[:5] == [
        cast,
        "    h = self.a(x)",
        f"with torch.no_grad(), {cast.removeprefix('with ')}",
        "    still = h * 2",
        "h = h.to(torch.float32).tanh()",
    ]
    assert lines.count(cast) == 2


def test_what_is_off_in_bf16(tmp_path):
    """Inside the precision's own autocast a region of the same dtype says nothing."""
    lines = emit(make_spec(tmp_path, code(), train={"precision": "bf16"})).forward()
    assert [line for line in lines if "autocast" in line] == [
        "with torch.autocast(device.type, enabled=False):"
    ]


WITHOUT_GRADIENT = """
with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
    still = self.a(x)
    with torch.autocast(DEVICE, enabled=False):
        still = still.float() @ torch.ones(8, 8)
with torch.autocast(DEVICE, torch.bfloat16):
    with torch.no_grad():
        h = self.a(x)
    h = h + self.a(x)
y = self.b(h.float() + still)
return y
"""


@pytest.mark.dist
@pytest.mark.parametrize("forward", [NESTED, WITHOUT_GRADIENT], ids=["nested", "no_grad"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parity(tmp_path, fork_server, precision, forward):
    """Under no_grad, too, torch keeps the weights that autocast casts, for uses with a gradient."""
    spec = make_spec(
        tmp_path,
        code(forward=forward),
        train={"precision": precision},
        cluster={"devices_per_node": 2},
        parallel={"pipeline": 2, "cuts": ["b"]},
    )
    prove(spec, fork_server, steps=2, exact=False)
