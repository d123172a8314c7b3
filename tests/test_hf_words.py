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


def refusal(folder, model):
    """What is said of a model that a file's build() returns."""
    (folder / "models").mkdir()
    names = "LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM"
    code = f"from transformers import {names}\n\ndef build():\n    return {model}\n"
    (folder / "models" / "own.py").write_text(code)
    spec = spec_of(folder, "llama", model={"factory": "models/own.py:build", "args": {}})
    with pytest.raises(CaptureError) as raised:
        capture(spec)
    return raised.value


@pytest.mark.slow
def test_flex_attention(tmp_path):
    config = (
        "LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, "
        "num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16, "
        "attn_implementation='flex_attention')"
    )
    error = refusal(tmp_path, f"LlamaForCausalLM({config})")
    assert "FlexAttention" in error.message
    assert "attn_implementation='sdpa'" in error.hint


def test_no_leaf_of_a_librarys(tmp_path):
    """OPT drops layers by chance, which no trace shows; scripts cannot import its decoder."""
    config = (
        "OPTConfig(vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=2, "
        "num_attention_heads=2, max_position_embeddings=32, word_embed_proj_dim=32, layerdrop=0.3)"
    )
    error = refusal(tmp_path, f"OPTForCausalLM({config})")
    assert "hangs on the values" in error.message
    assert "leaf" not in error.hint
