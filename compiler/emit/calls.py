"""Calls of modules inside a function: `self.attn(x, mask)`, with the user's argument names."""

from dataclasses import dataclass

from ..ir.graph import Arg, Call, Ref, State, references
from .arguments import spell_arg
from .attributes import Attributes
from .body import Spelled, Writer
from .boundary import free
from .expression import call
from .tree import Item, Tree, is_leaf


@dataclass(frozen=True, slots=True)
class Signature:
    """What an emitted class's forward takes in one call of it, and what it returns."""

    arguments: tuple[tuple[str, str], ...]
    """(argument name, value)."""
    states: tuple[tuple[str, str], ...]
    """(argument name, parameter or buffer) of those that lie outside of the module."""
    positional: int
    results: tuple[str, ...]
    batch: bool
    """Whether it takes the number of samples, which no argument shows."""


def signature(tree: Tree, item: Item) -> Signature:
    """The signature of a lifted call: the user's arguments as far as they are read, then whatever
    else comes from outside."""
    noted, hints = item.call, tree.hints
    if noted is None:
        raise ValueError("an op has no signature")
    wanted = dict.fromkeys(item.reads)
    arguments: list[tuple[str, str]] = []
    positional = 0
    for index, (name, value) in enumerate(noted.arguments):
        refs = [
            ref.name for ref in references(value) if isinstance(ref, Ref) and ref.name in wanted
        ]
        for ref in dict.fromkeys(refs):
            arguments.append((name if isinstance(value, Ref) else hints.get(ref, ref), ref))
            del wanted[ref]
        positional += len(set(refs)) if index < noted.positional else 0
    arguments += [(hints.get(value, value), value) for value in wanted]
    arguments = unique(arguments)
    states = dict.fromkeys(
        ref.fqn for op in item.ops for ref in op.operands
        if isinstance(ref, State) and not ref.fqn.startswith(f"{noted.path}.")
    )  # fmt: skip
    outside = tuple((fqn.rpartition(".")[2], fqn) for fqn in states)
    return Signature(
        tuple(arguments), outside, positional, item.makes, batch=tree.needs_batch(item)
    )


def unique(arguments: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Arguments whose names differ."""
    taken: set[str] = set()
    result = []
    for name, value in arguments:
        own = free(name, taken)
        taken.add(own)
        result.append((own, value))
    return result


@dataclass(frozen=True)
class Calls:
    """Spells the calls of one class or stage."""

    tree: Tree
    attributes: Attributes
    base: str
    """Path of the class; "" for a stage."""
    chains: frozenset[str]
    """Paths of modules that are written as nn.Sequential(...)."""

    def receiver(self, path: str) -> str:
        """`self.blocks["2"].attn` for a module's full path."""
        if not path:  # the model, which the stage is then
            return "super().forward"
        return self.attributes.access(path.removeprefix(f"{self.base}.") if self.base else path)

    def __call__(self, item: Item, writer: Writer, receiver: str | None = None) -> Spelled:
        noted = item.call
        if noted is None:
            raise ValueError("not a call")
        function = receiver or self.receiver(noted.path)
        module = self.tree.graph.modules[noted.path]
        if is_leaf(module) or noted.path in self.chains:
            texts = [self.leaf_argument(noted, i, writer) for i in range(len(noted.arguments))]
            return Spelled(call(function, texts), *self.leaf_results(noted.output, item))
        form = signature(self.tree, item)
        texts = [
            writer.name(Ref(value)).text
            if i < form.positional
            else f"{name}={writer.name(Ref(value)).text}"
            for i, (name, value) in enumerate(form.arguments)
        ]
        texts += ["batch=batch"] * form.batch
        texts += [f"{name}={writer.name(State(fqn)).text}" for name, fqn in form.states]
        return Spelled(call(function, texts), form.results, ", ".join(["{}"] * len(form.results)))

    def leaf_argument(self, noted: Call, index: int, writer: Writer) -> str:
        """An argument of one of torch's own modules, as the user passed it."""
        name, value = noted.arguments[index]
        text = spell_arg(value, writer.name, name).text
        return text if index < noted.positional else f"{name}={text}"

    def leaf_results(self, output: Arg, item: Item) -> tuple[tuple[str, ...], str]:
        """The values and pattern of what torch's module returns: `x, (h, c)` of an LSTM."""
        used = set(item.makes)
        if isinstance(output, Ref):
            return (output.name,), "{}"
        if not isinstance(output, tuple):
            raise TypeError(f"{item.ops[0].name}: {output!r} cannot be assigned")
        values: list[str] = []
        pattern = self.pattern(output, used, values, top=True)
        return tuple(values), pattern

    def pattern(self, output: Arg, used: set[str], values: list[str], *, top: bool) -> str:
        if isinstance(output, tuple) and (
            top or any(n.name in used for n in references(output) if isinstance(n, Ref))
        ):
            inner = ", ".join(self.pattern(part, used, values, top=False) for part in output)
            inner += "," * (len(output) == 1)
            return inner if top and len(output) > 1 else f"({inner})"
        values.append(output.name if isinstance(output, Ref) and output.name in used else "")
        return "{}"
