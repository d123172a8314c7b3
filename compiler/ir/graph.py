"""Graph: what the model computes in one microbatch, from the data to the loss.

There are no torch types in it: a graph can be printed, compared and kept in a fixture. An op prints
as one line, `outputs = target(arguments)`, then its module call and the user's own line:

    embedding: f32[batch, 128, 64] = aten.embedding(wte.weight, tokens)    # wte  gpt.py:58

Sizes are numbers or multiples of the batch, the number of samples in the microbatch, which is known
only when the script runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .function import UsersFunction
from .values import (
    Amount,
    Arg,
    CallId,
    Device,
    Dim,
    Items,
    Ref,
    State,
    TensorMeta,
    TorchConstant,
    dtypes,
    references,
    show,
)

__all__ = [
    "Amount",
    "Arg",
    "Call",
    "CallId",
    "Constructor",
    "Device",
    "Dim",
    "Graph",
    "Input",
    "Items",
    "Layer",
    "Module",
    "Op",
    "Parameter",
    "Recipe",
    "Ref",
    "State",
    "Statement",
    "TensorMeta",
    "TorchConstant",
    "dtypes",
    "references",
    "show",
]


@dataclass(frozen=True, slots=True)
class Op:
    """One ATen (or custom) operation of one module call."""

    name: str
    target: str
    """`aten.linear.default`"""
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    arg_names: tuple[str, ...]
    """The schema's names of the positional arguments."""
    outputs: tuple[str, ...]
    """Names of its values in order; "" for one that nothing uses."""
    call: CallId
    mutates: tuple[str, ...] = ()
    """Values or fqns whose storage it writes."""
    views: tuple[str, ...] = ()
    """Values or fqns whose storage its outputs share."""
    random: bool = False
    grad: bool = True
    """False inside torch.no_grad()."""
    autocast: str | None = None
    """The dtype of the torch.autocast around it, `bfloat16`; dtypes of its values follow. None: it
    is off."""
    where: str = ""
    """The user's line, `gpt.py:58`."""
    statement: int = 0
    """Key of Graph.statements: the user's statement that it is part of."""
    at_default: frozenset[str] = frozenset()
    """Names of positional arguments that equal the schema's default."""
    spelling: Literal["method", "torch", ""] = ""
    """Where Python has it: `x.mean()`, `torch.cat()`, or neither."""
    flops: Amount = field(default_factory=Amount)
    saved_bytes: Amount = field(default_factory=Amount)
    """What autograd keeps for the backward, each storage counted where it is kept first."""
    keeps: tuple[str, ...] = ()
    """Values, or inputs, whose memory that is or shows, also if it was kept before."""

    @property
    def operands(self) -> tuple[Ref | State, ...]:
        """Every value and parameter that it reads, in order, repeats included."""
        return tuple(references((self.args, tuple(value for _, value in self.kwargs))))


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module: what went in and came out, by the names of its forward."""

    path: str
    number: int
    arguments: tuple[tuple[str, Arg], ...]
    """(argument name, value); only those that were passed."""
    positional: int
    """How many of them were passed by position."""
    output: Arg
    statement: int = 0
    """The caller's statement that it is part of."""
    parent: CallId | None = None
    """The call that made it; None for the model's own."""


@dataclass(frozen=True, slots=True)
class Statement:
    """One execution of one statement of the user's forward."""

    where: str
    """`gpt.py:58`"""
    targets: tuple[str, ...] = ()
    """The names it assigns, where it assigns plain names."""


@dataclass(frozen=True, slots=True)
class Constructor:
    """How to build a leaf: `nn.Linear(128, 384, bias=False)`."""

    cls: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the user's model, called or not."""

    path: str
    cls: str
    where: str
    """Where its class is defined, `gpt.py:12`; "" for torch's own."""
    children: tuple[str, ...]
    """Attribute names, in order."""
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    constructor: Constructor | None = None
    """Set for a leaf: torch's own class, rebuilt and compared at capture."""
    sequential: bool = False
    """nn.Sequential or a subclass that keeps its forward."""
    indexed: bool = False
    """A container whose children are addressed by key: ModuleList, ModuleDict, Sequential."""
    training: bool = True


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a tensor gets its first value: recorded operations, the last of which gives it.

    Operations name their results v0, v1, ...; a random one carries its seed key, the owner's name
    and `#ordinal` where the owner draws more than once. With `saved`, the tensor lies in a file
    beside the scripts.
    """

    ops: tuple[Op, ...] = ()
    result: str = ""
    seeds: tuple[tuple[str, str], ...] = ()
    """(op name, seed key)."""
    saved: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter, buffer or constant tensor; tied names are aliases of the first."""

    fqn: str
    meta: TensorMeta
    recipe: Recipe = Recipe()
    aliases: tuple[str, ...] = ()
    buffer: bool = False
    persistent: bool = True
    """Whether state_dict has it."""


