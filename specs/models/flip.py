"""FLIP (Li et al. 2023): CLIP that sees a random part of each image's patches while it trains."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A transformer block, normalised before each part."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class RandomPatches(nn.Module):
    """Keeps `count` patches of each sample, others each time."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def forward(self, x):
        noise = torch.rand(x.shape[:2], device=x.device)
        kept = noise.argsort(dim=1)[:, : self.count]
        return x.gather(1, kept[..., None].expand(-1, -1, x.shape[2]))


class ImageTower(nn.Module):
    """Images to features, from a part of their patches."""

    def __init__(self, width, heads, layers, image, patch, kept):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2, width))
        self.mask = RandomPatches(kept)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, width, bias=False)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        x = self.mask(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


class TextTower(nn.Module):
    """Texts to features."""

    def __init__(self, width, heads, layers, vocab, context):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Parameter(0.02 * torch.randn(1, context, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, width, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


class Flip(nn.Module):
    """Both towers, and how much their similarity counts."""

    def __init__(self, width, heads, layers, image, patch, kept, vocab, context):
        super().__init__()
        self.image = ImageTower(width, heads, layers, image, patch, kept)
        self.text = TextTower(width, heads, layers, vocab, context)
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, images, tokens):
        images = F.normalize(self.image(images), dim=-1)
        tokens = F.normalize(self.text(tokens), dim=-1)
        return {"images": self.log_scale.exp() * images, "texts": tokens}


def build(width=32, heads=4, layers=2, image=16, patch=4, kept=8, vocab=64, context=8):
    return Flip(width, heads, layers, image, patch, kept, vocab, context)


def loss(features):
    """Each image's own text is the likeliest, and each text's own image; how often it is."""
    logits = features["images"] @ features["texts"].T
    own = torch.arange(len(logits), device=logits.device)
    nll = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
    return nll, {"accuracy": (logits.argmax(dim=1) == own).float().mean()}
