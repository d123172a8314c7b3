"""Operations that Python writes in a way of their own: indices, literals, attributes, and functions
that take other arguments than the schema."""

from collections.abc import Callable, Iterator, Mapping

from ..ir.graph import Arg, Op, TensorMeta, TorchConstant
from .arguments import Names, argument, arguments, spell_arg, spell_list
from .expression import Expr, Level, binary, call, method, quote, subscript, unary
from .functional import functional, signature, single

end = 2**63 - 1
inferred = {"int64": int, "bool": bool}
"""Dtypes that torch.tensor gives to Python's numbers, whatever the default dtype."""


def slice_(op: Op, names: Names, values: Mapping[str, TensorMeta]) -> Expr:
    """`x[:, 1:3]`, `x[..., :8]`."""
    dim, start, stop, step = ((*op.args[1:], None, None, None, None))[:4]
    first = "" if start in (None, 0) else spell_arg(start, names, "start").text
    last = "" if stop in (None, end) else spell_arg(stop, names, "end").text
    stride = "" if step in (None, 1) else f":{spell_arg(step, names).text}"
    between = f"{first} : {last}".strip() if " " in first + last else f"{first}:{last}"
    return subscript(argument(op, 0, names), at_dim(op, dim or 0, between + stride, values))


def select(op: Op, names: Names, values: Mapping[str, TensorMeta]) -> Expr:
    """`x[:, 0]`."""
    index = spell_arg(op.args[2], names, "index").text
    return subscript(argument(op, 0, names), at_dim(op, op.args[1], index, values))


def at_dim(op: Op, dim: Arg, index: str, values: Mapping[str, TensorMeta]) -> str:
    """An index for one dimension, whole for the others."""
    if not isinstance(dim, int):
        raise TypeError(f"{op.name}: dimension {dim!r}")
    meta = values.get(str(op.args[0]))  # recipes have no metas
    if meta is None and dim < 0:
        return ", ".join(["...", index, *[":"] * (-dim - 1)])
    rank = len(meta.shape) if meta else 0
    dim = dim + rank if dim < 0 else dim
    if dim == rank - 1 and dim > 1:
        return f"..., {index}"
    return ", ".join([":"] * dim + [index])


def index(op: Op, names: Names, _values: Mapping[str, TensorMeta]) -> Expr:
    """`x[rows, columns]`."""
    indices = op.args[1] if isinstance(op.args[1], tuple) else (op.args[1],)
    return subscript(
        argument(op, 0, names),
        ", ".join(":" if i is None else spell_arg(i, names).text for i in indices),
    )


def tensor(op: Op, names: Names, _values: Mapping[str, TensorMeta]) -> Expr:
    """A literal tensor, its dtype where the numbers do not tell it."""
    numbers = list(leaves(op.args[0]))
    told = [
        TorchConstant(dtype) for dtype, cls in inferred.items()
        if numbers and all(type(number) is cls for number in numbers)
    ]  # fmt: skip
    kwargs = [f"{k}={spell_arg(v, names).text}" for k, v in op.kwargs if v not in told]
    return call("torch.tensor", [spell_list(op.args[0], names), *kwargs, "device=device"])


def leaves(value: Arg) -> Iterator[Arg]:
    """The numbers in nested lists."""
    for item in value if isinstance(value, tuple) else ():
        yield from leaves(item)
    if not isinstance(value, tuple):
        yield value


def negate(op: Op, names: Names, _values: Mapping[str, TensorMeta]) -> Expr:
    return unary("-" if op.target.startswith("aten.neg") else "~", argument(op, 0, names))


def reverse_subtract(op: Op, names: Names, _values: Mapping[str, TensorMeta]) -> Expr | None:
    if len(op.args) != 2:
        return None
    return binary(argument(op, 1, names), "-", argument(op, 0, names), Level.SUM)


def to_dtype(op: Op, names: Names, _values: Mapping[str, TensorMeta]) -> Expr | None:
    return (
        method(argument(op, 0, names), "to", [spell_arg(op.args[1], names).text])
        if len(op.args) == 2
        else None
    )


