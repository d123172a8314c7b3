"""A classifier on a frozen convolutional encoder: only the head is trained."""

from itertools import pairwise

import torch.nn as nn


class Encoder(nn.Sequential):
    """Convolutions, each halving the image; no normalisation, so nothing in it changes."""

    def __init__(self, width, layers):
        channels = [3, *(width * 2**layer for layer in range(layers))]
        super().__init__()
        for in_channels, out_channels in pairwise(channels):
            self.append(nn.Conv2d(in_channels, out_channels, 3, stride=2, padding=1))
            self.append(nn.GELU())


class Classifier(nn.Module):
    """Images of shape (batch, 3, height, width) to logits of shape (batch, classes)."""

    def __init__(self, width, layers, hidden, classes):
        super().__init__()
        self.encoder = Encoder(width, layers)
        self.encoder.requires_grad_(False)
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.head = nn.Sequential(
            nn.Linear(16 * width * 2 ** (layers - 1), hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )

    def forward(self, images):
        features = self.pool(self.encoder(images))
        return self.head(features.flatten(1))


def build(width=8, layers=3, hidden=64, classes=10):
    """A classifier whose encoder has `layers` convolutions, the first `width` channels wide."""
    return Classifier(width, layers, hidden, classes)
