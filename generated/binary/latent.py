"""What keeps latent weights near the signs that stand for them."""

from torch import nn


def clamp(module: nn.Module) -> None:
    """Between -1 and 1, beyond which no gradient reaches them; norms and biases are none."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.clamp_(-1, 1)
