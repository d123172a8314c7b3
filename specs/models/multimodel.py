"""One model for several tasks (after MultiModel, Kaiser et al. 2017): a net for each modality that
comes in, a body that all share, a head for each task."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ImageNet(nn.Module):
    """Images (batch, 3, size, size) to states (batch, patches, width)."""

    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, stride=2, padding=1)

    def forward(self, images):
        return self.conv2(F.relu(self.conv1(images))).flatten(2).transpose(1, 2)


class TextNet(nn.Module):
    """Tokens (batch, length) to states (batch, length, width)."""

    def __init__(self, vocab, length, width):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)

    def forward(self, tokens):
        return self.tokens(tokens) + self.positions.weight


class AudioNet(nn.Module):
    """Waves (batch, samples) to states (batch, frames, width)."""

    def __init__(self, width):
        super().__init__()
        self.frames = nn.Conv1d(1, width, 8, stride=4)

    def forward(self, waves):
        return self.frames(waves[:, None]).transpose(1, 2)


class ConvBlock(nn.Module):
    """A gated convolution along the sequence, around a shortcut."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.conv = nn.Conv1d(width, 2 * width, 3, padding=1)

    def forward(self, x):
        return x + F.glu(self.conv(self.norm(x).transpose(1, 2)), dim=1).transpose(1, 2)


class MultiModel(nn.Module):
    """Samples of one of two tasks, 0 to classify the image and 1 to classify the text, to logits
    (batch, classes). Waves are for a task that this training does not have."""

    def __init__(self, vocab, length, width, layers, classes):
        super().__init__()
        self.nets = nn.ModuleDict(
            {
                "image": ImageNet(width),
                "text": TextNet(vocab, length, width),
                "audio": AudioNet(width),
            }
        )
        self.body = nn.ModuleList(ConvBlock(width) for _ in range(layers))
        self.heads = nn.ModuleDict(
            {task: nn.Linear(width, classes) for task in ("image", "text", "audio")}
        )

    def forward(self, images, tokens, task, waves=None):
        given = {"image": images, "text": tokens, "audio": waves}
        logits = {}
        for name, value in given.items():
            if value is not None:
                x = self.nets[name](value)
                for block in self.body:
                    x = block(x)
                logits[name] = self.heads[name](x.mean(dim=1))
        return torch.where(task[:, None] == 0, logits["image"], logits["text"])


def build(vocab=64, length=16, width=32, layers=4, classes=10):
    """A model whose body has `layers` blocks."""
    return MultiModel(vocab, length, width, layers, classes)
