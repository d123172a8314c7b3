"""ResNet-18 for small images (He et al. 2016): a 3x3 stem without pooling, as used on CIFAR."""

import torch.nn as nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut, which is projected where the shape changes."""

    def __init__(self, in_channels, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = None
        if stride != 1 or in_channels != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(channels),
            )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Images of shape (batch, 3, height, width) to logits of shape (batch, classes)."""

    def __init__(self, blocks, width, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = self._make_layer(width, width, blocks[0], stride=1)
        self.layer2 = self._make_layer(width, 2 * width, blocks[1], stride=2)
        self.layer3 = self._make_layer(2 * width, 4 * width, blocks[2], stride=2)
        self.layer4 = self._make_layer(4 * width, 8 * width, blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def _make_layer(self, in_channels, channels, blocks, stride):
        layers = [BasicBlock(in_channels, channels, stride)]
        layers += [BasicBlock(channels, channels, stride=1) for _ in range(blocks - 1)]
        return nn.Sequential(*layers)

    def forward(self, images):
        x = self.relu(self.bn1(self.conv1(images)))
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.layer4(x)
        return self.fc(self.avgpool(x).flatten(1))


def build(width=64, classes=10):
    """ResNet-18; `width` is the number of channels of the first layer."""
    return ResNet((2, 2, 2, 2), width, classes)
