"""Raw: an exported program as ops of the graph, with what later steps need to know about them."""

from dataclasses import dataclass, field

import torch

from ...ir.function import UsersFunction
from ...ir.graph import Arg, CallId, Op, Recipe, Statement, TensorMeta
from .checkpoints import Regions
from .export import RawCall


@dataclass
class Raw:
    """Built up by `convert`, then read only."""

    ops: list[Op] = field(default_factory=list)
    values: dict[str, TensorMeta] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    states: dict[str, TensorMeta] = field(default_factory=dict)
    """Parameters and buffers, by the name that State gives them."""
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors of forward that the model does not hold, by the name that State gives them."""
    recipes: dict[str, Recipe] = field(default_factory=dict)
    """How the factory made some of these."""
    updates: set[str] = field(default_factory=set)
    """Ops that write to buffers, at the end, what forward assigned to them."""
    output: Arg = None
    calls: dict[CallId, RawCall] = field(default_factory=dict)
    call_statements: dict[CallId, int] = field(default_factory=dict)
    parents: dict[CallId, CallId] = field(default_factory=dict)
    statements: dict[int, Statement] = field(default_factory=dict)
    registered: dict[str, str] = field(default_factory=dict)
    """Operations of the user's own -> the modules that register them."""
    functions: dict[str, UsersFunction] = field(default_factory=dict)
    """Autograd functions of the user's, by target."""
    checkpoints: Regions = field(default_factory=Regions)
