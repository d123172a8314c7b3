"""DLRM, a click model (Naumov et al. 2019): dense features and embedded categories interact."""

from itertools import pairwise

import torch
import torch.nn as nn
import torch.nn.functional as F


def mlp(sizes):
    """Linear layers with a ReLU after each."""
    layers = []
    for in_features, out_features in pairwise(sizes):
        layers += [nn.Linear(in_features, out_features), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    """Dense features (batch, dense) and indices (batch, tables, bag) to a logit (batch,)."""

    def __init__(self, dense, tables, width, bottom, top):
        super().__init__()
        self.bottom = mlp([dense, *bottom, width])
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for rows in tables)
        features = len(tables) + 1
        pairs = features * (features - 1) // 2
        self.top = mlp([width + pairs, *top])
        self.head = nn.Linear(top[-1], 1)
        self.register_buffer(
            "pairs", torch.tril_indices(features, features, offset=-1), persistent=False
        )

    def forward(self, dense, categorical):
        dense = self.bottom(dense)
        embedded = [table(categorical[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack([dense, *embedded], dim=1)
        products = features @ features.transpose(1, 2)
        interactions = products[:, self.pairs[0], self.pairs[1]]
        return self.head(self.top(torch.cat([dense, interactions], dim=1))).squeeze(1)


def build(dense=13, tables=(1000, 500, 200, 100), width=16, bottom=(64, 32), top=(64, 32)):
    """A DLRM; `tables` gives the rows of each table, `bottom` and `top` the hidden layers."""
    return DLRM(dense, tables, width, bottom, top)


def loss(logits, clicks):
    """Mean binary cross entropy; clicks are 0 or 1."""
    return F.binary_cross_entropy_with_logits(logits, clicks.to(logits.dtype))
