"""A spiking ResNet: leaky integrate-and-fire neurons over a few time steps, trained by a surrogate
gradient. Beside the spikes runs a stream of logits, to which each block adds its own; it can be
taken off when the training is over. Plain PyTorch."""

import math

import torch
from torch import Tensor, nn


class Spike(torch.autograd.Function):
    """1 where a neuron's potential is above its threshold. The step has no gradient to speak of:
    backward takes that of an arctangent with a slope."""

    @staticmethod
    def forward(ctx, potential, slope):
        ctx.save_for_backward(potential)
        ctx.slope = slope
        return (potential >= 0).to(potential.dtype)

    @staticmethod
    def backward(ctx, grad):
        (potential,) = ctx.saved_tensors
        scaled = math.pi / 2 * ctx.slope * potential
        return grad * ctx.slope / 2 / (1 + scaled**2), None


class Neurons(nn.Module):
    """One for each element of a sample; time steps lie beside the samples, [batch x steps, ...]."""

    def __init__(self, steps: int, decay: float = 0.5, threshold: float = 1.0) -> None:
        super().__init__()
        self.steps, self.decay, self.threshold = steps, decay, threshold

    def forward(self, current: Tensor) -> Tensor:
        current = current.unflatten(0, (-1, self.steps))
        potential = torch.zeros_like(current[:, 0])
        spikes = []
        for step in range(self.steps):
            potential = self.decay * potential + current[:, step]
            spike = Spike.apply(potential - self.threshold, 2.0)
            potential = potential * (1 - spike.detach())
            spikes.append(spike)
        return torch.stack(spikes, 1).flatten(0, 1)


class Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int, steps: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.fire1 = Neurons(steps)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Conv2d(channels, out, 1, stride, bias=False)
        self.fire2 = Neurons(steps)
        self.auxiliary = nn.Linear(out, classes)

    def forward(self, spikes: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        inner = self.fire1(self.norm1(self.conv1(spikes)))
        spikes = self.fire2(self.norm2(self.conv2(inner)) + self.shortcut(spikes))
        logits = logits + self.auxiliary(spikes.mean((2, 3)))
        return spikes, logits


class SpikingResNet(nn.Module):
    def __init__(self, width: int, steps: int, classes: int) -> None:
        super().__init__()
        self.steps, self.classes = steps, classes
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.fire = Neurons(steps)
        sizes = [(width, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 1)]
        self.blocks = nn.ModuleList(Block(*size, steps, classes) for size in sizes)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        current = self.norm(self.conv(images)).repeat_interleave(self.steps, 0)
        spikes = self.fire(current)
        logits = spikes.new_zeros(len(spikes), self.classes)
        for block in self.blocks:
            spikes, logits = block(spikes, logits)
        logits = logits + self.head(spikes.mean((2, 3)))
        return logits.unflatten(0, (-1, self.steps)).mean(1)


def build(width: int = 16, steps: int = 4, classes: int = 10) -> nn.Module:
    return SpikingResNet(width, steps, classes)
