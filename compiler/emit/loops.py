"""Finds calls of all elements of a container, each fed by the last: `for block in self.blocks:`."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..ir.graph import Ref
from .attributes import Attributes
from .calls import signature
from .expression import quote
from .function import Loop
from .tree import Item, Tree, is_leaf


@dataclass(frozen=True, slots=True)
class LoopFinder:
    """Looks for loops in one function."""

    tree: Tree
    attributes: Attributes
    base: str
    """Path of the class; "" for a stage."""
    seeds: Mapping[str, str]
    """Op -> a statement that must run right before it."""

    def find(self, items: Sequence[Item], results: Sequence[str]) -> tuple[Loop, ...]:
        """The loops among the items of a function that returns some values."""
        readers = Counter(value for item in items for value in {*item.reads})
        readers.update(results)
        found = (self.make(run, readers) for run in self.runs(items))
        return tuple(loop for loop in found if loop is not None)

    def runs(self, items: Sequence[Item]) -> Iterator[list[Item]]:
        """Runs of consecutive calls of elements of one container."""
        run: list[Item] = []
        container: str | None = None
        for item in items:
            inside = item.call.path.rpartition(".")[0] if item.call else None
            if inside != container:
                yield run
                run, container = [], inside
            if inside is not None and inside.startswith(self.base):
                run.append(item)
        yield run

    def make(self, run: Sequence[Item], readers: Mapping[str, int]) -> Loop | None:
        """The loop over a run, if it goes through a whole container and passes all alike."""
        if len(run) < 2:
            return None
        paths = [item.call.path for item in run if item.call]
        full = paths[0].rpartition(".")[0]
        container = full.removeprefix(self.base).removeprefix(".") if self.base else full
        keys = [path.rpartition(".")[2] for path in paths]
        kind = self.attributes.kind(container)
        if kind == "plain" or keys != self.attributes.modules_of(container):
            return None
        seeds = {
            self.seed(item).replace(quote(path), "*") for item, path in zip(run, paths, strict=True)
        }
        if len(seeds) > 1 or not self.feeds_on(run, readers):
            return None
        return self.spell(tuple(run), container, seeds.pop().replace("*", element_path(full)))

    def spell(self, run: tuple[Item, ...], container: str, seed: str) -> Loop:
        accessed = self.attributes.access(container) if container else "self"
        is_list = self.attributes.kind(container) == "list"
        name = container.rpartition(".")[2]
        element = name[:-1] if name.endswith("s") and len(name) > 2 else "layer"
        if seed:
            values = f"enumerate({accessed})" if is_list else f"{accessed}.items()"
        else:
            values = accessed if is_list else f"{accessed}.values()"
        return Loop(run, element, values, seed)

    def seed(self, item: Item) -> str:
        return next((self.seeds[op.name] for op in item.ops if op.name in self.seeds), "")

    def feeds_on(self, run: Sequence[Item], readers: Mapping[str, int]) -> bool:
        """Whether each call's one result is read by the next alone, and the rest passed alike."""
        first = [value for value in run[0].reads if value not in run[1].reads]
        if len(first) != 1 or any(len(item.makes) != 1 for item in run):
            return False
        carried = [*first, *(item.makes[0] for item in run)]
        around = {(i.grad, i.autocast(None)) for i in run}
        if any(readers[value] > 1 for value in carried[1:-1]) or len(around) > 1:
            return False
        for i, item in enumerate(run):
            if {value for value in item.reads if value in carried} != {carried[i]}:
                return False
        return len({self.passed(item, carried[i]) for i, item in enumerate(run)}) == 1

    def passed(self, item: Item, carried: str) -> tuple[object, ...] | Item:
        """What a call is given, `*` for what the one before made; itself if it is like no other."""
        if item.call is not None and is_leaf(self.tree.graph.modules[item.call.path]):
            if not isinstance(item.call.output, Ref):
                return item
            arguments: tuple[tuple[str, object], ...] = (*item.call.arguments, ("batch", False))
            positional = item.call.positional
        else:
            form = signature(self.tree, item)
            arguments = tuple((name, Ref(value)) for name, value in form.arguments)
            arguments += (*form.states, ("batch", form.batch))
            positional = form.positional
        return tuple(
            (i if i < positional else name, "*" if value == Ref(carried) else value)
            for i, (name, value) in enumerate(arguments)
        )


def element_path(container: str) -> str:
    """The path of the element with the key `i`, as an f-string."""
    if not container:
        return "i"
    return "f" + quote(f"{container}.").replace("{", "{{").replace("}", "}}")[:-1] + '{i}"'
