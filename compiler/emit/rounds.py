"""The places of an item: what repeated rounds of a loop have in common, and what differs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from ..ir.graph import Arg, Items, Op, Ref
from .tree import Item

indexing = ("aten.select.int", "aten.slice.Tensor", "aten.narrow.default")


def skeleton(item: Item) -> object:
    """What bodies must have in common, place by place."""
    shown = tuple(
        "value" if isinstance(leaf, Ref) else "index" if is_index(item, leaf) else repr(leaf)
        for leaf in leaves(item)
    )
    what: object = item.call.path if item.call else item.op.target
    where = [op.where for op in item.ops] if item.call is None else []
    return what, tuple(where), shown, tuple(map(bool, item.makes)), item.grad


def is_index(item: Item, leaf: Arg) -> bool:
    return type(leaf) is int and item.call is None and item.op.target in indexing


def progression(item: Item, column: Sequence[Arg]) -> str:
    """The text of an index that grows by one from round to round, in terms of `i`; "" else."""
    numbers = [leaf for leaf in column if is_index(item, leaf) and isinstance(leaf, int)]
    if len(numbers) != len(column) or {b - a for a, b in pairwise(numbers)} != {1}:
        return ""
    return f"i + {numbers[0]}" if numbers[0] > 0 else "i" if numbers[0] == 0 else ""


def leaves(item: Item) -> list[Arg]:
    """The arguments of an item, nested ones too, in order."""
    if item.call is None:
        return list(flatten((item.op.args, tuple(value for _, value in item.op.kwargs))))
    given = tuple(value for _, value in item.call.arguments)
    return [*flatten(given), *map(Ref, item.reads)]


def flatten(value: Arg) -> Iterator[Arg]:
    if isinstance(value, tuple):
        for part in value:
            yield from flatten(part)
    elif isinstance(value, Items):
        for _, part in value.items:
            yield from flatten(part)
    else:
        yield value


def with_leaves(item: Item, changed: Mapping[int, Arg]) -> Item:
    """An op with other numbers at some places."""
    if not changed:
        return item
    places = iter(range(len(leaves(item))))

    def put(value: Arg) -> Arg:
        if isinstance(value, tuple):
            return tuple(map(put, value))
        return changed.get(next(places), value)

    op: Op = item.op
    args = tuple(map(put, op.args))
    return replace(item, ops=(replace(op, args=args),))
