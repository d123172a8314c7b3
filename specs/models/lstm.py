"""A stacked LSTM language model with dropout between the layers (Zaremba et al. 2014)."""

import torch.nn as nn
import torch.nn.functional as F


class LSTMLanguageModel(nn.Module):
    """Tokens of shape (batch, time) to logits of shape (batch, time, vocab)."""

    def __init__(self, layers, width, vocab, dropout):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens):
        x = self.dropout(self.embedding(tokens))
        for layer in self.layers:
            x, _ = layer(x)
            x = self.dropout(x)
        return self.head(x)


def build(layers=2, width=64, vocab=256, dropout=0.0):
    """A language model of `layers` LSTMs."""
    return LSTMLanguageModel(layers, width, vocab, dropout)


def loss(logits, labels):
    """Mean cross entropy of the next byte, over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
