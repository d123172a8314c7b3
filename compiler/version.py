"""The version of what is installed."""

from importlib.metadata import version

__version__ = version("ppc-compiler")
