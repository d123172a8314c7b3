"""One module under several names: whoever calls it, the scripts have it once."""

import pytest
from jobs import make_spec, prove
from nets import net

from ppc.frontend.capture.capture import capture

pytestmark = [pytest.mark.torch, pytest.mark.dist]

before = """
class M(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.own, self.d = c, nn.Linear(8, 8)

    def forward(self, x):
        return self.d(self.own(x).relu())
"""
linear = "self.c = nn.Linear(8, 8)\n"
lists = "self.l = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])\n"
models = {
    "within a Sequential": (
        f"{linear}self.s = nn.Sequential(self.c, nn.Linear(8, 8))", "self.s(self.c(h))",
    ),
    "its first name is the inner one": (
        "self.s = nn.Sequential(nn.Linear(8, 8), nn.ReLU())\nself.c = self.s[0]",
        "self.s(self.c(h))",
    ),
    "within a class": (f"{linear}self.m = M(self.c)", "self.m(self.c(h))"),
    "of two lists": (
        f"{lists}self.s = nn.Sequential(self.l[1], nn.Linear(8, 8))",
        "self.s(self.l[1](self.l[0](h)))",
    ),
    "again and again": ("self.s = nn.Sequential(*[nn.Linear(8, 8)] * 3)", "self.s(h)"),
    "an activation": (
        "r = nn.ReLU()\nself.s, self.t = (nn.Sequential(nn.Linear(8, 8), r) for _ in range(2))",
        "self.t(self.s(h))",
    ),
}  # fmt: skip


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize(("init", "call"), models.values(), ids=models)
def test_several_names(init, call, pipeline, fork_server, tmp_path):
    code = net(f"h = self.a(x)\nreturn self.b({call})", init, before=before)
    parallel = {"pipeline": pipeline, "microbatches": 2}
    spec = make_spec(tmp_path, code, cluster={"devices_per_node": pipeline}, parallel=parallel)
    prove(spec, fork_server, steps=2)


def test_calls_are_numbered_whatever_their_names(tmp_path):
    code = net("return self.b(self.c(self.d(self.c(self.a(x)))))", f"{linear}self.d = self.c")
    graph = capture(make_spec(tmp_path, code))
    assert [op.call for op in graph.ops if op.call[0] == "c"] == [("c", i) for i in range(3)]
