"""Language models from transformers, small and with fresh weights; they return their own loss."""

from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


def build_gpt2(layers=4, width=64, heads=4, vocab=256, context=128, dropout=0.0):
    """GPT-2, whose output head shares the token embedding's weight."""
    config = GPT2Config(
        vocab_size=vocab,
        n_positions=context,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def build_llama(layers=4, width=64, heads=4, kv_heads=2, vocab=256, context=128):
    """Llama, with grouped-query attention where `kv_heads` is below `heads`."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        use_cache=False,
    )
    return LlamaForCausalLM(config)
