"""Finds what grows with the batch: two captures at different batch sizes, compared number by number."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count

from ...errors import CaptureError
from ...ir.graph import Arg, Dim, Items, Op, TensorMeta
from .convert import Raw
from .export import RawCall
from .user import place


def batch_sizes(fields: Mapping[str, TensorMeta]) -> tuple[int, int]:
    """Two primes that are no size of the data, so that a size of the batch is recognised as such."""
    taken = {size for meta in fields.values() for size in meta.shape}
    primes = (n for n in count(3, 2) if all(n % d for d in range(3, n, 2)) and n not in taken)
    return next(primes), next(primes)


def refuse_coupled(raw: Raw) -> None:
    """Refuse a model that computes with pairs of samples: over microbatches it means something else.

    Raises CaptureError at the user's line.
    """
    for op in raw.ops:
        for name in filter(None, op.outputs):
            if sum(isinstance(size, Dim) for size in raw.values[name].shape) > 1:
                file, _, line = op.where.rpartition(":")
                raise CaptureError(
                    f"{raw.values[name]} pairs the samples of a microbatch with each other, so several "
                    "microbatches do not add up to their global batch",
                    place(file, int(line)) if line else None,
                    "parallel: {microbatches: 1}",
                )


class Generaliser:
    """Merges captures at batch sizes `a` and `b` into one in terms of the batch."""

    def __init__(self, a: int, b: int) -> None:
        self.a, self.b = a, b

    def merge(self, first: Raw, second: Raw) -> Raw:
        """Raises CaptureError at the user's line where the captures differ otherwise."""
        for x, y in zip(first.ops, second.ops, strict=False):
            if (x.target, x.outputs, x.call) != (y.target, y.outputs, y.call):
                raise self.differs(x, f"{x.target} becomes {y.target}")
        if len(first.ops) != len(second.ops):
            longer = max(first.ops, second.ops, key=len)
            raise self.differs(longer[-1], f"{len(first.ops)} operations become {len(second.ops)}")
        values = {
            name: replace(
                meta,
                shape=tuple(
                    self.size(x, y, name)
                    for x, y in zip(meta.shape, second.values[name].shape, strict=True)
                ),
            )
            for name, meta in first.values.items()
            if name in second.values
        }
        return replace(
            first,
            ops=[self.op(x, y) for x, y in zip(first.ops, second.ops, strict=True)],
            values=values,
            calls={key: self.call(call, second.calls[key]) for key, call in first.calls.items()},
        )

    def op(self, x: Op, y: Op) -> Op:
        def different(_: object) -> CaptureError:
            return self.differs(x, f"{x.target} gets other arguments")

        return replace(
            x,
            args=tuple(self.argument(i, j, different) for i, j in zip(x.args, y.args, strict=True)),
            kwargs=tuple((k, self.argument(i, dict(y.kwargs)[k], different)) for k, i in x.kwargs),
        )

    def call(self, x: RawCall, y: RawCall) -> RawCall:
        def opaque(_: object) -> CaptureError:
            return CaptureError("an argument of a module depends on the batch size")

        others = dict(y.arguments)
        return RawCall(
            tuple((name, self.argument(value, others.get(name), opaque)) for name, value in x.arguments),
            x.positional, self.argument(x.output, y.output, opaque),
        )  # fmt: skip

    def argument(self, x: Arg, y: Arg, different: Callable[[object], CaptureError]) -> Arg:
        if isinstance(x, tuple) and isinstance(y, tuple) and len(x) == len(y):
            return tuple(self.argument(i, j, different) for i, j in zip(x, y, strict=True))
        if isinstance(x, Items) and isinstance(y, Items) and len(x.items) == len(y.items):
            return Items(
                tuple(
                    (k, self.argument(i, j, different))
                    for (k, i), (_, j) in zip(x.items, y.items, strict=True)
                )
            )
        if x == y and type(x) is type(y):
            return x
        if (
            isinstance(x, int)
            and isinstance(y, int)
            and x % self.a == 0
            and x // self.a * self.b == y
        ):
            return Dim(x // self.a)
        raise different(x)

    def size(self, x: int | Dim, y: int | Dim, name: str) -> int | Dim:
        def different(_: object) -> CaptureError:
            return CaptureError(
                f"a size of {name} is {x} for {self.a} samples and {y} for {self.b}: no multiple"
            )

        return self.argument(x, y, different)  # type: ignore[return-value]

    def differs(self, op: Op, how: str) -> CaptureError:
        file, _, line = op.where.rpartition(":")
        return CaptureError(
            f"the model does not compute the same for {self.a} and for {self.b} samples: {how}",
            place(file, int(line)) if line else None,
            "make it independent of the number of samples, but for sizes that are multiples of it",
        )
