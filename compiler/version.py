"""The version of what is installed, and the versions of torch that it is tested with."""

import re
from importlib.metadata import PackageNotFoundError, version

__version__ = version("ppc-compiler")

oldest, newest = (2, 13), (2, 15)
"""Of torch: the last three, which `make versions` tries (docs/versions.md)."""
tested_torch = " to ".join(f"{major}.{minor}" for major, minor in (oldest, newest))


def untested_torch() -> str | None:
    """What to say of an installed torch that is older or newer than those."""
    try:
        found = version("torch")
    except PackageNotFoundError:
        return None
    numbers = re.match(r"(\d+)\.(\d+)", found)
    minor = (int(numbers[1]), int(numbers[2])) if numbers else newest
    if oldest <= minor <= newest:
        return None
    age = "older" if minor < oldest else "newer"
    return (
        f"torch {found} is {age} than those that ppc is tested with, {tested_torch}; "
        "ppc verify proves its scripts here"
    )
