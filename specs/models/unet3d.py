"""A 3-D U-Net for segmentation (Cicek et al. 2016): every level's skip joins by concatenation."""

import torch
import torch.nn as nn


class DoubleConv(nn.Sequential):
    """Two 3x3x3 convolutions, each normalised and rectified."""

    def __init__(self, in_channels, channels):
        super().__init__(
            nn.Conv3d(in_channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(4, channels),
            nn.ReLU(inplace=True),
            nn.Conv3d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(4, channels),
            nn.ReLU(inplace=True),
        )


class UNet3d(nn.Module):
    """Volumes (batch, in_channels, depth, height, width) to logits (batch, classes, ...)."""

    def __init__(self, in_channels, classes, width, levels):
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.encoders = nn.ModuleList()
        for channels in widths:
            self.encoders.append(DoubleConv(in_channels, channels))
            in_channels = channels
        self.pool = nn.MaxPool3d(2)
        self.bottleneck = DoubleConv(widths[-1], 2 * widths[-1])
        self.ups = nn.ModuleList()
        self.decoders = nn.ModuleList()
        for channels in reversed(widths):
            self.ups.append(nn.ConvTranspose3d(2 * channels, channels, 2, stride=2))
            self.decoders.append(DoubleConv(2 * channels, channels))
        self.head = nn.Conv3d(width, classes, 1)

    def forward(self, volumes):
        x, skips = volumes, []
        for encoder in self.encoders:
            x = encoder(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottleneck(x)
        for up, decoder in zip(self.ups, self.decoders):
            x = decoder(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


def build(in_channels=1, classes=3, width=8, levels=3):
    """A 3-D U-Net; `width` is the number of channels of the first of `levels` levels."""
    return UNet3d(in_channels, classes, width, levels)
