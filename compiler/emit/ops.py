"""One op -> one Python expression, as a person would write it.

Spelling is tried in this order: a class of the user's, a way of its own, operators,
torch.nn.functional, methods, torch.*; what has none of them is called through torch.ops. Nothing
here is trusted: the emitted text is captured again and compared with the graph (`check/`).
"""

from collections.abc import Mapping

from ..ir.function import users_class
from ..ir.graph import Op, TensorMeta
from .arguments import Names, argument, arguments, spell_arg
from .expression import Expr, Level, binary, call, method
from .functional import functional, signatures
from .special import specials

operators: Mapping[str, tuple[str, Level]] = {
    "add": ("+", Level.SUM), "sub": ("-", Level.SUM), "mul": ("*", Level.PRODUCT),
    "div": ("/", Level.PRODUCT), "floor_divide": ("//", Level.PRODUCT),
    "remainder": ("%", Level.PRODUCT), "matmul": ("@", Level.PRODUCT),
    "__and__": ("&", Level.AND), "__or__": ("|", Level.OR), "__xor__": ("^", Level.XOR),
    "eq": ("==", Level.COMPARE), "ne": ("!=", Level.COMPARE), "lt": ("<", Level.COMPARE),
    "le": ("<=", Level.COMPARE), "gt": (">", Level.COMPARE), "ge": (">=", Level.COMPARE),
}  # fmt: skip
renamed: Mapping[str, str] = {
    "split_with_sizes": "split", "special_expit": "sigmoid", "_conj": "conj",
}  # fmt: skip
submodules = ("linalg", "fft", "special")
functions = frozenset(
    ("addmm", "addbmm", "baddbmm", "addmv", "where", "maximum", "minimum", "outer", "bmm", "mm",
     "cross", "kron")
)  # fmt: skip
"""Operations whose first operand is no more their subject than the others."""


def spell(op: Op, names: Names, values: Mapping[str, TensorMeta]) -> Expr:
    """The expression for an op. Several outputs come as a tuple."""
    if cls := users_class(op.target):
        named = zip(op.arg_names, op.args, strict=True)
        return call(f"{cls}.apply", [spell_arg(value, names, key).text for key, value in named])
    namespace, name, _ = op.target.split(".")
    if namespace not in ("aten", "ppc"):
        return users_own(f"torch.ops.{namespace}.{name}", op, names)
    special = specials.get(name)
    if special is not None:
        found = special(op, names, values)
        if found is not None:
            return found
    if name in operators and len(op.args) == 2 and not op.kwargs:
        operator, level = operators[name]
        return binary(argument(op, 0, names), operator, argument(op, 1, names), level)
    if name in signatures:
        return functional(op, signatures[name], names)
    name = renamed.get(name, name)
    if (op.spelling == "method" and name not in functions) or name == "split":
        return method(argument(op, 0, names), name, arguments(op, name, names, start=1))
    for module in submodules:
        if name.startswith(f"{module}_"):
            function = name.removeprefix(f"{module}_")
            return call(f"torch.{module}.{function}", arguments(op, name, names))
    if op.spelling == "torch" or name in functions:
        return call(f"torch.{name}", arguments(op, name, names))
    return call(f"torch.ops.{op.target}", arguments(op, name, names))


def users_own(function: str, op: Op, names: Names) -> Expr:
    """An operation that a module of the user's registers."""
    flag = next((i for i, a in enumerate(op.args) if isinstance(a, bool)), len(op.args))
    texts = [argument(op, i, names).text for i in range(flag)]
    named = (*zip(op.arg_names[flag:], op.args[flag:], strict=True), *op.kwargs)
    return call(function, texts + [f"{k}={spell_arg(v, names, k).text}" for k, v in named])
