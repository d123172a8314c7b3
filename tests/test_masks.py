"""Torch's own transformers with a mask: whether it is causal is not read off its values."""

import pytest
import torch
from jobs import make_spec, prove
from nets import net

from ppc.check.capture import compare_listings
from ppc.frontend.capture.build import default_dtype
from ppc.frontend.capture.capture import capture

pytestmark = pytest.mark.torch

sequences = {
    "source": "random",
    "samples": 9,
    "fields": {"x": {"shape": [4, 5]}, "y": {"shape": [4, 1]}},
}
mask = "mask = nn.Transformer.generate_square_subsequent_mask(4)\n"
layer = "nn.Transformer{0}Layer(8, 2, 16, batch_first=True)"
encoder = f"self.m = nn.TransformerEncoder({layer.format('Encoder')}, 2)"
one = f"self.m = {layer.format('Encoder')}"
decoder = f"self.m = nn.TransformerDecoder({layer.format('Decoder')}, 2)"
attention = "self.m = nn.MultiheadAttention(8, 2, batch_first=True)"
models = {
    "encoder": (encoder, "self.m(h, mask)"),
    "encoder, told": (encoder, "self.m(h, mask=mask, is_causal=True)"),
    "layer, told": (one, "self.m(h, mask, is_causal=True)"),
    "decoder": (decoder, "self.m(h, h, tgt_mask=mask)"),
    "attention, told": (
        attention, "self.m(h, h, h, need_weights=False, attn_mask=mask, is_causal=True)[0]",
    ),
}  # fmt: skip


def masked(folder, init, call, **sections):
    forward = f"{mask}h = self.a(x)\nreturn self.b({call})"
    return make_spec(folder, net(forward, init), data=sequences, **sections)


@pytest.mark.parametrize(("init", "call"), models.values(), ids=models)
def test_masks(init, call, tmp_path):
    spec = masked(tmp_path, init, call)
    graph = capture(spec)
    assert not [op for op in graph.ops if "is_causal" in dict(op.kwargs)]
    with default_dtype("fp32"):
        assert list(compare_listings(spec, graph, (2,))) == []


@pytest.mark.dist
@pytest.mark.parametrize("name", ["encoder, told", "attention, told", "decoder"])
def test_masks_in_scripts(name, fork_server, tmp_path):
    parallel = {"pipeline": 2, "microbatches": 2}
    prove(
        masked(tmp_path, *models[name], cluster={"devices_per_node": 2}, parallel=parallel),
        fork_server,
    )


def test_torch_is_as_before(tmp_path):
    before = torch.nn.modules.transformer._detect_is_causal_mask
    capture(masked(tmp_path, *models["encoder"]))
    assert torch.nn.modules.transformer._detect_is_causal_mask is before
