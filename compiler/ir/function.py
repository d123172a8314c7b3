"""A torch.autograd.Function of the user's: one op of the graph, its class in the script.

Its op's target is `class.Spike.1f0c3a52`: the class's name and a digest of what a script holds of
it. No operation of torch's can be called so, since `class` is a word of Python's.
"""

from dataclasses import dataclass

prefix = "class"


@dataclass(frozen=True, slots=True)
class UsersFunction:
    """What a script holds of a class: its own text, or an import of the module that defines it."""

    name: str
    where: str
    """`spikes.py:12`"""
    parts: tuple[tuple[str, str], ...] = ()
    """(name, text) of what its text reads, in an order that runs, then of itself."""
    imports: tuple[tuple[str, str], ...] = ()
    """(name, line) of what the parts read of torch and the standard library."""
    module: str = ""
    """The module beside the model's to import it from, in place of parts and imports."""
    in_tuple: bool = False
    """Whether apply gives a tuple, even of one value."""


def users_class(target: str) -> str:
    """`Spike` for `class.Spike.1f0c3a52`; "" for an operation."""
    namespace, _, name = target.partition(".")
    return name.partition(".")[0] if namespace == prefix else ""
