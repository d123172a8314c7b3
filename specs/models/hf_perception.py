"""Models from transformers that see or hear, small and with fresh weights."""

import torch
import torch.nn.functional as F
from transformers import (
    CLIPConfig,
    CLIPModel,
    Dinov2Config,
    Dinov2ForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)


def build_vit(layers=4, width=32, heads=4, image=16, patch=4, classes=8, dropout=0.0):
    """A vision transformer."""
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=2 * width,
        image_size=image,
        patch_size=patch,
        num_labels=classes,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return ViTForImageClassification(config)


def build_resnet(widths=(8, 16, 32, 64), depths=(2, 2, 2, 2), classes=8):
    """A ResNet of basic blocks."""
    config = ResNetConfig(
        embedding_size=widths[0],
        hidden_sizes=list(widths),
        depths=list(depths),
        layer_type="basic",
        num_labels=classes,
    )
    return ResNetForImageClassification(config)


def build_clip(layers=2, width=32, heads=4, vocab=64, context=8, image=16, patch=4):
    """CLIP: a tower for texts, one for images."""
    tower = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "projection_dim": width,
    }
    text = {
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "bos_token_id": vocab - 2,
        "eos_token_id": vocab - 1,
    }
    vision = {"image_size": image, "patch_size": patch}
    config = CLIPConfig(
        text_config=tower | text, vision_config=tower | vision, projection_dim=width
    )
    return CLIPModel(config)


def clip_loss(output):
    """Each text should be nearest to its own image, and each image to its own text."""
    logits = output.logits_per_text
    own = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def build_whisper(layers=2, width=32, heads=4, vocab=64, mels=8, frames=32, context=8, dropout=0.0):
    """Whisper: an encoder of spectrograms, a decoder of text."""
    config = WhisperConfig(
        vocab_size=vocab,
        num_mel_bins=mels,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=2 * width,
        decoder_ffn_dim=2 * width,
        max_source_positions=frames // 2,
        max_target_positions=context,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dropout=dropout,
        attention_dropout=dropout,
        activation_dropout=dropout,
    )
    return WhisperForConditionalGeneration(config)


def build_dinov2(
    layers=4, width=32, heads=4, image=16, patch=4, classes=8, dropout=0.0, drop_path=0.0
):
    """DINOv2, as a classifier."""
    config = Dinov2Config(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        mlp_ratio=2,
        image_size=image,
        patch_size=patch,
        num_labels=classes,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        drop_path_rate=drop_path,
    )
    return Dinov2ForImageClassification(config)
