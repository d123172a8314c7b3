"""bf16 by autocast: the user's code sees the dtypes that it will see, and both ends of a message
know them."""

import re

import pytest
import torch
from jobs import failed, make_spec, plant, vary
from torch import nn

from ppc.emit.write import write
from ppc.errors import CaptureError
from ppc.frontend.capture.autocast import autocast, lists_of
from ppc.frontend.capture.capture import capture
from ppc.pipeline import compile, lower
from ppc.run.verify import verify

GPT = {"layers": 3, "width": 16, "heads": 2, "context": 8, "vocab": 32, "tied": True}
FIELD = {"shape": [8], "dtype": "int64", "high": 32}
TOKENS = {"samples": 26, "fields": {"tokens": FIELD, "labels": FIELD}}
IMAGES = {
    "samples": 20,
    "fields": {
        "images": {"shape": [3, 16, 16]},
        "labels": {"shape": [], "dtype": "int64", "high": 10},
    },
}
BLOCKS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.norm(x).mean(1, keepdim=True)

def build():
    return Net()
"""
TRAIN = {"global_batch": 8, "precision": "bf16"}
FIELDS = {"x": {"shape": [6]}, "y": {"shape": [1]}}


def net(forward: str) -> str:
    """A model of one linear layer whose forward has these lines."""
    lines = "".join(f"        {line}\n" for line in forward.splitlines())
    head = "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    layers = "        self.a = nn.Linear(6, 6)\n        self.b = nn.Linear(6, 6)\n"
    return f"{head}{layers}\n    def forward(self, x):\n{lines}\n\ndef build():\n    return Net()\n"


def job(folder, code=BLOCKS, *, device="cpu", **parallel):
    """It, in bf16."""
    data = {"source": "random", "samples": 20, "fields": FIELDS}
    cluster = {"devices_per_node": parallel.get("pipeline", 1), "device": device}
    return make_spec(folder, code, data=data, train=TRAIN, cluster=cluster, parallel=parallel)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "args", "data", "device"),
    [
        ("gpt_tied", GPT | {"dropout": 0.1}, TOKENS, "cpu"),
        ("gpt_tied", GPT | {"dropout": 0.1}, TOKENS, "h100"),
        ("resnet18", {"width": 4}, IMAGES, "cpu"),
    ],
)
def test_a_model(tmp_path, fork_server, name, args, data, device):
    parallel = {"pipeline": 2, "microbatches": 3}
    spec = vary(
        tmp_path, name, args, data=data, train=TRAIN, parallel=parallel, cluster={"device": device}
    )
    found = verify(spec.path, steps=2, timeout_s=60, fork_server=fork_server)
    assert found.ok, str(found)
    losses = [row.difference for row in found.rows if row.kind == "loss"]
    assert losses == [0.0, 0.0]  # forwards are equal bit by bit
    values = {meta.dtype for meta in capture(spec).values.values()}
    assert {"bfloat16", "float32"} <= values


@pytest.mark.dist
def test_both_ends_of_a_message_know_its_dtype(tmp_path, fork_server):
    """C46: pytorch/pytorch#116183, #129732."""
    spec = job(tmp_path, pipeline=2, cuts=["blocks.3"])
    folder = tmp_path / "out"
    write(compile(spec, folder), folder)
    texts = [(folder / f"rank{rank}.py").read_text() for rank in range(2)]
    for text in texts:
        edges = re.findall(r"= Edge\(.*\)", text)
        assert len(edges) == 2
        assert all(edge.endswith("6, dtype=torch.bfloat16)") for edge in edges)
    assert "# float32[batch, 6] -> bfloat16[batch, 6]" in texts[0]
    assert "# bfloat16[batch, 6], float32[batch, 1] -> loss" in texts[1]
    assert all(".to(" not in text.split("# ---")[1] for text in texts)  # no casts of ours
    found = verify(folder, steps=2, timeout_s=60, fork_server=fork_server)
    assert found.ok, str(found)
    around = "with torch.autocast(device.type, torch.bfloat16, cache_enabled=False)"
    plant(folder / "rank0.py", around, "if True")
    with pytest.raises(Exception, match=r"activations 0->1 cannot take torch\.float32"):
        verify(folder, steps=2, timeout_s=60, fork_server=fork_server)


@pytest.mark.dist
def test_a_fault_in_the_precision_shows(tmp_path, fork_server):
    spec = job(tmp_path)
    folder = tmp_path / "out"
    write(compile(spec, folder), folder)
    plant(
        folder / "rank0.py",
        "with torch.autocast(device.type, torch.bfloat16",
        "if (lambda *a, **b: 1)(0",
    )
    found = verify(folder, steps=2, timeout_s=60, fork_server=fork_server)
    assert ("loss", 0) in failed(found)


