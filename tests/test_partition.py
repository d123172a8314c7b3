"""The dynamic program against every cut there is."""

import time
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ppc.passes.place.partition import Matrix, partition, smallest_largest

layer_times = st.lists(st.integers(0, 9), min_size=1, max_size=9)


def run_costs(times: list[int]) -> Matrix:
    prefix = np.cumsum([0, *times]).astype(np.float64)
    return prefix[None, :] - prefix[:, None]


def every_cut(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, layers), stages - 1):
        yield (0, *cuts)


def rank_of(
    starts: tuple[int, ...], cost: Callable[[int], Matrix], crossing: list[int]
) -> tuple[float, ...]:
    """What partition makes as small as it can, in order."""
    costs = [cost(s)[run] for s, run in enumerate(pairwise((*starts, len(crossing))))]
    squares, crossed = sum(c * c for c in costs), sum(crossing[i] for i in starts[1:])
    return (max(costs), squares, crossed, *reversed(starts))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    times = draw(layer_times)
    crossing = draw(st.lists(st.integers(0, 3), min_size=len(times), max_size=len(times)))
    return times, crossing, draw(st.integers(1, len(times)))


@given(problems())
@example(([1, 5, 2, 3], [0, 0, 0, 0], 3))  # 6 + 2 + 3 has the smaller squares, 1 + 5 + 5 is right
@settings(max_examples=300, deadline=None)
def test_partition_is_the_best_of_all_cuts(problem: tuple[list[int], list[int], int]) -> None:
    times, crossing, stages = problem
    costs = run_costs(times)
    best = min(
        every_cut(len(times), stages), key=lambda starts: rank_of(starts, lambda _: costs, crossing)
    )
    assert partition(lambda _: costs, stages, crossing) == best


@given(problems(), st.data())
@settings(max_examples=300, deadline=None)
def test_partition_with_a_bound_is_the_best_that_fits(
    problem: tuple[list[int], list[int], int], data: st.DataObject
) -> None:
    """As with memory: each stage forbids runs of its own, longer ones more than shorter."""
    times, crossing, stages = problem
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=len(times), max_size=len(times)))
    bound = data.draw(st.integers(0, 25))
    costs, demand = run_costs(times), run_costs(sizes)

    def cost(stage: int) -> Matrix:
        return np.where(demand * (stages - stage) <= bound, costs, np.inf)

    cuts = [c for c in every_cut(len(times), stages) if rank_of(c, cost, crossing)[0] < np.inf]
    best = min(cuts, key=lambda starts: rank_of(starts, cost, crossing), default=None)
    assert partition(cost, stages, crossing) == best


@given(problems())
def test_partition_is_never_worse_than_the_even_split(
    problem: tuple[list[int], list[int], int],
) -> None:
    times, _, stages = problem
    costs = run_costs(times)
    even = tuple(len(times) * stage // stages for stage in range(stages))
    largest = max(costs[run] for run in pairwise((*even, len(times))))
    assert smallest_largest(lambda _: costs, stages, len(times)) <= largest


@pytest.mark.parametrize("stages", [2, 3])
def test_no_cut_for_more_stages_than_layers(stages: int) -> None:
    assert partition(lambda _: run_costs([1]), stages, [0]) is None


def test_500_layers_on_128_stages_take_seconds_at_most() -> None:
    generator = np.random.default_rng(0)
    times = [int(t) for t in generator.integers(1, 1000, 500)]
    costs = run_costs(times)
    began = time.perf_counter()
    starts = partition(lambda _: costs, 128, [1] * 500)
    assert time.perf_counter() - began < 10  # 1 s on a quiet core
    assert starts is not None
    assert list(starts) == sorted(set(starts))
