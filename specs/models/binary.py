"""A VGG whose weights and activations are +1 or -1: gradients go past the signs to latent weights,
by a straight-through estimator. Plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Sign(torch.autograd.Function):
    """+1 or -1. Backward goes straight through, but where the input is beyond -1 and 1."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.ones_like(x).copysign(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


class BinaryConv2d(nn.Conv2d):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__(channels, out, 3, padding=1, bias=False)
        nn.init.uniform_(self.weight, -1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, Sign.apply(self.weight), padding=self.padding)


class BinaryLinear(nn.Linear):
    def __init__(self, features: int, out: int) -> None:
        super().__init__(features, out, bias=False)
        nn.init.uniform_(self.weight, -1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Sign.apply(self.weight))


class Binarise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Sign.apply(x)


def features(channels: int, out: int, pool: int) -> nn.Sequential:
    """A convolution and the signs of its normalised results."""
    layers = [BinaryConv2d(channels, out), nn.BatchNorm2d(out), Binarise()]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


class BinaryVGG(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        sizes = [(3, width, 0), (width, width, 1), (width, 2 * width, 0), (2 * width, 2 * width, 1)]
        self.features = nn.ModuleList(features(*size) for size in sizes)
        self.hidden = BinaryLinear(2 * width * 16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.binarise = Binarise()
        self.head = BinaryLinear(32, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for part in self.features:
            x = part(x)
        x = self.binarise(self.norm(self.hidden(x.flatten(1))))
        return self.head(x) / 32**0.5


def build(width: int = 24, classes: int = 10) -> nn.Module:
    """For images of 16 x 16."""
    return BinaryVGG(width, classes)