def stage(tmp_path, forward, device="cpu"):
    """The text of the stage of a model with these lines."""
    spec = job(tmp_path, net(forward), device=device)
    text = str(compile(spec, tmp_path / "out")[0].text)
    return text[text.index("class Stage") : text.index("# ---", text.index("class Stage"))]


def test_casts_of_the_users_stay_and_autocasts_are_not_written(tmp_path):
    text = stage(
        tmp_path,
        "h = self.a(x)\nh = h.float() * 2\nh = self.b(h).to(x.dtype) + x\n"
        "return h.mean(1, keepdim=True)",
    )
    assert text.count(".to(torch.float32)") == 2
    assert "bfloat16" not in text


def test_the_users_code_sees_the_dtypes_of_autocast(tmp_path):
    text = stage(
        tmp_path,
        "h = self.a(x)\nif h.dtype == torch.bfloat16:\n    h = h * 3\n"
        "return h.mean(1, keepdim=True)",
    )
    assert "* 3" in text


@pytest.mark.parametrize(("device", "casts"), [("cpu", 1), ("h100", 0)])
def test_the_lists_are_those_of_the_device(tmp_path, device, casts):
    """softmax gives float32 on a GPU: there the user's cast does nothing."""
    text = stage(
        tmp_path, "return self.a(x).softmax(-1).float().mean(1, keepdim=True)", device=device
    )
    assert text.count("float32)") == casts


def test_in_place_on_what_comes_in(tmp_path):
    """`x += self.a(x)` in the first line of a stage must not write to a leaf."""
    text = stage(tmp_path, "x = x * 1.5\nx += self.a(x)\nreturn x.mean(1, keepdim=True)")
    assert "add_" not in text
    assert "+=" not in text


def test_lists_of_a_gpu():
    x = torch.randn(2, 3, 8)
    layer, norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def dtypes():
        with autocast("bfloat16"):
            h = layer(x)
            made = (norm(h), h.softmax(-1), h.sum(), h.exp(), h.log_softmax(-1), h @ h.mT, h + x)
        return [str(tensor.dtype).removeprefix("torch.") for tensor in made]

    on_cpu = ["bfloat16"] * 6 + ["float32"]
    assert dtypes() == on_cpu
    with lists_of("cuda"):
        assert dtypes() == ["float32"] * 5 + ["bfloat16", "float32"]
    assert dtypes() == on_cpu


def test_a_weight_used_twice_adds_its_gradients_up_in_float32():
    """As it does where two stages use it. Were its cast kept, they would add up in bfloat16."""
    layer, inputs = nn.Linear(8, 8), torch.randn(2, 4, 8)

    def gradient(*used):
        layer.zero_grad()
        with autocast("bfloat16"):
            loss = sum(layer(x).square().mean() for x in used)
        loss.backward()
        return layer.weight.grad

    apart = gradient(inputs[0]) + gradient(inputs[1])
    assert torch.equal(gradient(*inputs), apart)
    assert not torch.equal(apart, apart.bfloat16().float())


def test_recurrent_layers_are_refused(tmp_path):
    code = net("return self.a(self.c(x[:, None])[0])[:, 0, :1]").replace(
        "self.b = nn.Linear(6, 6)", "self.c = nn.LSTM(6, 6)"
    )
    with pytest.raises(
        CaptureError, match=r"what dtype aten\.lstm\.input gives under autocast"
    ) as e:
        capture(job(tmp_path, code))
    assert "net.py" in str(e.value)


def test_messages_and_activations_of_half_the_size(tmp_path):
    """The plan counts bytes as they are."""
    found, saved = {}, {}
    for precision in ("fp32", "bf16"):
        spec = vary(
            tmp_path, "resnet18", {"width": 4}, data=IMAGES,
            train=TRAIN | {"precision": precision}, parallel={"pipeline": 2, "microbatches": 2},
        )  # fmt: skip
        lowered = lower(spec, tmp_path)
        saved[precision] = sum(op.saved_bytes.per_sample for op in lowered.graph.ops)
        found[precision] = sum(
            meta.bytes.at(1)
            for program in lowered.programs
            for edge in program.edges
            for _, meta in edge.values
        )
    assert found["bf16"] * 2 == found["fp32"]
    assert saved["bf16"] < 0.7 * saved["fp32"]
