"""What ops compute with: sizes, shapes, values, literals. A value prints as `f32[batch, 128]`."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

dtypes: Mapping[str, tuple[str, int]] = MappingProxyType(
    {  # torch's name: the printed one, bytes of an element
        "float64": ("f64", 8),
        "float32": ("f32", 4),
        "float16": ("f16", 2),
        "bfloat16": ("bf16", 2),
        "complex64": ("c64", 8),
        "complex128": ("c128", 16),
        "int64": ("i64", 8),
        "int32": ("i32", 4),
        "int16": ("i16", 2),
        "int8": ("i8", 1),
        "uint8": ("u8", 1),
        "uint16": ("u16", 2),
        "uint32": ("u32", 4),
        "uint64": ("u64", 8),
        "bool": ("bool", 1),
    }
)


@dataclass(frozen=True, slots=True, order=True)
class Dim:
    """A size of `coefficient` x the number of samples in the microbatch."""

    coefficient: int = 1

    def __str__(self) -> str:
        return "batch" if self.coefficient == 1 else f"{self.coefficient}*batch"


@dataclass(frozen=True, slots=True)
class Amount:
    """A count (bytes, FLOPs) that grows with the batch: `fixed + per_sample x batch`."""

    fixed: int = 0
    per_sample: int = 0

    def at(self, batch: int) -> int:
        return self.fixed + self.per_sample * batch

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.fixed + other.fixed, self.per_sample + other.per_sample)


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape, dtype (torch's name) and whether a gradient flows back through the tensor."""

    shape: tuple[int | Dim, ...]
    dtype: str
    requires_grad: bool = False
    order: tuple[int, ...] = ()
    """Dimensions from the outermost in memory to the innermost; () for the usual order. It goes
    with a value to another stage: random numbers are drawn in the order of memory."""

    @property
    def bytes(self) -> Amount:
        """Bytes of the elements; a shape has at most one factor of the batch."""
        count, batched = dtypes[self.dtype][1], False
        for size in self.shape:
            batched |= isinstance(size, Dim)
            count *= size.coefficient if isinstance(size, Dim) else size
        return Amount(0, count) if batched else Amount(count, 0)

    def __str__(self) -> str:
        return f"{dtypes[self.dtype][0]}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Ref:
    """A value: an input of the graph or an output of an op."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class State:
    """A parameter or buffer, by its full name in the user's model."""

    fqn: str

    def __str__(self) -> str:
        return self.fqn


@dataclass(frozen=True, slots=True)
class TorchConstant:
    """A literal that torch names: a dtype, layout or memory format (`torch.float32`)."""

    name: str

    def __str__(self) -> str:
        return f"torch.{self.name}"


@dataclass(frozen=True, slots=True)
class Device:
    """The device that the script runs on; the captured graph always says cpu."""

    def __str__(self) -> str:
        return "device"


@dataclass(frozen=True, slots=True)
class Items:
    """A dict with string keys, as an argument or output of a module."""

    items: tuple[tuple[str, "Arg"], ...]


literal_types = (bool, int, float, complex, str, type(None))
Arg = (
    Ref | State | Dim | TorchConstant | Device | Items
    | None | bool | int | float | complex | str | tuple["Arg", ...]
)  # fmt: skip
CallId = tuple[str, int]  # path of the module, number of the call (0 for the first)


def show(argument: Arg) -> str:
    """An argument, printed."""
    if isinstance(argument, tuple):
        return f"[{', '.join(map(show, argument))}]"
    if isinstance(argument, Items):
        return "{" + ", ".join(f"{key}: {show(value)}" for key, value in argument.items) + "}"
    return repr(argument) if isinstance(argument, literal_types) else str(argument)


def references(argument: Arg) -> list[Ref | State]:
    """Every value and parameter in an argument, in order."""
    found, waiting = [], [argument]
    while waiting:  # a generator that calls itself takes half as long again
        item = waiting.pop()
        if isinstance(item, (Ref, State)):  # a union takes twice as long
            found.append(item)
        elif isinstance(item, tuple):
            waiting += item[::-1]
        elif isinstance(item, Items):
            waiting += [value for _, value in item.items[::-1]]
    return found


def has_batch(argument: object) -> bool:
    """Whether a size that grows with the batch is among nested arguments."""
    if isinstance(argument, tuple):
        return any(map(has_batch, argument))
    return isinstance(argument, Dim)
