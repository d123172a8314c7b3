"""What an optimizer keeps between steps. Numbers of a single element (a step count) are left out;
a test takes a step with every class and counts."""

from collections.abc import Mapping
from math import prod

from ..ir.spec import Optimizer, Option
from ..ir.values import TensorMeta


def optimizer_copies(optimizer: Optimizer) -> int:
    """Tensors as large as a trainable parameter; of the group that has most, where they differ."""
    own = (optimizer.options, *({**optimizer.options, **g.options} for g in optimizer.groups))
    return max(copies(optimizer.name, options) for options in own)


def copies(name: str, options: Mapping[str, Option]) -> int:
    more = {
        "Adam": ("amsgrad",),
        "AdamW": ("amsgrad",),
        "RMSprop": ("momentum", "centered"),
        "SGD": ("momentum",),
    }
    least = {"Adagrad": 1, "ASGD": 1, "Muon": 1, "RMSprop": 1, "SGD": 0, "Adafactor": 0}
    return least.get(name, 2) + sum(bool(options.get(key)) for key in more.get(name, ()))


def factored_bytes(meta: TensorMeta) -> int:
    """Of Adafactor's running means: of rows and columns, of vectors of each element."""
    rows = [size for size in meta.shape if isinstance(size, int)]  # a parameter has no batch
    if len(rows) < 2:
        return meta.bytes.at(1)
    count, element = prod(rows), meta.bytes.at(1) // max(1, prod(rows))
    return element * (count // max(1, rows[-1]) + count // max(1, rows[-2]))
