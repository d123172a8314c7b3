"""Whether the files are there that a spec names."""

import os
from pathlib import Path


def is_file(path: Path) -> bool:
    """Path.is_file, which raises under Python 3.11 where a name is too long for the disk."""
    return os.path.isfile(path)  # noqa: PTH113
