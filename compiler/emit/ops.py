"""One op -> one Python expression, as a person would write it.

Spelling is tried in this order: operators and indexing, torch.nn.functional, methods, torch.*; what
has none of them is called through torch.ops. Nothing here is trusted: the emitted text is captured
again and compared with the graph (`check/`).
"""

from collections.abc import Callable, Mapping

from ..ir.graph import Arg, Device, Dim, Op, Ref, State, TensorMeta, TorchConstant
from .expression import Expr, Level, binary, call, method, number, quote, sequence, subscript, unary
from .functional import Signature, bag_modes, reductions, signatures

Names = Callable[[Ref | State], Expr]
"""What a value or parameter is called where the op stands."""

operators: Mapping[str, tuple[str, Level]] = {
    "add": ("+", Level.SUM), "sub": ("-", Level.SUM), "mul": ("*", Level.PRODUCT), "div": ("/", Level.PRODUCT),
    "floor_divide": ("//", Level.PRODUCT), "remainder": ("%", Level.PRODUCT), "matmul": ("@", Level.PRODUCT),
    "__and__": ("&", Level.AND), "__or__": ("|", Level.OR), "__xor__": ("^", Level.XOR),
    "eq": ("==", Level.COMPARE), "ne": ("!=", Level.COMPARE), "lt": ("<", Level.COMPARE),
    "le": ("<=", Level.COMPARE), "gt": (">", Level.COMPARE), "ge": (">=", Level.COMPARE),
}  # fmt: skip
unpacked = frozenset(
    ("view", "reshape", "permute", "expand", "repeat", "tile", "new_zeros", "new_ones", "new_empty")
)
"""Methods that take a list of numbers as so many arguments."""
by_keyword = frozenset(
    ("sum", "mean", "softmax", "log_softmax", "cat", "stack", "split", "chunk", "unbind", "max", "min", "argmax",
     "argmin", "std", "var", "cumsum", "amax", "amin", "any", "all", "prod", "logsumexp", "sort", "topk", "norm")
)  # fmt: skip
"""Operations whose `dim` people name."""
renamed: Mapping[str, str] = {
    "split_with_sizes": "split",
    "numpy_T": "T",
    "special_expit": "sigmoid",
}
submodules = ("linalg", "fft", "special")
functions = frozenset(
    ("addmm", "addbmm", "baddbmm", "addmv", "where", "maximum", "minimum", "outer", "bmm", "mm")
)
"""Operations whose first operand is no more their subject than the others."""
end = 2**63 - 1


def spell(op: Op, names: Names, values: Mapping[str, TensorMeta]) -> Expr:
    """The expression for an op. Several outputs come as a tuple."""
    _, name, overload = op.target.split(".")
    special = specials.get(name)
    if special is not None:
        found = special(op, names, values)
        if found is not None:
            return found
    if name in operators and len(op.args) == 2 and not op.kwargs:
        operator, level = operators[name]
        return binary(argument(op, 0, names), operator, argument(op, 1, names), level)
    if name in signatures and (overload == "default" or name not in ("conv2d", "conv1d", "conv3d")):
        return functional(op, signatures[name], names)
    name = renamed.get(name, name)
    if (op.spelling == "method" and name not in functions) or name == "split":
        return method(argument(op, 0, names), name, arguments(op, name, names, start=1))
    for module in submodules:
        if name.startswith(f"{module}_"):
            return call(
                f"torch.{module}.{name.removeprefix(f'{module}_')}", arguments(op, name, names)
            )
    if op.spelling == "torch" or name in functions:
        return call(f"torch.{name}", arguments(op, name, names))
    return call(f"torch.ops.{op.target}", arguments(op, name, names))


def spell_arg(value: Arg, names: Names, hint: str = "") -> Expr:
    """An argument as Python."""
    if isinstance(value, Ref | State):
        return names(value)
    if isinstance(value, Dim):
        if value.coefficient == 1:
            return Expr("batch")
        return binary(number(value.coefficient, hint), "*", Expr("batch"), Level.PRODUCT)
    if isinstance(value, TorchConstant | Device):
        return Expr(str(value))
    if isinstance(value, tuple):
        return sequence([spell_arg(item, names, hint) for item in value])
    if isinstance(value, str):
        return Expr(quote(value))
    if value is None or isinstance(value, bool):
        return Expr(repr(value))
    if isinstance(value, int | float | complex):
        return number(value, hint)
    raise TypeError(f"{value!r} has no place in an expression")


def argument(op: Op, index: int, names: Names) -> Expr:
    return spell_arg(op.args[index], names, op.arg_names[index])


def arguments(op: Op, name: str, names: Names, start: int = 0) -> list[str]:
    """Arguments from `start` on: by position while that is clear, by keyword for flags and
    after the first that is left at its default."""
    result, keyword = [], False
    for key, value in list(zip(op.arg_names, op.args, strict=True))[start:]:
        if key in op.at_default:
            keyword = True
            continue
        keyword |= isinstance(value, bool) or (key == "dim" and name in by_keyword)
        single = isinstance(value, tuple) and len(value) == 1 and key == "dim"
        shown = value[0] if isinstance(value, tuple) and single else value
        if isinstance(value, tuple) and name in unpacked and not keyword:
            result += [spell_arg(item, names, key).text for item in value] or ["()"]
        else:
            text = spell_arg(shown, names, key).text
            result.append(f"{key}={text}" if keyword else text)
    return result + [f"{key}={spell_arg(value, names, key).text}" for key, value in op.kwargs]


