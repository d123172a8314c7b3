"""Few rows that have every pair of values of every two factors."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product

Row = dict[str, object]
Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs(row: Mapping[str, object]) -> set[Pair]:
    items = sorted((name, repr(value)) for name, value in row.items())
    return set(combinations(items, 2))


def cover(
    factors: Mapping[str, Sequence[object]], allowed: Callable[[Row], bool] = lambda _: True
) -> list[Row]:
    """Greedily: each row is the one that has most of the pairs still to come."""
    rows = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    left = {name: (row, pairs(row)) for name, row in enumerate(rows) if allowed(row)}
    wanted = set[Pair]().union(*(found for _, found in left.values()))
    chosen = []
    while wanted:
        best = max(left, key=lambda name: len(left[name][1] & wanted))
        row, found = left.pop(best)
        chosen.append(row)
        wanted -= found
    return chosen
