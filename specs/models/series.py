"""A stacked LSTM on series of different lengths, each layer beginning in the state where the one
below it ended (an encoder's way: Sutskever et al. 2014)."""

import torch.nn as nn
from packed import PackedLSTM


class Series(nn.Module):
    """Padded values (batch, time, features), lengths (batch,) to a forecast (batch, features)."""

    def __init__(self, layers, features, width):
        super().__init__()
        self.width = width
        self.enter = nn.Linear(features, width)
        self.layers = nn.ModuleList(PackedLSTM(width) for _ in range(layers))
        self.head = nn.Linear(width, features)

    def forward(self, values, lengths):
        x = self.enter(values)
        state = x.new_zeros(x.shape[0], self.width), x.new_zeros(x.shape[0], self.width)
        for layer in self.layers:
            x, state = layer(x, lengths, state)
        hidden, _ = state
        return self.head(hidden)


def build(layers=4, features=4, width=32):
    """`layers` LSTMs."""
    return Series(layers, features, width)
