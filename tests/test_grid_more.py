"""Every layout of the models without dropout."""

import pytest
from grid import DROPS, EVERY_LAYOUT, check_every_layout

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.parametrize("model", [name for name in EVERY_LAYOUT if name not in DROPS])
def test_every_layout(tmp_path, fork_server, capsys, model):
    def tell(words):
        with capsys.disabled():
            print(f"\n{words}", flush=True)  # noqa: T201

    check_every_layout(tmp_path, fork_server, model, tell)
