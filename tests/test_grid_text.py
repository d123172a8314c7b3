"""The whole grid of the models with dropout."""

import pytest
from grid import DROPS, check_every_layout

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.parametrize("model", DROPS)
def test_every_layout(tmp_path, fork_server, capsys, model):
    def tell(words):
        with capsys.disabled():
            print(f"\n{words}", flush=True)  # noqa: T201

    check_every_layout(tmp_path, fork_server, model, tell)
