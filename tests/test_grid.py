"""Every workload on many layouts.

The rows have every pair of a model with a property of a layout, and of any two properties; every
layout of three models is in test_grid_text.py and test_grid_more.py, two files for two processes.
"""

from itertools import product

import pytest
from grid import FACTORS, allowed, check, named
from pairwise import cover, pairs

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("row", cover(FACTORS, allowed), ids=named)
def test_a_row(tmp_path, fork_server, row):
    check(tmp_path, fork_server, row)


def test_the_rows_have_every_pair():
    every = [dict(zip(FACTORS, v, strict=True)) for v in product(*FACTORS.values())]
    expected = set().union(*(pairs(row) for row in every if allowed(row)))
    rows = cover(FACTORS, allowed)
    assert set().union(*map(pairs, rows)) == expected
    assert len(rows) < 40
