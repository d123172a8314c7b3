"""A transformer whose layers are mixtures of experts, in two forms: with room for a fixed number of
tokens in each expert, or with as many as come (experts.py)."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from experts import SparseExperts


class CapacityExperts(nn.Module):
    """As SparseExperts, but of each sample an expert takes the first `capacity` tokens that prefer
    it, the others pass by: shapes hang on nothing (Lepikhin et al. 2020)."""

    def __init__(self, width, experts, hidden, capacity):
        super().__init__()
        self.capacity = capacity
        self.router = nn.Linear(width, experts, bias=False)
        self.enter = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.leave = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)

    def forward(self, x):
        weight, chosen = self.router(x).softmax(dim=-1).max(dim=-1)
        mask = F.one_hot(chosen, self.enter.shape[0])
        place = (mask.cumsum(dim=1) * mask - 1).clamp(max=self.capacity)
        rooms = F.one_hot(place + 1, self.capacity + 2)[..., 1:-1].to(x.dtype)
        sent = torch.einsum("btec,btd->becd", rooms, x)
        made = F.gelu(sent @ self.enter) @ self.leave
        return torch.einsum("btec,becd->btd", rooms, made) * weight[..., None]


class Block(nn.Module):
    """Causal attention, then the experts."""

    def __init__(self, width, heads, experts):
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.experts = experts

    def forward(self, x):
        batch, time, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, time, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, time, width))
        return x + self.experts(self.norm_2(x))


class MoE(nn.Module):
    """Tokens (batch, time) to logits (batch, time, vocab)."""

    def __init__(self, layers, width, heads, experts, hidden, vocab, context, capacity):
        super().__init__()

        def mixture():
            if capacity is None:
                return SparseExperts(width, experts, hidden)
            return CapacityExperts(width, experts, hidden, capacity)

        self.tokens = nn.Embedding(vocab, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, mixture()) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(layers=4, width=32, heads=2, experts=4, hidden=32, vocab=256, context=32, capacity=None):
    """A language model; `capacity` is the room in each expert, None for the sparse form."""
    return MoE(layers, width, heads, experts, hidden, vocab, context, capacity)
