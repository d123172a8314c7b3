"""Arguments of an op as Python text."""

from collections.abc import Callable

from ..ir.graph import Arg, Device, Dim, Items, Op, Ref, State, TorchConstant
from .expression import Expr, Level, binary, number, quote, sequence

Names = Callable[[Ref | State], Expr]
"""What a value or parameter is called where the op stands."""

unpacked = frozenset(
    ("view", "reshape", "permute", "expand", "repeat", "tile", "flip",
     "new_zeros", "new_ones", "new_empty")
)  # fmt: skip
"""Methods that take a list of numbers as so many arguments."""
varargs = frozenset(("block_diag", "cartesian_prod", "broadcast_tensors"))
"""Functions that take a list of tensors as so many arguments."""
by_keyword = frozenset(
    ("sum", "mean", "softmax", "log_softmax", "cat", "stack", "split", "chunk", "unbind", "max",
     "min", "argmax", "argmin", "std", "var", "cumsum", "amax", "amin", "any", "all", "prod",
     "logsumexp", "sort", "topk", "norm", "cumprod", "cummax", "cummin", "logcumsumexp", "argsort",
     "median", "nanmedian", "mode", "kthvalue", "nansum", "nanmean", "count_nonzero", "diff",
     "repeat_interleave", "take_along_dim", "cross", "std_mean", "var_mean", "linalg_vector_norm",
     "cosine_similarity", "roll")
)  # fmt: skip
"""Operations whose `dim` or `dims` people name."""


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
    if isinstance(value, Items):
        pairs = (f"{quote(key)}: {spell_arg(item, names, key).text}" for key, item in value.items)
        return Expr(f"{{{', '.join(pairs)}}}")
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
        if key in op.at_default or (name == "clamp" and value is None):
            keyword = True
            continue
        keyword |= isinstance(value, bool) or (name == "clamp" and len(op.args) == 2)  # one bound
        keyword |= key in ("dim", "dims") and name in by_keyword
        if isinstance(value, tuple) and name in unpacked | varargs and not keyword:
            result += [spell_arg(item, names, key).text for item in value] or ["()"]
            continue
        alone = isinstance(value, tuple) and len(value) == 1 and key in ("dim", "dims", "shifts")
        text = spell_arg(value[0] if alone and isinstance(value, tuple) else value, names, key).text
        result.append(f"{key}={text}" if keyword else text)
    return result + [f"{key}={spell_arg(value, names, key).text}" for key, value in op.kwargs]


def spell_list(value: Arg, names: Names) -> str:
    """Nested lists, as torch.tensor takes them."""
    if isinstance(value, tuple):
        return f"[{', '.join(spell_list(item, names) for item in value)}]"
    return spell_arg(value, names).text
