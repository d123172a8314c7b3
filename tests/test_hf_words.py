"""What a model of transformers cannot be is said in words that let its user mend the config."""

import pytest
from hf import spec_of

from ppc.errors import CaptureError
from ppc.frontend.capture.capture import capture

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("implementation", "message"),
    [
        ("eager", "what forward computes hangs on the values of its data"),
        pytest.param(
            "grouped_mm",
            "an operation of transformers's own, which a script would have to import",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_experts(tmp_path, implementation, message):
    spec = spec_of(tmp_path, "mixtral", {"implementation": implementation, "layers": 1})
    with pytest.raises(CaptureError) as raised:
        capture(spec)
    assert message in raised.value.message
    assert "transformers/" in str(raised.value.where)
    assert raised.value.hint.endswith("experts_implementation='batched_mm' in the model's config")


@pytest.mark.slow
def test_flex_attention(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "flex.py").write_text(
        """
from transformers import LlamaConfig, LlamaForCausalLM

def build():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16,
            attn_implementation="flex_attention",
        )
    )
"""
    )
    spec = spec_of(tmp_path, "llama", model={"factory": "models/flex.py:build", "args": {}})
    with pytest.raises(CaptureError) as raised:
        capture(spec)
    assert "FlexAttention" in raised.value.message
    assert "attn_implementation='sdpa'" in raised.value.hint


def test_no_leaf_of_a_librarys(tmp_path):
    """OPT drops layers by chance, which no trace shows; scripts cannot import its decoder."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "opt.py").write_text(
        """
from transformers import OPTConfig, OPTForCausalLM

def build():
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=32, word_embed_proj_dim=32, layerdrop=0.3,
        )
    )
"""
    )
    spec = spec_of(tmp_path, "llama", model={"factory": "models/opt.py:build", "args": {}})
    with pytest.raises(CaptureError) as raised:
        capture(spec)
    assert "hangs on the values" in raised.value.message
    assert "leaf" not in raised.value.hint
