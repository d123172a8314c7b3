from collections.abc import Iterator

import pytest

from ppc.run.launch import ForkServer


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Runs ranks in a tenth of a second a case: pass it to `run_forked`."""
    with ForkServer() as server:
        yield server