def functional(op: Op, form: Signature, names: Names) -> Expr:
    """A torch.nn.functional call."""
    given = dict(zip(op.arg_names, op.args, strict=True)) | dict(op.kwargs)
    needed = [
        key
        for key in form.positional
        if key in given and (key not in op.at_default or given[key] is not None)
    ]
    texts, skipped = [], False
    for key in form.positional:
        if key not in needed or (key in op.at_default and given[key] is None):
            skipped = True
            continue
        text = spell_arg(single(key, given[key]), names, key).text
        texts.append(f"{key}={text}" if skipped else text)
    for key, shown in form.keywords.items():
        if key in given and (key not in op.at_default or key == "train"):
            texts.append(f"{shown}={functional_value(key, given[key], names)}")
    return call(f"F.{form.name}", texts)


def single(key: str, value: Arg) -> Arg:
    """3 for (3, 3), where F takes one number for all dimensions."""
    if key not in ("kernel_size", "stride", "padding", "output_padding", "dilation", "output_size"):
        return value
    numbers = (
        isinstance(value, tuple) and bool(value) and all(isinstance(item, int) for item in value)
    )
    return value[0] if numbers and len(set(value)) == 1 else value  # type: ignore[index, arg-type]


def functional_value(key: str, value: Arg, names: Names) -> str:
    """A keyword's value: flags of training follow the module, reductions have names."""
    if key in ("train", "training", "use_input_stats") and value is True:
        return "self.training"
    if key == "dropout_p":
        return f"{spell_arg(value, names, key).text} if self.training else 0.0"
    if key == "reduction" and isinstance(value, int):
        return f'"{reductions[value]}"'
    if key == "mode" and isinstance(value, int):
        return f'"{bag_modes[value]}"'
    return spell_arg(single(key, value), names, key).text


def slice_(op: Op, names: Names, values: Mapping[str, TensorMeta]) -> Expr:
    """`x[:, 1:3]`, `x[..., :8]`."""
    dim, start, stop, step = ((*op.args[1:], None, None, None, None))[:4]
    first = "" if start in (None, 0) else spell_arg(start, names, "start").text
    last = "" if stop in (None, end) else spell_arg(stop, names, "end").text
    stride = "" if step in (None, 1) else f":{spell_arg(step, names).text}"
    return subscript(
        argument(op, 0, names), at_dim(op, dim or 0, f"{first}:{last}{stride}", values)
    )


def select(op: Op, names: Names, values: Mapping[str, TensorMeta]) -> Expr:
    """`x[:, 0]`."""
    index = spell_arg(op.args[2], names, "index").text
    return subscript(argument(op, 0, names), at_dim(op, op.args[1], index, values))


def at_dim(op: Op, dim: Arg, index: str, values: Mapping[str, TensorMeta]) -> str:
    """An index for one dimension, whole for the others."""
    if not isinstance(dim, int):
        raise TypeError(f"{op.name}: dimension {dim!r}")
    rank = len(values[str(op.args[0])].shape)
    dim = dim + rank if dim < 0 else dim
    if dim == rank - 1 and dim > 1:
        return f"..., {index}"
    return ", ".join([":"] * dim + [index])


def index(op: Op, names: Names, values: Mapping[str, TensorMeta]) -> Expr:
    """`x[rows, columns]`."""
    indices = op.args[1] if isinstance(op.args[1], tuple) else (op.args[1],)
    return subscript(
        argument(op, 0, names),
        ", ".join(":" if i is None else spell_arg(i, names).text for i in indices),
    )


def tensor(op: Op, names: Names, values: Mapping[str, TensorMeta]) -> Expr:
    """A literal tensor."""
    data = spell_list(op.args[0], names)
    return call(
        "torch.tensor",
        [data, *(f"{k}={spell_arg(v, names).text}" for k, v in op.kwargs), "device=device"],
    )


def spell_list(value: Arg, names: Names) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(spell_list(item, names) for item in value)}]"
    return spell_arg(value, names).text


def negate(op: Op, names: Names, values: Mapping[str, TensorMeta]) -> Expr:
    return unary("-" if op.target.startswith("aten.neg") else "~", argument(op, 0, names))


def reverse_subtract(op: Op, names: Names, values: Mapping[str, TensorMeta]) -> Expr | None:
    if len(op.args) != 2:
        return None
    return binary(argument(op, 1, names), "-", argument(op, 0, names), Level.SUM)


def to_dtype(op: Op, names: Names, values: Mapping[str, TensorMeta]) -> Expr | None:
    return (
        method(argument(op, 0, names), "to", [spell_arg(op.args[1], names).text])
        if len(op.args) == 2
        else None
    )


def einsum(op: Op, names: Names, values: Mapping[str, TensorMeta]) -> Expr:
    operands = op.args[1] if isinstance(op.args[1], tuple) else ()
    return call(
        "torch.einsum", [argument(op, 0, names).text, *(spell_arg(o, names).text for o in operands)]
    )


def attribute(op: Op, names: Names, values: Mapping[str, TensorMeta]) -> Expr:
    name = op.target.split(".")[1]
    return Expr(f"{argument(op, 0, names).at_least(Level.ATOM)}.{renamed.get(name, name)}")


specials: Mapping[str, Callable[[Op, Names, Mapping[str, TensorMeta]], Expr | None]] = {
    "slice": slice_,
    "select": select,
    "index": index,
    "tensor": tensor,
    "neg": negate,
    "bitwise_not": negate,
    "rsub": reverse_subtract,
    "to": to_dtype,
    "einsum": einsum,
    "mT": attribute,
    "numpy_T": attribute,
    "matrix_H": attribute,
}
