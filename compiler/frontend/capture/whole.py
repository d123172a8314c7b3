"""A module that is kept whole, as one operation: `ppc.leaf`.

Without values it stands for its results: their shapes were seen when the whole model ran once at
each of two batch sizes (survey.py), and lie on the line between the two for any other. With values
the module itself runs.

    known     the leaves of the model that was captured last
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CaptureError
from ...ir.graph import Arg, Constructor, Op, references
from ...ir.spec import Spec
from .private import is_fake, node_name, stores
from .trees import tree_leaves, tree_map

target = "ppc.leaf.default"
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One module, by its path in the model."""

    path: str
    module: nn.Module
    """Without values."""
    constructor: Constructor
    source: str
    """The module beside the model's that defines its class; "" for torch's own."""
    make: partial[nn.Module]
    """Builds another, as a script does."""


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that a leaf returned."""

    shape: Shape
    dtype: torch.dtype
    grad: bool
    """Whether a gradient goes back from it."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One call of a leaf."""

    given: tuple[Shape, ...]
    """Of the tensors that it was given."""
    results: tuple[Result, ...]
    nest: Any
    """How they stand in what it returned, the tensors' places numbered."""
    flops: int
    saved: int
    """Bytes that autograd kept, without the tensors that it was given and its own."""
    random: bool


@dataclass(slots=True)
class Known:
    """Leaves, and what was seen of them by batch size and path, in the order of the calls."""

    spec: Spec | None = None
    leaves: Mapping[str, Leaf] = field(default_factory=dict)
    seen: dict[int, dict[str, list[Seen]]] = field(default_factory=dict)
    watch: Callable[..., object] | None = None
    """Runs a leaf while the model is surveyed."""
    real: dict[str, nn.Module] = field(default_factory=dict)


known = Known()


def know(spec: Spec, leaves: Mapping[str, Leaf]) -> None:
    """Begin with another model."""
    known.spec, known.leaves, known.seen, known.real = spec, leaves, {}, {}


@torch.library.custom_op("ppc::leaf", mutates_args=())
def leaf_op(path: str, given: list[Tensor], state: list[Tensor]) -> list[Tensor]:
    """The results of a leaf; `state`: its parameters and buffers."""
    raise NotImplementedError("without values only")


@leaf_op.register_fake
def _(path: str, given: list[Tensor], state: list[Tensor]) -> list[Tensor]:
    del state  # whose shapes tell nothing
    seen = look_up(path, shapes(given))
    return [torch.empty(result.shape, dtype=result.dtype) for result in seen.results]


