"""Finds what grows with the batch: two captures at different sizes, compared number by number."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count

import torch

from ...errors import CaptureError
from ...ir.graph import Arg, CallId, Dim, Items, Op, State, TensorMeta
from .export import RawCall
from .raw import Raw
from .user import location


def batch_sizes(fields: Mapping[str, TensorMeta]) -> tuple[int, int]:
    """Two primes that are no size of the data, so that a batch's size is recognised as such."""
    taken = {size for meta in fields.values() for size in meta.shape}
    primes = (n for n in count(3, 2) if all(n % d for d in range(3, n, 2)) and n not in taken)
    return next(primes), next(primes)


def becomes(x: Op, y: Op) -> str:
    """How two ops differ."""
    if x.target != y.target:
        return f"{x.target} becomes {y.target}"
    if len(x.outputs) != len(y.outputs):
        return f"{x.target} gives {len(x.outputs)} and {len(y.outputs)} results"
    first, second = (f"call {call[1]} of {call[0] or 'the model'}" for call in (x.call, y.call))
    return f"{first} becomes {second}"


class Generaliser:
    """Merges captures at batch sizes `a` and `b` into one in terms of the batch."""

    def __init__(self, a: int, b: int) -> None:
        self.a, self.b = a, b

    def merge(self, first: Raw, second: Raw) -> Raw:
        """Raises CaptureError at the user's line where the captures differ otherwise."""
        for x, y in zip(first.ops, second.ops, strict=False):
            if (x.target, len(x.outputs), x.call) != (y.target, len(y.outputs), y.call):
                raise self.branches(x, y, first, second)
        if len(first.ops) != len(second.ops):
            longer = max(first.ops, second.ops, key=len)
            extra = longer[min(len(first.ops), len(second.ops))]
            raise self.differs(extra, f"{len(first.ops)} operations become {len(second.ops)}")
        self.compare_constants(first, second)
        return replace(
            first,
            ops=[self.op(x, y, first.values) for x, y in zip(first.ops, second.ops, strict=True)],
            values=self.values(first, second),
            calls={
                key: self.call(key, c, second.calls[key], first) for key, c in first.calls.items()
            },
        )

    def branches(self, x: Op, y: Op, first: Raw, second: Raw) -> CaptureError:
        """Where the captures part: a line that runs in one of them alone, if there is such."""
        for op, size, other in ((y, self.b, first), (x, self.a, second)):
            if op.where and op.where not in {o.where for o in other.ops}:
                return self.differs(op, f"{op.target} runs for {size} alone")
        return self.differs(x if x.where else y, becomes(x, y))

    def compare_constants(self, first: Raw, second: Raw) -> None:
        """Tensors that forward makes of numbers are the same."""
        for op in first.ops:
            for fqn in (ref.fqn for ref in op.operands if isinstance(ref, State)):
                constants = [raw.constants[fqn] for raw in (first, second) if fqn in raw.constants]
                if constants and not torch.equal(constants[0], constants[1]):
                    raise self.differs(op, "a tensor is made of other numbers")

    def values(self, first: Raw, second: Raw) -> dict[str, TensorMeta]:
        """Shapes in terms of the batch."""
        makers = {name: op for op in first.ops for name in op.outputs}
        found = {}
        for name in filter(None, (*first.inputs, *makers)):
            x, y = first.values[name], second.values[name]
            op = makers.get(name, first.ops[0])
            shape = self.argument(x.shape, y.shape, partial(self.no_multiple, op, x, y))
            found[name] = replace(x, shape=shape)  # type: ignore[arg-type]
        return found

    def op(self, x: Op, y: Op, values: Mapping[str, TensorMeta]) -> Op:
        def different(_: object) -> CaptureError:
            return self.differs(x, f"{x.target} gets other arguments")

        read = [values[str(ref)].dtype for ref in x.operands if str(ref) in values]
        floats = bool(read) and all(dtype.startswith(("float", "bfloat")) for dtype in read)
        args = self.argument(x.args, y.args, different, floats=floats)
        kwargs = self.argument(Items(x.kwargs), Items(y.kwargs), different)
        return replace(
            x,
            args=args,  # type: ignore[arg-type]
            kwargs=kwargs.items,  # type: ignore[union-attr]
            at_default=x.at_default & y.at_default,
        )

    def call(self, key: CallId, x: RawCall, y: RawCall, raw: Raw) -> RawCall:
        def opaque(_: object) -> CaptureError:
            inside = (op for op in raw.ops if op.call == key and op.where)
            op = next(inside, raw.ops[0])
            return self.differs(op, f"{key[0] or 'the model'} gets another number")

        others = dict(y.arguments)
        arguments = tuple(
            (name, self.argument(value, others.get(name), opaque)) for name, value in x.arguments
        )
        return RawCall(arguments, x.positional, self.argument(x.output, y.output, opaque))

    def argument(
        self, x: Arg, y: Arg, different: Callable[[object], CaptureError], *, floats: bool = False
    ) -> Arg:
        """`floats`: beside tensors of floats alone 6.0 is as good as 6 and may be a size."""
        if isinstance(x, tuple) and isinstance(y, tuple) and len(x) == len(y):
            pairs = zip(x, y, strict=True)
            return tuple(self.argument(i, j, different, floats=floats) for i, j in pairs)
        if isinstance(x, Items) and isinstance(y, Items):
            others = dict(y.items)
            if [key for key, _ in x.items] == list(others):
                return Items(tuple((k, self.argument(i, others[k], different)) for k, i in x.items))
            raise different(x)
        if repr(x) == repr(y):  # NaN is not equal to itself
            return x
        if floats and isinstance(x, float) and isinstance(y, float) and x.is_integer():
            x, y = int(x), int(y) if y.is_integer() else y
        if (
            isinstance(x, int)
            and isinstance(y, int)
            and x % self.a == 0
            and x // self.a * self.b == y
        ):
            return Dim(x // self.a)
        raise different(x)

    def no_multiple(self, op: Op, x: TensorMeta, y: TensorMeta, _: object) -> CaptureError:
        return self.differs(op, f"{x} becomes {y}, whose size is no multiple of the batch")

    def differs(self, op: Op, how: str) -> CaptureError:
        if self.a == self.b:
            return CaptureError(
                f"the model computes something else each time it runs: {how}",
                location(op.where),
                "nothing of the clock, the system or a counter in forward and the loss: a buffer "
                "counts, self.register_buffer(...); torch.rand(()) draws",
            )
        return CaptureError(
            f"the model does not compute the same for {self.a} and for {self.b} samples: {how}",
            location(op.where),
            "make it independent of the number of samples, but for sizes that are multiples of it",
        )
