"""Finds where a model computes with several samples at once: cut into microbatches, a batch has
other neighbours.

Sizes that grow with the batch tell it: a tensor with two of them pairs the samples; an operation
along one of them mixes them; and a value without any, made of all samples, that is then used for
each of them. Three things are none of this: batch norms, which are known by their operation; the
loss itself, which is made of all samples and used for none; and counts, made of whole numbers and
truths alone, for `(loss * mask / mask.sum()).sum()` is a mean.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from ...errors import CaptureError
from ...ir.graph import Arg, Dim, Op, Ref, State, TensorMeta
from ...ir.spec import Spec
from ...ir.values import has_batch
from .loss import find_loss
from .raw import Raw
from .user import is_users, location

along = frozenset(
    ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "argsort", "topk", "softmax",
     "_softmax", "log_softmax", "_log_softmax", "flip", "roll")
)  # fmt: skip
"""Operations that look at the other elements of a dimension and keep it."""
picking = frozenset(("gather", "index_select", "take_along_dim"))
recurrent = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
attention = "scaled_dot_product_attention"
shape_only = re.compile(r"aten\.(new_\w+|\w+_like)\.")
"""Operations that read no number of their first operand."""


spread = "one shape for both, as squeeze(1) or unsqueeze(1) give it; or "
"""What to do where two values were spread over each other by mistake."""


@dataclass(frozen=True, slots=True)
class Coupling:
    """The first operation that looks at several samples."""

    where: str
    """The user's line, `clip.py:58`."""
    how: str


def find_coupling(spec: Spec, raw: Raw) -> Coupling | None:
    """Before: sizes are in terms of the batch."""
    flow = Flow(raw)
    found = ((op.where, how) for op in raw.ops for how in flow.faults(op))
    return next((Coupling(where or loss_line(spec), how) for where, how in found), None)


def loss_line(spec: Spec) -> str:
    """Where the user's loss begins: torch notes no lines of what is called in no module."""
    loss = find_loss(spec)
    loss = type(loss).forward if isinstance(loss, nn.Module) else loss
    code = getattr(loss, "__code__", None)
    if code is None or not is_users(code.co_filename):
        return ""
    return f"{code.co_filename}:{code.co_firstlineno}"


def at_loss(spec: Spec, error: CaptureError) -> CaptureError:
    """The error, at the user's loss where it has no place: what has none is the loss's."""
    place = error.where or location(loss_line(spec)) or spec.at("model.loss")
    return CaptureError(error.message, place, error.hint)


def refuse_coupled(spec: Spec, coupling: Coupling) -> None:
    """Raises CaptureError at the user's line."""
    parallel = spec.parallel
    alone = "microbatches: 1" if parallel.data == 1 else "data: 1, microbatches: 1"
    raise CaptureError(
        f"{coupling.how}, so several microbatches do not add up to their global batch",
        location(coupling.where) or spec.at("model.loss"),
        f"{spread if 'spread to' in coupling.how else ''}parallel: {{{alone}}}; or model: "
        "{coupled: accept}, and the loss of each microbatch is that of its own samples alone",
    )


