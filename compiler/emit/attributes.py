"""What a class or stage holds, as the lines of its __init__, and how its functions reach it.

Containers keep the user's names: a list of which only a part is here becomes a ModuleDict with the
original numbers, so that every parameter has its name in the whole model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from keyword import iskeyword

from ..ir.graph import Constructor, Graph, Module, TensorMeta
from .arguments import spell_arg
from .expression import Expr, call, quote


@dataclass(frozen=True, slots=True)
class Holding:
    """What is held at a path relative to the class: a module, or a parameter or buffer."""

    path: str
    expr: Expr
    """How to make it: `nn.Linear(128, 384)`, `nn.Parameter(torch.empty(64))`."""
    buffer: bool = False
    persistent: bool = True
    parameter: bool = False


class Attributes:
    """The holdings of one class, in the order of the user's modules."""

    def __init__(self, holdings: Mapping[str, Holding], graph: Graph, base: str) -> None:
        self.holdings, self.graph, self.base = holdings, graph, base
        self.children: dict[str, list[str]] = {}
        """Container (relative path) -> keys of what it has here, in order."""
        for path in holdings:
            parts = path.split(".")
            for i in range(len(parts)):
                keys = self.children.setdefault(".".join(parts[:i]), [])
                if parts[i] not in keys:
                    keys.append(parts[i])
        own = [key for key in self.children.get("", []) if not is_name(key)]
        root = self.module("")
        self.keyed = bool(own and root and root.indexed and self.parameter_paths().isdisjoint(own))
        """Whether the class is a ModuleDict: its modules' names are numbers, as nn.Sequential's."""

    def module(self, path: str) -> Module | None:
        return self.graph.modules.get(f"{self.base}.{path}".strip(".") if self.base else path)

    @property
    def own_class(self) -> str:
        """What the class derives from."""
        return "nn.ModuleDict" if self.keyed else "nn.Module"

    def kind(self, path: str) -> str:
        """`list`, `dict` or `plain`: how a container, or the class itself, is emitted."""
        if not path:
            return "dict" if self.keyed else "plain"
        module = self.module(path)
        keys = self.children.get(path, [])
        if (
            module is None
            or not module.indexed
            or any(f"{path}.{key}" in self.parameter_paths() for key in keys)
        ):
            return "plain"
        held = all(f"{path}.{key}" in self.holdings for key in keys)
        return "list" if held and keys == [str(i) for i in range(len(keys))] else "dict"

    def parameter_paths(self) -> set[str]:
        return {
            path for path, holding in self.holdings.items() if holding.parameter or holding.buffer
        }

    def access(self, path: str) -> str:
        """`self.model.layers["2"].norm` for `model.layers.2.norm`."""
        text, done, inside = "self", "", False
        for part in path.split("."):
            held = self.holdings.get(done)
            inside |= held is not None  # of a module whose class is not this one's to know
            kind = self.kind(done) if done and not inside else "plain"
            chain = held is not None and held.expr.text.startswith("nn.Sequential(")
            if kind == "list" or (chain and part.isdigit()):
                text += f"[{part}]"
            elif kind == "dict" or (self.keyed and not done and not is_name(part)):
                text += f"[{quote(part)}]"
            elif is_name(part):
                text += f".{part}"
            else:  # a module list that is called
                text = f"getattr({text}, {quote(part)})"
            done = f"{done}.{part}" if done else part
        return text

    def lines(self, path: str = "") -> Iterator[str]:
        """The statements of __init__."""
        target = self.access(path) if path else "self"
        for key, *more in self.alike(path):
            inner = f"{path}.{key}" if path else key
            holding = self.holdings.get(inner)
            if holding is None:
                yield from self.container(inner)
            elif more:
                numbers = f"range({key}, {int(key) + 1 + len(more)})"
                yield f"self.update({{str(i): {holding.expr.text} for i in {numbers}}})"
            elif holding.buffer:
                flag = "" if holding.persistent else ", persistent=False"
                yield f"{target}.register_buffer({quote(key)}, {holding.expr.text}{flag})"
            else:
                kind = "parameter" if holding.parameter else "module"
                yield self.assign(inner, kind, holding.expr.text)

    def alike(self, path: str) -> Iterator[list[str]]:
        """Keys of what is held at a path; those of equal modules of a ModuleDict's together."""
        run: list[str] = []
        for key in self.children.get(path, []):
            held, before = self.holdings.get(key), self.holdings.get(run[-1]) if run else None
            same = held and before and held.expr == before.expr and not path and self.keyed
            if run and not (same and key.isdigit() and int(key) == int(run[-1]) + 1):
                yield run
                run = []
            run.append(key)
        if run:
            yield run

    def modules_of(self, path: str) -> list[str]:
        """Keys of the modules that a container has, or the class for ""."""
        held = self.children.get(path, [])
        return [key for key in held if path or key not in self.parameter_paths()]

    def assign(self, path: str, kind: str, text: str) -> str:
        """The statement that puts a module or parameter at a path."""
        owner, _, key = path.rpartition(".")
        access = self.access(path)
        if not access.startswith("getattr("):
            return f"{access} = {text}"
        target = self.access(owner) if owner else "self"
        return f"{target}.register_{kind}({quote(key)}, {text})"

    def container(self, path: str) -> Iterator[str]:
        """A container with what it has here; equal elements in one comprehension."""
        kind, keys = self.kind(path), self.children[path]
        texts = [
            self.holdings[f"{path}.{key}"].expr.text if f"{path}.{key}" in self.holdings else None
            for key in keys
        ]
        if kind == "plain":
            yield self.assign(path, "module", "nn.Module()")
            yield from self.lines(path)
        elif None in texts:
            yield self.assign(path, "module", "nn.ModuleDict()")
            yield from self.lines(path)
        elif len(keys) > 1 and len(set(texts)) == 1:
            yield self.assign(path, "module", comprehension(keys, str(texts[0]), kind))
        elif kind == "list":
            yield self.assign(path, "module", f"nn.ModuleList([{', '.join(map(str, texts))}])")
        else:
            named = zip(map(quote, keys), texts, strict=True)
            entries = ", ".join(f"{key}: {text}" for key, text in named)
            yield self.assign(path, "module", f"nn.ModuleDict({{{entries}}})")


