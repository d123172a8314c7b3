"""Matrices of what goes into, out of and through every run of parts, by [first, stop].

A part is a layer, or a stage of a plan. So the planner looks at all runs of layers at once.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.int64]
Pairs = frozenset[tuple[int, ...]]
"""(maker, reader)."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Bytes made by one part (-1: there from the start) and read by later ones."""

    maker: int
    readers: tuple[int, ...]
    size: int

    def each(self) -> "Iterator[Reach]":
        """One for each reader."""
        return (Reach(self.maker, (reader,), self.size) for reader in self.readers)


def pairs_of(reaches: Iterable[Reach]) -> Pairs:
    """Who makes something for whom."""
    return frozenset((reach.maker, reader) for reach in reaches for reader in reach.readers)


def entering(size: int, reaches: Iterable[Reach]) -> Bytes:
    """By [first, stop]: bytes made before the run and read inside it."""
    result = np.zeros((size + 1, size + 1), np.int64)
    for (maker, readers), total in collected(reaches).items():
        last = maker
        for reader in readers:  # the first reader inside runs that begin after `last`
            result[last + 1 : reader + 1, reader + 1 :] += total
            last = reader
    return result


def leaving(size: int, reaches: Iterable[Reach]) -> Bytes:
    """By [first, stop]: bytes made inside the run and read after it."""
    result = np.zeros((size + 1, size + 1), np.int64)
    for (maker, readers), total in collected(reaches).items():
        result[: maker + 1, maker + 1 : readers[-1] + 1] += total
    return result


def collected(reaches: Iterable[Reach]) -> Counter[tuple[int, tuple[int, ...]]]:
    """Bytes by (maker, readers): many tensors of a part go the same way."""
    total = Counter[tuple[int, tuple[int, ...]]]()
    for reach in reaches:
        total[reach.maker, reach.readers] += reach.size
    return total


def makers_before(size: int, pairs: Pairs) -> Bytes:
    """By [first, stop]: parts before the run that make something for one inside."""
    readers: dict[int, list[int]] = {}
    for maker, reader in sorted(pairs):
        readers.setdefault(maker, []).append(reader)
    return entering(size, [Reach(maker, tuple(found), 1) for maker, found in readers.items()])


def readers_after(size: int, pairs: Pairs) -> Bytes:
    """By [first, stop]: parts after the run for which one inside makes something."""
    mirrored = frozenset((size - 1 - reader, size - 1 - maker) for maker, reader in pairs)
    return makers_before(size, mirrored)[::-1, ::-1].T


def divided(size: int, groups: Iterable[tuple[int, ...]]) -> Bytes:
    """By [first, stop]: groups of parts, not of all, of which some are inside and some outside."""
    several = [group for group in groups if 1 < len(group) < size]
    result = entering(size, [Reach(-1, group, 1) for group in several])
    for group in several:
        result[: group[0] + 1, group[-1] + 1 :] -= 1
    return result
