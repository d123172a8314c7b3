"""ppc: compiles a PyTorch model and a YAML spec into standalone scripts for parallel training.

    spec = ppc.load("specs/quickstart.yaml")     # SpecError or Complaints, with line and column
    files = ppc.compile(spec)                    # one script for each rank, and the launcher
    ppc.write(files, "generated/quickstart")

`import ppc` loads neither torch nor anything else that takes long.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import PpcError
from .version import __version__

if TYPE_CHECKING:
    from .emit.write import write
    from .frontend.load import load
    from .pipeline import compile

__all__ = ["PpcError", "__version__", "compile", "load", "write"]

homes = {"compile": "pipeline", "load": "frontend.load", "write": "emit.write"}


def __getattr__(name: str) -> Any:
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{homes[name]}", __name__), name)
