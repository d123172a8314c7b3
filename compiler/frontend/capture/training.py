"""The user's model and loss as one module: from the fields of a microbatch to the loss."""

import torch
from torch import nn

from ...errors import Location
from ...ir.spec import Spec
from .fields import Binding
from .loss import Loss, find_loss


class Training(nn.Module):
    """Takes the fields in the binding's order, returns the mean loss over the samples."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        binding: Binding,
        where: Location | None,
    ) -> None:
        super().__init__()
        self.model, self.loss, self.binding, self.where = model, loss, binding, where

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        fields = dict(zip(self.binding.fields, values, strict=True))
        output = self.model(
            *(fields[name] for name in self.binding.positional),
            **{argument: fields[name] for argument, name in self.binding.keywords.items()},
        )
        return self.loss(output, *(fields[name] for name in self.binding.loss))


def make_training(spec: Spec, model: nn.Module, binding: Binding) -> Training:
    """Put the spec's loss behind the model."""
    return Training(model, find_loss(spec), binding, spec.at("model.loss"))
