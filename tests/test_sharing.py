"""Different tensors in one memory: refused where training changes them all at once."""

import pytest
from jobs import make_spec
from nets import net

from ppc.errors import CaptureError
from ppc.frontend.capture.capture import capture

pytestmark = pytest.mark.torch

forward = "h = self.a(x)\nreturn self.b(self.c(h) + self.d(h) + h @ self.w)"
layers = "self.c, self.d = nn.Linear(8, 8), nn.Linear(8, 8)\n"
fresh = "self.register_buffer('w', torch.ones(8, 8))\n"
together = {
    "parameters": ("self.c.weight.data = self.d.weight.data", "c.weight and d.weight",
                   "self.d.weight = self.c.weight makes them one"),
    "parts of parameters": ("self.c.bias.data = self.d.weight.data[0]", "c.bias and d.weight",
                            "self.d.weight = self.c.bias makes them one"),
    "a buffer": ("self.w = self.c.weight.detach()", "c.weight and w",
                 "forward can compute it from self.c.weight"),
    "a plain tensor": ("del self.w\nself.w = self.c.weight.detach().t()", "c.weight and w",
                       "forward can compute it from self.c.weight"),
}  # fmt: skip


@pytest.mark.parametrize(("init", "names", "hint"), together.values(), ids=together)
def test_trained_tensors(init, names, hint, tmp_path):
    with pytest.raises(CaptureError, match=r"job.yaml:.*different tensors in one memory") as raised:
        capture(make_spec(tmp_path, net(forward, layers + fresh + init)))
    assert raised.value.message.startswith(f"{names} are")
    assert raised.value.hint.startswith(hint)


def test_elements_of_lists_are_spelled_as_python_has_them(tmp_path):
    init = "self.s = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])\n"
    init += "self.s[1].weight.data = self.s[0].weight.data"
    code = net("return self.b(self.s[1](self.s[0](self.a(x))))", init)
    with pytest.raises(CaptureError) as raised:
        capture(make_spec(tmp_path, code))
    assert raised.value.hint.startswith("self.s[1].weight = self.s[0].weight makes them one")


def test_where_the_factory_cannot_be_recorded(tmp_path):
    init = "torch.ones(1).numpy()\nself.c.weight.data = self.d.weight.data"
    with pytest.raises(CaptureError, match=r"^\S*: c.weight and d.weight are different"):
        capture(make_spec(tmp_path, net(forward, layers + fresh + init)))


def test_a_buffer_that_forward_writes(tmp_path):
    init = "self.register_buffer('w', torch.ones(8, 8))\nself.register_buffer('v', self.w.view(64))"
    writes = forward.replace("return", "self.v.mul_(2)\nreturn")
    with pytest.raises(CaptureError, match="w and v are different tensors in one memory"):
        capture(make_spec(tmp_path, net(writes, layers + init)))


apart = {
    "nothing writes it": fresh + "self.register_buffer('v', self.w[:2])",
    "it is copied": "self.register_buffer('w', self.c.weight.detach().clone())",
    "other halves": fresh + "p = torch.ones(16)\n"
                    "self.c.bias, self.d.bias = nn.Parameter(p[:8]), nn.Parameter(p[8:])",
    "forward does not read it": fresh + "self.k = self.c.weight.detach()",
    "it is one tensor": fresh + "self.c.weight = self.d.weight",
}  # fmt: skip


@pytest.mark.parametrize("init", apart.values(), ids=apart)
def test_what_may_share(init, tmp_path):
    capture(make_spec(tmp_path, net(forward, layers + init)))