def setup(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001  # torch's signature
    ctx.like = [[(tuple(t.shape), t.dtype) for t in tensors] for tensors in inputs[1:]]


def backward(ctx: Any, _: Any) -> Any:
    """A gradient for every tensor, without values."""

    def gradient(shape: Shape, dtype: torch.dtype) -> Tensor | None:
        return torch.zeros(shape, dtype=dtype) if dtype.is_floating_point else None

    return None, *([gradient(*like) for like in tensors] for tensors in ctx.like)


leaf_op.register_autograd(backward, setup_context=setup)


def shapes(tensors: Sequence[Tensor]) -> tuple[Shape, ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors)


def look_up(path: str, given: tuple[Shape, ...]) -> Seen:
    """What a leaf returns when it is given such shapes."""
    for calls in known.seen.values():
        for seen in calls[path]:
            if seen.given == given:
                return seen
    sizes = sorted(known.seen)
    for a, b in pairwise(sizes):
        for one, other in zip(known.seen[a][path], known.seen[b][path], strict=True):
            between = Line(a, b)
            number = between.number(one.given, other.given, given)
            if number is not None:
                return between.at(number, one, other)
    raise CaptureError(f"the leaf {path} is given other shapes than it was seen with: {given}")


@dataclass(frozen=True, slots=True)
class Line:
    """Through what was seen at two batch sizes."""

    a: int
    b: int

    def number(
        self, first: Sequence[Shape], second: Sequence[Shape], given: Sequence[Shape]
    ) -> int | None:
        """The batch size of some shapes; None if they are of another call."""
        if not [*map(len, first)] == [*map(len, second)] == [*map(len, given)]:
            return None
        sizes = (zip(*shapes, strict=True) for shapes in zip(first, second, given, strict=True))
        found = {self.batch(*triple) for shape in sizes for triple in shape} - {self.a}
        return self.a if not found else found.pop() if len(found) == 1 else None

    def batch(self, x: int, y: int, size: int) -> int | None:
        """The batch at which a size is so, on the way from x to y; `a` where it is the same."""
        if x == y:
            return self.a if size == x else None
        return self.a + (size - x) * (self.b - self.a) // (y - x)

    def at(self, number: int, one: Seen, other: Seen) -> Seen:
        """What would be seen."""

        def size(x: int, y: int) -> int:
            return x + (y - x) * (number - self.a) // (self.b - self.a)

        results = tuple(
            replace(x, shape=tuple(map(size, x.shape, y.shape)))
            for x, y in zip(one.results, other.results, strict=True)
        )
        return replace(
            one, results=results, flops=size(one.flops, other.flops),
            saved=size(one.saved, other.saved),
        )  # fmt: skip


def stand_in(model: nn.Module, *, stage: bool = False) -> None:
    """Let the leaves of a model, or of a stage of it, stand for their results without values."""
    modules = dict(model.named_modules())
    for path in known.leaves:
        if path in modules and (path or not stage):
            module = modules[path]
            module.forward = stand_for(path, module, module.forward)


def class_of(leaf: Leaf) -> type[nn.Module]:
    """What a script's text means by a leaf's class; a stage that is the model derives from it."""
    cls = type(leaf.module)
    if leaf.path:
        return cls

    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        return stand_for("", self, cls.forward.__get__(self))(*args, **kwargs)

    return type(cls.__name__, (cls,), {"forward": forward})


def stand_for(path: str, module: nn.Module, own: Callable[..., Any]) -> Callable[..., object]:
    """A leaf's forward, for tensors with and without values."""

    @wraps(own)
    def forward(*args: object, **kwargs: object) -> object:
        if known.watch is not None:
            return known.watch(path, module, own, args, kwargs)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        state = state_of(module)
        if not any(map(is_fake, (*given, *state))):
            return own(*args, **kwargs)
        seen = look_up(path, shapes(given))
        results = without_values(path, seen, given, state)
        return tree_map(lambda i: None if i is None else results[i], seen.nest)

    return forward


def state_of(module: nn.Module) -> list[Tensor]:
    """A leaf's parameters and buffers, each once."""
    return [*module.parameters(), *module.buffers()]


def without_values(path: str, seen: Seen, given: list[Tensor], state: list[Tensor]) -> list[Tensor]:
    """A leaf's results; in a trace all look as if a gradient went back from them."""
    results = leaf_op(path, given, state)
    return [
        result if expected.grad or node_name(result) else result.detach()
        for result, expected in zip(results, seen.results, strict=True)
    ]


def run(op: Op, value: Callable[[Arg], Any]) -> list[Tensor]:
    """The operation of a graph. `value`: an argument as torch takes it."""
    path = str(op.args[0])
    args, state = value(op.args[1]), value(op.args[2])
    kwargs = {name: value(argument) for name, argument in op.kwargs}
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if any(map(is_fake, (*given, *state))):
        return without_values(path, look_up(path, shapes(given)), given, state)
    module = real(path)
    with holding(module, state):
        result = module(*args, **kwargs)
    return [t for t in tree_leaves(result) if isinstance(t, Tensor)]


def seen_of(op: Op, value: Callable[[Arg], Any]) -> Seen:
    """What was seen of an operation's call."""
    leaves = tree_leaves([value(op.args[1]), *(value(argument) for _, argument in op.kwargs)])
    return look_up(str(op.args[0]), shapes([t for t in leaves if isinstance(t, Tensor)]))


def real(path: str) -> nn.Module:
    """A leaf with values of its own, which are none of the model's."""
    if path not in known.real:
        with torch.random.fork_rng(devices=[]):
            made = known.leaves[path].make()
        modes = {name: m.training for name, m in known.leaves[path].module.named_modules()}
        for name, module in made.named_modules():
            module.training = modes[name]
        known.real[path] = made
    return known.real[path]


@contextmanager
def holding(module: nn.Module, state: Sequence[Tensor]) -> Iterator[None]:
    """While a leaf has other tensors than its own, those of a graph in the order of state_of."""
    new = dict(zip(map(id, state_of(module)), state, strict=True))
    held = [store for m in module.modules() for store in stores(m)]
    before = [dict(store) for store in held]
    for store in held:
        store.update({name: new[id(t)] for name, t in store.items() if t is not None})
    try:
        yield
    finally:
        for store, old in zip(held, before, strict=True):
            store.update(old)


def with_call(op: Op, arguments: Sequence[tuple[str, Arg]], positional: int) -> Op:
    """The operation as a graph has it: with what the module's call was given, as it was given."""
    args = tuple(value for _, value in arguments[:positional])
    kwargs = tuple(arguments[positional:])
    if (*references((args, tuple(value for _, value in kwargs))),) != op.args[1]:
        raise CaptureError(f"the leaf {op.args[0]} is given a tensor that no trace shows")
    return replace(op, args=(op.args[0], args, op.args[2]), kwargs=kwargs)


def draws(node: torch.fx.Node) -> bool:
    """Whether a traced node is a leaf that draws random numbers."""
    seen = known.seen.values() if str(node.target) == target else ()
    return any(call.random for calls in seen for call in calls[str(node.args[0])])
