"""A loss that is a module. What it holds is fixed: the stage that computes the loss has it."""

import copy

from torch import nn

from ...errors import CaptureError
from ...ir.spec import Spec
from .build import named_tensors, seeded, to_float64
from .user import users_errors


def make_module(spec: Spec, loss: object) -> nn.Module:
    """The user's module, or one of the user's class; a copy, for others may hold it.

    Raises CaptureError for one that has something to train, or that is elsewhere than on the CPU.
    """
    name, where = spec.model.loss, spec.at("model.loss")
    if isinstance(loss, type):
        hint = "a loss that is built with its arguments: criterion = nn.CrossEntropyLoss(...)"
        with users_errors(where, f"{name}() failed", hint), seeded(spec.train.seed):
            loss = loss()
    module: nn.Module = copy.deepcopy(loss)  # type: ignore[assignment]
    trained = [n for n, parameter in module.named_parameters() if parameter.requires_grad]
    if trained:
        raise CaptureError(
            f"{name} is a module with {', '.join(trained)} to train, and only the model is trained",
            where,
            "a model that holds it and returns its loss: loss: output; or what is fixed, as "
            "buffers, or with requires_grad_(False)",
        )
    for tensor_name, tensor in named_tensors(module):
        if tensor.device.type != "cpu":
            what = f"{name} has {tensor_name} on {tensor.device}"
            raise CaptureError(what, where, "build it on the CPU; the scripts choose their device")
    if spec.train.precision == "fp64":
        to_float64(module)
    return module