def is_name(key: str) -> bool:
    """Whether Python can have it after a dot."""
    return key.isidentifier() and not iskeyword(key)


def comprehension(keys: list[str], text: str, kind: str) -> str:
    """Equal elements, made in a loop over their keys."""
    if kind == "list":
        return f"nn.ModuleList({text} for _ in range({len(keys)}))"
    numbers = [int(key) for key in keys if key.isdigit()]
    if len(numbers) == len(keys) and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"nn.ModuleDict({{str(i): {text} for i in range({numbers[0]}, {numbers[-1] + 1})}})"
    listed = ", ".join(map(quote, keys))
    return f"nn.ModuleDict({{name: {text} for name in ({listed})}})"


def construct(constructor: Constructor) -> Expr:
    """`nn.Linear(128, 384, bias=False)`."""
    names = positional_names.get(constructor.cls, ())
    texts = [
        spell_arg(value, no_values, names[i] if i < len(names) else "size").text
        for i, value in enumerate(constructor.args)
    ]
    texts += [f"{key}={spell_arg(value, no_values, key).text}" for key, value in constructor.kwargs]
    return call(constructor.cls, texts)


positional_names: Mapping[str, tuple[str, ...]] = {
    "nn.Linear": ("in_features", "out_features"),
    "nn.Embedding": ("num_embeddings", "embedding_dim"),
    "nn.EmbeddingBag": ("num_embeddings", "embedding_dim"),
    "nn.LayerNorm": ("normalized_shape",),
    "nn.RMSNorm": ("normalized_shape",),
    "nn.GroupNorm": ("num_groups", "num_channels"),
    **{f"nn.Conv{d}d": ("in_channels", "out_channels", "kernel_size") for d in (1, 2, 3)},
    **{f"nn.ConvTranspose{d}d": ("in_channels", "out_channels", "kernel_size") for d in (1, 2, 3)},
    **{f"nn.BatchNorm{d}d": ("num_features",) for d in (1, 2, 3)},
    **{f"SyncBatchNorm{d}d": ("num_features",) for d in (1, 2, 3)},
    **{f"nn.{name}": ("input_size", "hidden_size") for name in ("LSTM", "GRU", "RNN")},
}
"""Names for numbers that become arguments of a class."""


def no_values(ref: object) -> Expr:
    raise TypeError(f"a constructor does not read {ref}")


def empty_tensor(meta: TensorMeta, default_dtype: str) -> Expr:
    """A tensor of a shape, without values: they come later."""
    sizes = [spell_arg(size, no_values, "size").text for size in meta.shape] or ["()"]
    dtype = [] if meta.dtype == default_dtype else [f"dtype=torch.{meta.dtype}"]
    return call("torch.empty", [*sizes, *dtype])
