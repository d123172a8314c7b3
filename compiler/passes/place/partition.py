"""The best cut of a chain of layers into contiguous stages, by dynamic programming.

With c(s, i, j) the cost of layers i .. j-1 as stage s, the smallest largest cost is A(P, L) of

    A(s + 1, j) = min over i < j of max(A(s, i), c(s, i, j))

The cuts that reach it are many; a second sweep takes among them the smallest sum of squares, then
the least that crosses the cuts.
P sweeps over the L x L matrix of costs: 500 layers on 128 stages take under a second.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def partition(
    cost: Callable[[int], Matrix], stages: int, crossing: Sequence[float]
) -> tuple[int, ...] | None:
    """First layers of the stages, the first of them 0; None if no cut has a finite cost.

    `cost(s)[i, j]` is what layers i .. j-1 cost as stage s, inf where that is not allowed; entries
    with j <= i are not looked at. `crossing[i]` is what crosses a cut before layer i. The largest
    cost is as small as it can be, then the sum of the squares (so the rest is even), then the sum
    of what crosses, then the cuts lie as early as they can.
    """
    size = len(crossing)
    largest = smallest_largest(cost, stages, size)
    if np.isinf(largest):
        return None
    squares, crossed, through_cut = at_start(size), at_start(size), np.array([0, *crossing[1:], 0])
    choices = []
    for stage in range(stages):
        costs = nonempty(cost(stage), size)
        costs = np.where(costs <= largest, costs, np.inf)
        total = squares[:, None] + costs**2
        squares = total.min(axis=0)
        through = np.where(total == squares, (crossed + through_cut)[:, None], np.inf)
        choices.append(through.argmin(axis=0))
        crossed = through.min(axis=0)
    starts, stop = [], size
    for choice in reversed(choices):
        stop = int(choice[stop])
        starts.append(stop)
    return tuple(reversed(starts))


def smallest_largest(cost: Callable[[int], Matrix], stages: int, size: int) -> float:
    """The smallest largest cost of a stage."""
    best = at_start(size)
    for stage in range(stages):
        best = np.maximum(best[:, None], nonempty(cost(stage), size)).min(axis=0)
    return float(best[size])


def at_start(size: int) -> NDArray[np.float64]:
    """Before the first stage no layer is placed, at no cost."""
    return np.where(np.arange(size + 1) == 0, 0.0, np.inf)


def nonempty(costs: Matrix, size: int) -> Matrix:
    """The costs with empty stages forbidden."""
    return np.where(np.tri(size + 1, dtype=np.bool_), np.inf, costs)
