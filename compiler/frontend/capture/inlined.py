"""Regions of a trace that torch.export puts into graphs of their own."""

import torch


def inline_region(
    node: torch.fx.Node,
) -> tuple[torch.fx.Graph, tuple[object, ...], bool | None, str | None] | None:
    """The sub-graph of a no_grad or autocast region, its inputs, whether it turns gradients on or
    off, and its autocast dtype; None for any other node."""
    name = str(node.target)
    if name == "wrap_with_set_grad_enabled":
        enabled, body, *inputs = node.args
        autocast = None
    elif name == "wrap_with_autocast":
        _, dtype, on, _, body, *inputs = node.args
        enabled, autocast = None, str(dtype).removeprefix("torch.") if on else None
    else:
        return None
    module = getattr(node.graph.owning_module, str(body.target))  # type: ignore[union-attr]
    return module.graph, tuple(inputs), None if enabled is None else bool(enabled), autocast