def to_copy(op: Op, names: Names, _values: Mapping[str, TensorMeta]) -> Expr | None:
    """What `.to` and `.type` are below autograd."""
    kwargs = dict(op.kwargs)
    dtype = kwargs.pop("dtype", None)
    if dtype is None or kwargs.keys() - {"device", "layout", "non_blocking", "pin_memory"}:
        return None
    return method(argument(op, 0, names), "to", [spell_arg(dtype, names).text])


def einsum(op: Op, names: Names, _values: Mapping[str, TensorMeta]) -> Expr:
    operands = op.args[1] if isinstance(op.args[1], tuple) else ()
    return call(
        "torch.einsum", [argument(op, 0, names).text, *(spell_arg(o, names).text for o in operands)]
    )


def tensordot(op: Op, names: Names, _values: Mapping[str, TensorMeta]) -> Expr:
    """Its two lists of dimensions are one argument."""
    first, second, *dims = op.args
    operands = [spell_arg(operand, names).text for operand in (first, second)]
    lists = ", ".join(spell_list(dim, names) for dim in dims)
    return call("torch.tensordot", [*operands, f"dims=({lists})"])


def attribute(op: Op, names: Names, _values: Mapping[str, TensorMeta]) -> Expr:
    """`x.mT`, `x.real`."""
    name = op.target.split(".")[1]
    shown = {"numpy_T": "T", "matrix_H": "H"}.get(name, name)
    return Expr(f"{argument(op, 0, names).at_least(Level.ATOM)}.{shown}")


def feature_dropout(op: Op, names: Names, values: Mapping[str, TensorMeta]) -> Expr:
    """F has a function for each number of dimensions; torch's own takes any."""
    dims = len(values[str(op.args[0])].shape) - 2
    if dims not in (1, 2, 3):
        return call("torch.feature_dropout", arguments(op, "feature_dropout", names))
    return functional(op, signature(f"dropout{dims}d", "input p", "train=training"), names)


def stft(op: Op, names: Names, _values: Mapping[str, TensorMeta]) -> Expr:
    """Torch has padded already, where Python's default would pad."""
    given = arguments(op, "stft", names, start=1)
    return method(argument(op, 0, names), "stft", [*given, "center=False"])


def interpolate(op: Op, names: Names, _values: Mapping[str, TensorMeta]) -> Expr | None:
    """`F.interpolate(x, scale_factor=2.0, mode="nearest")`."""
    given = dict(zip(op.arg_names, op.args, strict=True)) | dict(op.kwargs)
    if not op.target.endswith(".vec"):
        return None
    name = op.target.split(".")[1].lstrip("_").removeprefix("upsample_")
    mode = name.removesuffix("_aa")[:-2].replace("nearest_exact", "nearest-exact")
    size, scale = given.get("output_size"), given.get("scale_factors")
    texts = [argument(op, 0, names).text]
    if size is not None:
        texts.append(f"size={spell_arg(single('output_size', size), names).text}")
    if isinstance(scale, tuple):
        shown: Arg = scale[0] if len(set(scale)) == 1 else scale
        texts.append(f"scale_factor={spell_arg(shown, names).text}")
    texts.append(f"mode={quote(mode)}")
    texts += [f"align_corners={given['align_corners']}"] if "align_corners" in given else []
    texts += ["antialias=True"] if name.endswith("_aa") else []
    return call("F.interpolate", texts)


upsamples = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
    "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
)  # fmt: skip
specials: Mapping[str, Callable[[Op, Names, Mapping[str, TensorMeta]], Expr | None]] = {
    "slice": slice_,
    "select": select,
    "index": index,
    "tensor": tensor,
    "neg": negate,
    "bitwise_not": negate,
    "rsub": reverse_subtract,
    "to": to_dtype,
    "_to_copy": to_copy,
    "einsum": einsum,
    "tensordot": tensordot,
    "feature_dropout": feature_dropout,
    "stft": stft,
    **dict.fromkeys(("mT", "mH", "numpy_T", "matrix_H", "real", "imag"), attribute),
    **dict.fromkeys(upsamples, interpolate),
}
