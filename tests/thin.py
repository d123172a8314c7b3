"""Grids that `make test` runs a half of, and `make test-all` all."""

from itertools import product

import pytest


def half_slow(*axes):
    """Every combination; those slow whose places in the axes add up to an odd number, so that each
    value of an axis still meets each of another."""
    numbered = product(*(enumerate(axis) for axis in axes))
    return [
        pytest.param(*(value for _, value in case), marks=[pytest.mark.slow] * odd)
        for case in numbered
        for odd in [sum(place for place, _ in case) % 2]
    ]
