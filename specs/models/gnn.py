"""Graph networks in plain PyTorch: a GCN (Kipf, Welling 2017) on a whole graph, GraphSAGE (Hamilton
et al. 2017) on blocks of sampled neighbours, and a GCN whose states go through a GRU in time."""

from itertools import pairwise

import torch
import torch.nn as nn
import torch.nn.functional as F


class GCNLayer(nn.Module):
    """Each node takes the mean of itself and its neighbours, weighted by the roots of degrees."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x, edges):
        """x: (..., nodes, in_features); edges: (2, edges), from where to where."""
        nodes = x.shape[-2]
        source, target = edges
        degree = x.new_ones(nodes).index_add(0, target, x.new_ones(len(target)))
        scale = degree.rsqrt()
        x = self.linear(x) * scale[:, None]
        received = torch.zeros_like(x).index_add(-2, target, x.index_select(-2, source))
        return (received + x) * scale[:, None]


class GCN(nn.Module):
    """Features (nodes, features) of a whole graph and its edges to logits (nodes, classes)."""

    def __init__(self, features, width, layers, classes, dropout):
        super().__init__()
        sizes = [features, *[width] * (layers - 1), classes]
        self.layers = nn.ModuleList(GCNLayer(a, b) for a, b in pairwise(sizes))
        self.dropout = nn.Dropout(dropout)

    def forward(self, features, edges):
        x = features
        for layer in self.layers[:-1]:
            x = self.dropout(F.relu(layer(x, edges)))
        return self.layers[-1](x, edges)


class SAGELayer(nn.Module):
    """A node's own state beside the mean of its sampled neighbours'."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.own = nn.Linear(in_features, out_features)
        self.neighbours = nn.Linear(in_features, out_features, bias=False)

    def forward(self, x, neighbours):
        """x: (..., in_features); neighbours: (..., fan-out, in_features)."""
        return self.own(x) + self.neighbours(neighbours.mean(dim=-2))


class GraphSAGE(nn.Module):
    """Two layers on the block of a seed node: its neighbours and theirs, in fixed numbers.

    seeds: (batch, features), near: (batch, fan1, features), far: (batch, fan1, fan2, features).
    """

    def __init__(self, features, width, classes):
        super().__init__()
        self.inner = SAGELayer(features, width)
        self.outer = SAGELayer(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, seeds, near, far):
        hidden = F.relu(self.inner(near, far))
        x = F.relu(self.outer(F.relu(self.inner(seeds, near)), hidden))
        return self.head(F.normalize(x, dim=-1))


class DynamicGCN(nn.Module):
    """Snapshots (batch, time, nodes, features) of one graph to each node's next value
    (batch, nodes): a GCN on each snapshot, then a GRU over time for each node."""

    def __init__(self, features, width):
        super().__init__()
        self.first, self.second = GCNLayer(features, width), GCNLayer(width, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, snapshots, edges):
        x = self.second(F.relu(self.first(snapshots, edges)), edges)
        batch, time, nodes, width = x.shape
        x = x.transpose(1, 2).reshape(batch * nodes, time, width)
        _, last = self.gru(x)
        return self.head(last[-1]).view(batch, nodes)


def build_gcn(features=16, width=32, layers=3, classes=4, dropout=0.0):
    """A GCN of `layers` layers."""
    return GCN(features, width, layers, classes, dropout)


def build_sage(features=16, width=32, classes=4):
    """A GraphSAGE of two layers and a head."""
    return GraphSAGE(features, width, classes)


def build_dynamic(features=4, width=16):
    """Two graph convolutions and a GRU."""
    return DynamicGCN(features, width)
