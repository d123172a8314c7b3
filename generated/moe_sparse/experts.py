"""A mixture of experts that sends each token to its expert alone, however many come to each."""

import torch
import torch.nn as nn


class SparseExperts(nn.Module):
    """Tokens of shape (batch, time, width) to the same, each through the expert that its router
    prefers (Fedus et al. 2021). How many rows an expert gets hangs on the data."""

    def __init__(self, width, experts, hidden):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
            for _ in range(experts)
        )

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weight, chosen = self.router(tokens).softmax(dim=-1).max(dim=-1)
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(tokens[rows]) * weight[rows, None])
        return out.view_as(x)
