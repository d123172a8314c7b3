"""A small multimodal language model (after LLaVA, Liu et al. 2023): a vision transformer, a
projector, and a language model that reads the image's patches before its text."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    """Self-attention of several heads, under a mask that says who may look at whom."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, mask=None):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(x.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and around a shortcut."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x, mask=None):
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class VisionTower(nn.Module):
    """Images (batch, 3, size, size) to states of patches (batch, patches, width)."""

    def __init__(self, size, patch, width, heads, layers):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class LanguageModel(nn.Module):
    """Text behind a prefix, which all of the text sees if it is there."""

    def __init__(self, vocab, context, width, heads, layers):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens, prefix, has_prefix):
        ahead, length = prefix.shape[1], tokens.shape[1]
        positions = torch.arange(length, device=tokens.device)
        x = torch.cat([prefix, self.embedding(tokens) + self.positions(positions)], dim=1)
        total = torch.arange(ahead + length, device=tokens.device)
        causal = total[:, None] >= total[None, :]
        is_text = total >= ahead
        mask = causal & (has_prefix[:, None, None].bool() | is_text)
        mask = mask | torch.eye(len(total), dtype=torch.bool, device=tokens.device)
        for block in self.blocks:
            x = block(x, mask[:, None])
        return self.head(self.norm(x[:, ahead:]))


class MLLM(nn.Module):
    """Tokens (batch, length), images, and for each sample whether it has one, to logits."""

    def __init__(self, vision, projector, language):
        super().__init__()
        self.vision, self.projector, self.language = vision, projector, language

    def forward(self, tokens, images, has_image):
        prefix = self.projector(self.vision(images))
        return self.language(tokens, prefix, has_image)


def build(size=16, patch=4, vocab=64, context=16, width=32, heads=4, layers=2):
    """A vision tower and a language model of `layers` blocks each."""
    vision = VisionTower(size, patch, width, heads, layers)
    projector = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
    return MLLM(vision, projector, LanguageModel(vocab, context, width, heads, layers))


def loss(logits, labels):
    """Mean cross entropy of the next token, over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
