"""torch.distributions without values."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributions import Distribution

from .private import arguments_checked


@contextmanager
def unchecked() -> Iterator[None]:
    """Leave out the checks of arguments, which look at values and compute nothing."""
    before = arguments_checked()
    Distribution.set_default_validate_args(value=False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(value=before)
