"""A diffusion transformer (Peebles, Xie 2023) that learns to tell the noise in an image, told the
time and a text, which a frozen encoder reads."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class TextEncoder(nn.Module):
    """Tokens (batch, length) to one state (batch, width)."""

    def __init__(self, vocab, width, heads, layers):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x.mean(dim=1)


class TimeEmbedding(nn.Module):
    """Times (batch,) to states (batch, width), by sines and cosines."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("frequencies", 1e-4 ** torch.linspace(0, 1, width // 2))
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t):
        angles = t[:, None] * self.frequencies
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=1))


def modulate(x, shift, scale):
    return x * (1 + scale[:, None]) + shift[:, None]


class Block(nn.Module):
    """A transformer block whose norms the condition shifts, scales and gates."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x, condition):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=1)
        h = modulate(self.norm1(x), shift1, scale1)
        x = x + gate1[:, None] * self.attention(h, h, h, need_weights=False)[0]
        return x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))


class DiT(nn.Module):
    """Images (batch, channels, size, size) and tokens (batch, length) to the loss: how far the
    noise that it tells is from the noise that was added, by time."""

    def __init__(self, text, channels, size, patch, width, heads, layers, times):
        super().__init__()
        self.text = text.requires_grad_(False)
        self.patch, self.times = patch, times
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))
        self.time = TimeEmbedding(width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, channels * patch**2)
        kept = torch.cumprod(1 - torch.linspace(1e-3, 0.2, times), dim=0)
        self.register_buffer("kept", kept)

    def forward(self, images, tokens):
        with torch.no_grad():
            text = self.text(tokens)
        t = torch.randint(self.times, (len(images),), device=images.device)
        noise = torch.randn_like(images)
        kept = self.kept[t][:, None, None, None]
        noisy = kept.sqrt() * images + (1 - kept).sqrt() * noise
        x = self.patches(noisy).flatten(2).transpose(1, 2) + self.positions
        condition = self.time(t) + text
        for block in self.blocks:
            x = block(x, condition)
        told = self.head(self.norm(x)).transpose(1, 2)
        told = F.fold(told, images.shape[2:], self.patch, stride=self.patch)
        errors = (told - noise).square().mean(dim=(1, 2, 3))
        weight = (self.kept[t] / (1 - self.kept[t])).clamp(max=5)
        return (weight * errors).mean()


def build(channels=3, size=16, patch=4, width=32, heads=4, layers=4, vocab=64, times=50):
    """A DiT of `layers` blocks behind a frozen text encoder of two layers."""
    text = TextEncoder(vocab, width, heads, layers=2)
    return DiT(text, channels, size, patch, width, heads, layers, times)
