"""The user's model and loss as one module: from the fields of a microbatch to the loss."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from ...errors import Location
from ...ir.spec import Spec
from .autocast import autocast, regions_of
from .distributions import unchecked
from .fields import Binding
from .loss import Loss, check_output, find_loss, take_apart
from .private import checkpoints_plain, is_fake, masks_unread


class Training(nn.Module):
    """Takes the fields in the binding's order; returns the microbatch's loss and then its metrics,
    whose names are in `names` then."""

    names: tuple[str, ...] = ("loss",)

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        binding: Binding,
        where: Location | None,
        autocast: str | None = None,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        """Around what a checkpoint of the model's own calls."""
        self.model, self.loss, self.binding, self.where = model, loss, binding, where
        self.autocast = autocast
        """The dtype that forward is to run under."""
        self.device = device
        """The kind of device that it is for."""

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fields = dict(zip(self.binding.fields, values, strict=True))
        fake = any(map(is_fake, values))
        with unchecked() if fake else nullcontext():
            output = self.call_model(fields, fake=fake)
            check_output(self.loss, output)
            given = (fields[name] for name in self.binding.loss)
            named = {name: fields[field] for name, field in self.binding.loss_keywords.items()}
            with regions_of(self.device):
                results = take_apart(self.loss(output, *given, **named))
        self.names = tuple(results)
        return tuple(results.values())

    def call_model(self, fields: dict[str, torch.Tensor], *, fake: bool) -> object:
        """The model's output."""
        masks = masks_applied(self.model) if fake else nullcontext()
        with masks, checkpoints_plain(self.around), regions_of(self.device):
            return self.model(
                *(fields[name] for name in self.binding.positional),
                **{argument: fields[name] for argument, name in self.binding.keywords.items()},
            )

    def run(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same, in the spec's precision."""
        with autocast(self.autocast):
            results: tuple[torch.Tensor, ...] = self(*values)
        return results


def make_training(spec: Spec, model: nn.Module, binding: Binding) -> Training:
    """Put the spec's loss behind the model."""
    dtype = "bfloat16" if spec.train.precision == "bf16" else None
    device = spec.cluster.device.kind
    return Training(model, find_loss(spec), binding, spec.at("model.loss"), dtype, device)


@contextmanager
def masks_applied(model: nn.Module) -> Iterator[None]:
    """Without values attention applies the mask that it is given, and looks for nothing simpler: a
    mask that it need not read, by `is_causal`, would be an argument without a value."""

    def before(
        _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        causal = kwargs.get("is_causal") and kwargs.get("attn_mask") is not None
        return args, kwargs | ({"is_causal": False} if causal else {})

    attention = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    handles = [
        m.register_forward_pre_hook(before, prepend=True, with_kwargs=True) for m in attention
    ]
    try:
        with masks_unread():
            yield
    finally:
        for handle in handles:
            handle.remove()
