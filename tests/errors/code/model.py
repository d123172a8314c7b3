import torch


class Config: ...


def build(config=None):
    return torch.nn.Linear(4, 2)
