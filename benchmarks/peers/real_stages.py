"""The GPT and the ResNet for the scripts beside it: whole or in two stages, with their data."""

import glob
import sysconfig
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F


class Halves:
    """A model of which a rank needs a part."""

    def __init__(self, settings):
        self.settings = settings
        self.model = self.build(**settings["args"])

    def samples(self, step):
        """Numbers of the samples of a step, in an order of their own for each epoch."""
        batch = self.settings["global_batch"]
        epoch, i = divmod(step, self.count // batch)
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(epoch))
        return order[i * batch : (i + 1) * batch]

    def update(self, optimizer, step):
        optimizer.step()
        optimizer.zero_grad()


class Gpt(Halves):
    """The bytes of the standard library, as the spec reads them."""

    def __init__(self, settings):
        from gpt import build

        self.build = build
        super().__init__(settings)
        files = sorted(glob.glob(glob.escape(sysconfig.get_path("stdlib")) + "/*.py"))
        raw = b"".join(Path(file).read_bytes() for file in files if Path(file).is_file())
        self.text = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        self.count = (len(raw) - 1) // 128

    def stage(self, rank, ranks):
        return FrontOfGpt(self.model) if rank == 0 else BackOfGpt(self.model)

    def windows(self, step):
        return self.samples(step)[:, None] * 128 + torch.arange(128)

    def inputs(self, step):
        return self.text[self.windows(step)].long()

    def targets(self, step):
        return self.text[self.windows(step) + 1].long()

    def loss(self, logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.1)


class FrontOfGpt(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.wte, self.wpe, self.drop = model.wte, model.wpe, model.drop
        self.blocks = model.blocks[:2]

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.blocks:
            x = block(x)
        return x


class BackOfGpt(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.blocks, self.ln_f, self.head = model.blocks[2:], model.ln_f, model.head

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


class ResNet(Halves):
    """The arrays beside the spec."""

    def __init__(self, settings):
        import numpy as np
        from resnet import build

        self.build = build
        super().__init__(settings)
        data = Path(settings["data"])
        self.images, self.labels = (
            torch.from_numpy(np.load(data / f"{name}.npy")) for name in ("images", "labels")
        )
        self.count = len(self.images)

    def stage(self, rank, ranks):
        m = self.model
        front = [m.conv1, m.bn1, m.relu, m.layer1, m.layer2]
        back = [m.layer3, m.layer4, m.avgpool, nn.Flatten(1), m.fc]
        return nn.Sequential(*(front if rank == 0 else back))

    def inputs(self, step):
        return self.images[self.samples(step)]

    def targets(self, step):
        return self.labels[self.samples(step)]

    def loss(self, logits, labels):
        return F.cross_entropy(logits, labels)

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)


def make(settings):
    return {"gpt": Gpt, "resnet": ResNet}[settings["model"]](settings)