@dataclass
class Flow:
    """What is known of the values so far, op by op."""

    raw: Raw
    given: set[str] = field(default_factory=set)
    """Made of the data."""
    counts: set[str] = field(default_factory=set)
    """Whole numbers and truths that no parameter is behind, and what is made of such alone."""
    learned: set[str] = field(default_factory=set)
    """Made of parameters or buffers, too."""
    of_all: set[str] = field(default_factory=set)
    """Made of all samples, or of some that are not one's own."""
    by_sample: set[str] = field(default_factory=set)
    """Made of the samples' numbers, as arange(batch) counts them."""

    def __post_init__(self) -> None:
        self.given |= set(self.raw.inputs)
        self.counts |= {name for name in self.raw.inputs if not is_inexact(self.meta(name))}

    def meta(self, name: str) -> TensorMeta | None:
        return self.raw.values.get(name)

    def is_batched(self, name: str) -> bool:
        meta = self.meta(name)
        return meta is not None and any(isinstance(size, Dim) for size in meta.shape)

    def faults(self, op: Op) -> Iterator[str]:
        """How an op looks at several samples, if it does; then what it makes is known."""
        reads = [ref.name for ref in op.operands if isinstance(ref, Ref)]
        reads = reads[1:] if shape_only.match(op.target) else reads
        makes = [name for name in (*op.outputs, *op.mutates) if name]
        for name in filter(None, op.outputs):
            if sum(isinstance(size, Dim) for size in self.raw.values[name].shape) > 1:
                yield f"{self.made_of(op, name)} pairs the samples of a microbatch with each other"
        arguments = dict(zip(op.arg_names, op.args, strict=True)) | dict(op.kwargs)
        if arguments.get("scale_grad_by_freq") is True:
            yield "scale_grad_by_freq divides a gradient by how often the microbatch has its row"
        given = self.given.intersection(reads)
        batched = any(map(self.is_batched, makes))
        if given and self.mixes(op):
            yield f"{op.target} mixes the samples of a microbatch"
        if batched and self.of_all.intersection(reads):
            yield f"{op.target} uses for each sample what was made of all samples of a microbatch"
        self.follow(op, reads, makes, batched=batched)

    def made_of(self, op: Op, name: str) -> str:
        """A value that pairs samples; of which two it was made, where they were spread over each
        other: one forgets that labels are [batch] and scores [batch, 1]."""
        metas = [self.meta(ref.name) for ref in op.operands if isinstance(ref, Ref)]
        shapes = {str(meta): len(meta.shape) for meta in metas if meta and has_batch(meta.shape)}
        if len(metas) == 2 and len(set(shapes.values())) == 2:  # spread, no product
            return f"{' with '.join(shapes)}, spread to {self.meta(name)},"
        return str(self.meta(name))

    def follow(self, op: Op, reads: Sequence[str], makes: Sequence[str], *, batched: bool) -> None:
        """Note what an op makes."""
        stateful = any(isinstance(ref, State) for ref in op.operands)
        if stateful or self.learned.intersection(reads):
            self.learned.update(makes)
        if self.given.intersection(reads):
            self.given.update(makes)
            exact = not any(is_inexact(self.meta(name)) for name in makes)
            exact |= all(name in self.counts or name not in self.given for name in reads)
            if exact and self.learned.isdisjoint(makes):
                self.counts.update(makes)
            elif not batched and (
                self.of_all.intersection(reads) or any(map(self.is_batched, reads))
            ):
                self.of_all.update(makes)
        if (op.target.startswith("aten.arange") and has_batch(op.args)) or self.by_sample & set(
            reads
        ):
            self.by_sample.update(makes)

    def mixes(self, op: Op) -> bool:
        """Whether an op that keeps the batch looks from sample to sample."""
        name = op.target.split(".")[1]
        given = dict(zip(op.arg_names, op.args, strict=True)) | dict(op.kwargs)
        source = op.args[0] if op.args else None
        if not isinstance(source, Ref) or not op.target.startswith("aten."):
            return False
        shape = self.raw.values[source.name].shape
        if name in along:
            dims = given.get("dim", given.get("dims", () if name in ("flip", "roll") else -1))
            return on_batch(shape, dims)
        if name in picking:
            index = given.get("index", given.get("indices"))
            return on_batch(shape, given.get("dim")) and str(index) not in self.by_sample
        if name == "index":
            indices = op.args[1] if isinstance(op.args[1], tuple) else ()
            pairs = zip(shape, indices, strict=False)
            picked = [str(i) for size, i in pairs if isinstance(size, Dim) and i is not None]
            return any(index not in self.by_sample for index in picked)
        if name in recurrent:
            return on_batch(shape, 0 if not given.get("batch_first") else 1)
        if name == attention:
            return on_batch(shape, -2)
        return name == "layer_norm" and has_batch(given.get("normalized_shape"))


def is_inexact(meta: TensorMeta | None) -> bool:
    return meta is None or meta.dtype.startswith(("float", "bfloat", "complex"))


def on_batch(shape: Sequence[int | Dim], dims: Arg) -> bool:
    """Whether one of some dimensions grows with the batch."""
    several = dims if isinstance(dims, tuple) else (dims,)
    numbers = [dim for dim in several if isinstance(dim, int) and -len(shape) <= dim < len(shape)]
    return any(isinstance(shape[dim], Dim) for dim in numbers)
