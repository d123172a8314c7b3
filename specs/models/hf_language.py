"""Language models from transformers, one of each family, small and with fresh weights."""

from transformers import (
    BertConfig,
    BertForMaskedLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)


def build_qwen3(layers=4, width=32, heads=4, kv_heads=2, vocab=64, context=16, dropout=0.0):
    """Qwen3, which normalises queries and keys."""
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width // heads,
        max_position_embeddings=context,
        attention_dropout=dropout,
    )
    return Qwen3ForCausalLM(config)


def build_mixtral(
    layers=4, width=32, heads=4, kv_heads=2, experts=4, vocab=64, context=16, dropout=0.0,
    implementation="batched_mm",
):  # fmt: skip
    """Mixtral, each token through two of its experts."""
    config = MixtralConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_local_experts=experts,
        max_position_embeddings=context,
        attention_dropout=dropout,
        experts_implementation=implementation,
    )
    return MixtralForCausalLM(config)


def build_bert(layers=4, width=32, heads=4, vocab=64, context=16, dropout=0.0):
    """BERT with its head for masked tokens."""
    config = BertConfig(
        vocab_size=vocab,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=2 * width,
        max_position_embeddings=context,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForMaskedLM(config)


def build_t5(layers=3, width=32, heads=4, vocab=64, dropout=0.0):
    """T5, an encoder and a decoder that reads it."""
    config = T5Config(
        vocab_size=vocab,
        d_model=width,
        d_kv=width // heads,
        d_ff=2 * width,
        num_layers=layers,
        num_heads=heads,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=dropout,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def build_mamba(layers=4, width=16, state=4, vocab=64, residual_in_fp32=True):
    """Mamba, whose scan without its kernel is a loop over the tokens."""
    config = MambaConfig(
        vocab_size=vocab,
        hidden_size=width,
        state_size=state,
        num_hidden_layers=layers,
        residual_in_fp32=residual_in_fp32,
        use_cache=False,
    )
    return MambaForCausalLM(config)
