"""Other things in the place of a module's own, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(module: Any, **patches: object) -> Iterator[None]:
    """Put these in the place of what a module, or a class, has under their names."""
    originals = {name: getattr(module, name) for name in patches if name in vars(module)}
    for name, patch in patches.items():
        setattr(module, name, patch)
    try:
        yield
    finally:
        for name in patches:
            if name in originals:
                setattr(module, name, originals[name])
            else:  # it is inherited
                delattr(module, name)
