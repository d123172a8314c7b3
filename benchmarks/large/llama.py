"""Llama from transformers, as large as one asks for; it returns its own loss."""

from transformers import LlamaConfig, LlamaForCausalLM


def build(layers, width, hidden, heads, kv_heads, vocab, context):
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        rope_theta=500000.0,
        use_cache=False,
    )
    return LlamaForCausalLM(config)