@dataclass(frozen=True, slots=True)
class Input:
    """An input of the graph and the field of a sample that feeds it."""

    name: str
    field: str
    meta: TensorMeta
    key: int | str | None = None
    """Where a sample of the user's Dataset has it; None where it is the sample itself."""
    whole: bool = False
    """It has no batch dimension: every microbatch takes all of it."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The unit that a cut respects: a module call, or the ops between two of them."""

    path: str
    call: CallId | None
    """The call that it is; None for loose ops."""
    kind: str
    """Layers of equal structure share it."""
    ops: tuple[str, ...]
    parameters: tuple[str, ...]
    param_bytes: int
    activation_bytes: Amount
    flops: Amount
    """Forward only."""
    bytes_moved: Amount
    """Read and written by its forward."""
    again_bytes: Amount = field(default_factory=Amount)
    """What autograd keeps of a call that runs again in the backward, while it does: of the one with
    the most beside what is kept by then."""
    freed_bytes: Amount = field(default_factory=Amount)
    """What the layer no longer keeps by then: the backward has been through all after the call."""
    again_flops: Amount = field(default_factory=Amount)
    """Of all its calls that run again."""


@dataclass(frozen=True, slots=True)
class Graph:
    """The training graph. Before `segment` it has no layers."""

    model: str
    """Class name of the user's model."""
    inputs: tuple[Input, ...]
    parameters: Mapping[str, Parameter]
    """By fqn: parameters, then buffers and constants, in the model's order."""
    modules: Mapping[str, Module]
    calls: Mapping[CallId, Call]
    ops: tuple[Op, ...]
    values: Mapping[str, TensorMeta]
    outputs: tuple[tuple[str, str], ...]
    """(name, value): `loss` first, then metrics."""
    weight: tuple[str, ...] = ()
    """Inputs that the weight of a microbatch in the mean follows from; () for its samples."""
    canonical: Mapping[str, str] = field(default_factory=dict)
    """Every name of every parameter and buffer, aliases included -> its key in `parameters`. Ops
    read a tied parameter by the name that the module around them owns."""
    statements: Mapping[int, Statement] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    """What to call a value that no statement names: the model's output, as the loss calls it."""
    registered: Mapping[str, str] = field(default_factory=dict)
    """Operations of the user's own, `bench.sleep.default` -> the module beside the model's that
    registers them."""
    functions: Mapping[str, UsersFunction] = field(default_factory=dict)
    """Autograd functions of the user's, by the target of their ops."""
    leaves: Mapping[str, str] = field(default_factory=dict)
    """Modules of the user's own that are kept whole -> the module beside the model's that defines
    their class. Such a call is one op, `ppc.leaf.default`, of the path, what the call was given and
    the module's tensors."""
    autocast: str | None = None
    """The dtype of the torch.autocast that stages run in."""
    coupled: str = ""
    """The user's line, `clip.py:58`, that looks at several samples of a microbatch, where the spec
    accepts it; "" where none does, and where a step is one microbatch."""
    layers: tuple[Layer, ...] = ()
    recompute: tuple[str, ...] = ()
    """Paths of modules that keep only what they are given: their calls run again in the backward.
    `Op.saved_bytes` and what layers add up from it count so."""
    evaluation: "Graph | None" = None
    """Where it differs from the training graph."""
    saved: bytes = b""
    """Weights that no recipe gives, as a safetensors file."""
    messages: tuple[str, ...] = field(default=())
    """What the user should know: weights that had to be saved, a fixed batch size."""

    def __str__(self) -> str:
        lines = [f"input {i.name}: {i.meta} <- {i.field}" for i in self.inputs]
        lines += [
            f"{'buffer' if p.buffer else 'param'} {p.fqn}: {p.meta}"
            for p in self.parameters.values()
        ]
        lines += [self.line(op) for op in self.ops]
        lines += [f"output {name}: {value}" for name, value in self.outputs]
        return "\n".join(lines) + "\n"

    def line(self, op: Op) -> str:
        """One op, printed as the module's docstring shows."""
        results = ", ".join(
            f"{name or '_'}: {self.values[name]}" if name else "_" for name in op.outputs
        )
        arguments = [show(a) for a in op.args] + [f"{k}={show(v)}" for k, v in op.kwargs]
        path, number = op.call
        call = f"{path or 'root'}{f'@{number}' if number else ''}"
        return f"{results} = {op.target}({', '.join(arguments)})    # {call}  {op.where}".rstrip()
