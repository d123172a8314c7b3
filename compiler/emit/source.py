"""What a source of data contributes to a script, and words that the sources share."""

from dataclasses import dataclass
from typing import Literal

from ..ir.graph import Input, TensorMeta
from ..ir.spec import Data
from ..ir.unit import Unit
from .expression import quote

Reader = Literal["safetensors", "npy", "tokens", ""]
"""A kind of file that a script has to read by itself."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What differs by source."""

    opened: tuple[str, ...]
    """Statements that open it and count its samples; () if the spec has told their number."""
    ready: tuple[str, ...]
    """What follows once there are enough of them."""
    read: tuple[str, ...]
    """Statements that read the samples into the fields' names."""
    fact: str
    """What ranks must agree on, as an expression."""
    described: str
    reads: Reader = ""
    modules: tuple[str, ...] = ()
    """Imports of the user's own."""
    constants: tuple[str, ...] = ()
    workers: int = 0
    """Processes that read ahead."""
    whole: tuple[str, ...] = ()
    """Statements that read what goes whole to every microbatch into the fields' names."""
    needs_samples: bool = False
    """Whether `read` fails where there is none."""


def of_samples(unit: Unit) -> tuple[Input, ...]:
    """The unit's fields that each sample has one of."""
    return tuple(i for i in unit.inputs if not i.whole)


def whole_inputs(unit: Unit) -> tuple[Input, ...]:
    """The unit's fields without a batch dimension."""
    return tuple(i for i in unit.inputs if i.whole)


def steps_per_epoch(data: Data) -> str:
    return "SAMPLES // GLOBAL_BATCH" if data.last_batch == "drop" else "-(-SAMPLES // GLOBAL_BATCH)"


def dtype_text(meta: TensorMeta) -> str:
    return "torch.get_default_dtype()" if meta.dtype.startswith("float") else f"torch.{meta.dtype}"


def shape_text(shape: tuple[object, ...]) -> str:
    """`(4, 5)`, `(4,)`"""
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def place(path: str) -> str:
    """A glob, with `{stdlib}` found when the script runs; others are relative to the script."""
    if path.startswith("{stdlib}"):
        rest = quote(path.removeprefix("{stdlib}"))
        return f'glob.escape(sysconfig.get_path("stdlib")) + {rest}'
    return quote(path)


def is_absolute(path: str) -> bool:
    return path.startswith(("{stdlib}", "/"))
