"""One forward, whole: arguments, statements, loops over equal modules, the return."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from ..ir.graph import Dim, Graph
from .body import Line, Writer
from .calls import Calls
from .expression import number
from .rolled import Carried, Roll, find_rolls
from .scope import Scope
from .tree import Item

end = float("inf")


@dataclass(frozen=True, slots=True)
class Loop:
    """Calls of all elements of a container, in order, each feeding the next."""

    items: tuple[Item, ...]
    element: str
    """What the loop calls one of them."""
    values: str
    """How the loop reads them: `self.blocks.values()`, or `self.blocks` itself for a list."""
    seed: str
    """What runs before each element, whose key is `i`; "" for nothing."""


@dataclass(frozen=True, slots=True)
class Function:
    """What to write."""

    arguments: tuple[tuple[str, str], ...]
    """(name wanted, value), in order."""
    items: tuple[Item, ...]
    results: tuple[str, ...]
    """Values to return."""
    loops: tuple[Loop, ...]
    given_batch: bool = False
    """Whether the number of samples is an argument of its own."""
    without_grad: bool = False
    """Whether it runs under torch.no_grad() as a whole: its caller says so."""
    autocast: str | None = None
    """The dtype of the torch.autocast in which its caller runs it."""


def roll_up(
    function: Function, seeds: Mapping[str, str]
) -> tuple[tuple[Item, ...], tuple[Roll, ...]]:
    """The function's items with what the user's loops became rolled up again."""
    looped = {id(item) for loop in function.loops for item in loop.items}
    seeded = {id(i) for i in function.items if any(op.name in seeds for op in i.ops)}
    return find_rolls(function.items, function.results, frozenset(looped | seeded))


class FunctionWriter:
    """Writes a function's argument names and lines."""

    def __init__(
        self,
        graph: Graph,
        function: Function,
        access: Mapping[str, str],
        calls: Calls,
        seeds: Mapping[str, str],
        fixed: Mapping[str, str],
    ) -> None:
        items, self.rolls = roll_up(function, seeds)
        self.function = function = replace(function, items=items)
        self.graph, self.calls = graph, calls
        self.positions = {id(item): i for i, item in enumerate(items)}
        last: dict[str, float] = {v: i for i, item in enumerate(items) for v in item.reads}
        last |= dict.fromkeys(function.results, end)
        for roll in self.rolls:  # what a round adds to a list is read at its end
            after = self.positions[id(roll.body[-1])] + 1
            kept = [v for c in roll.collected for v in (*c.before, c.made)]
            last |= {value: max(after, last.get(value, 0)) for value in kept}
        self.scope = Scope(last)
        self.writer = Writer(
            graph,
            calls.tree.metas,
            self.scope,
            access,
            calls,
            seeds,
            calls.tree.inside,
            fixed,
            indent=8,
        )
        self.argument_names = [
            self.scope.bind(value, wanted, -1) for wanted, value in function.arguments
        ]
        self.uses = Counter(value for item in function.items for value in item.reads)
        self.uses.update(function.results)
        listed = [c for roll in self.rolls for c in roll.collected]
        self.uses.update(value for c in listed for value in (*c.before, c.made))

    def lines(self) -> list[Line]:
        """The body."""
        lines: list[Line] = []
        for contexts, run in groupby(self.function.items, key=self.contexts):
            found = list(self.run(list(run)))
            if contexts:
                lines.append(Line(f"with {', '.join(contexts)}:"))
                found = [replace(line, indent=line.indent + 4) for line in found]
            lines += found
        lines = self.returned(lines)
        if not self.function.given_batch and self.calls.tree.reads_batch(self.function.items):
            lines.insert(0, Line(f"batch = {self.batch()}"))
        return lines

    def contexts(self, item: Item) -> tuple[str, ...]:
        """What an item must run in, beside what the function's caller sees to."""
        autocast, found = item.autocast(self.graph.autocast), []
        if not item.grad and not self.function.without_grad:
            found.append("torch.no_grad()")
        if autocast != self.function.autocast:
            how = f"torch.{autocast}" if autocast else "enabled=False"
            found.append(f"torch.autocast(device.type, {how})")
        return tuple(found)

    def batch(self) -> str:
        """The number of samples, from the first argument that shows it."""
        for _, value in self.function.arguments:
            for i, size in enumerate(self.graph.values[value].shape):
                if isinstance(size, Dim):
                    name = f"{self.argument_names[self.index(value)]}.shape[{i}]"
                    return name if size.coefficient == 1 else f"{name} // {size.coefficient}"
        raise ValueError("no argument shows the number of samples")

    def index(self, value: str) -> int:
        return [v for _, v in self.function.arguments].index(value)

    def run(self, items: Sequence[Item]) -> Iterator[Line]:
        """Items statement by statement, and loops."""
        looped: dict[int, Loop | Roll] = {
            id(item): loop for loop in self.function.loops for item in loop.items
        }
        looped |= {id(i): r for r in self.rolls for i in (*r.items, *r.body)}
        for loop, run in groupby(items, key=lambda item: looped.get(id(item))):
            if isinstance(loop, Roll):
                yield from self.roll(loop)
            elif loop:
                yield from self.loop(loop)
            else:
                for group in self.statements(list(run)):
                    yield from self.statement(group)

    def statements(self, items: Sequence[Item]) -> list[list[Item]]:
        """Runs of items of one statement of the user; an item without one stands alone.

        What a loop on one line (`[table(x[:, i]) for ...]`) makes just for its next round goes to
        that round.
        """
        by_statement = groupby(items, key=lambda item: item.statement or id(item))
        groups = [list(run) for _, run in by_statement]
        for before, after in pairwise(groups):
            while before and self.serves(before[-1], after):
                after.insert(0, before.pop())
        return [group for group in groups if group]

    def serves(self, item: Item, group: Sequence[Item]) -> bool:
        """Whether an operation is on the line of a statement, and read only there."""
        mine, theirs = (self.graph.statements.get(i.statement) for i in (item, group[0]))
        if item.call is not None or not mine or not theirs or mine.where != theirs.where:
            return False
        reads = Counter(value for other in group for value in other.reads)
        return bool(mine.where) and all(self.uses[value] == reads[value] for value in item.makes)

    def statement(self, group: Sequence[Item]) -> Iterator[Line]:
        inside = Counter(value for item in group for value in item.reads)
        outside = {v: self.uses[v] - inside[v] for item in group for v in item.makes if v}
        yield from self.writer.group(group, self.positions[id(group[0])], outside)

    def loop(self, loop: Loop) -> Iterator[Line]:
        """`for block in self.blocks.values():` and `x = block(x, mask)`."""
        first, (made,) = loop.items[0], loop.items[-1].makes
        carried = next(value for value in first.reads if value not in loop.items[1].reads)
        position = self.positions[id(first)]
        name = self.loop_variable(first, carried, made, position)
        if name != self.scope[carried]:
            yield Line(f"{name} = {self.scope[carried]}")
        before = self.scope.names[carried]
        self.scope.names[carried] = name
        element = self.scope.unused(loop.element, position - 1)
        element = f"{element}_" if element == name else element
        expr = self.calls(first, self.writer, receiver=element).expr
        self.scope.names[carried] = before
        self.scope.names[made], self.scope.bound[name] = name, made
        if loop.seed:
            yield Line(f"for i, {element} in {loop.values}:")
            yield Line(loop.seed, indent=4)
        else:
            yield Line(f"for {element} in {loop.values}:")
        yield Line(f"{name} = {expr.text}", indent=4)

    def roll(self, roll: Roll) -> Iterator[Line]:
        """`for i in range(16):`, the user's statements of one round, and what it adds to lists."""
        start = self.positions[id(roll.body[0])]
        self.scope.names |= roll.numbers
        before = {carried.first: self.scope[carried.first] for carried in roll.carried}
        for carried in roll.carried:
            yield from self.begin(roll, carried, start)
        lists = {}
        for listed in roll.collected:
            wanted = f"{self.calls.tree.inside.get(listed.made, 'result')}s"
            name = lists[listed.made] = self.scope.bind(listed.value, wanted, start - 1)
            yield Line(f"{name} = [{', '.join(self.scope[value] for value in listed.before)}]")
        names = {c.made: self.scope[c.first] for c in roll.carried}
        yield Line(f"for i in range({number(roll.count, 'rounds').text}):")
        for group in self.statements(roll.body):
            yield from (replace(line, indent=line.indent + 4) for line in self.statement(group))
        for made, name in lists.items():
            yield Line(f"{name}.append({self.scope[made]})", indent=4)
        for made, name in names.items():
            if self.scope[made] != name:
                yield Line(f"{name} = {self.scope[made]}", indent=4)
        for made, last in roll.last.items():
            name = names.get(made, self.scope.names.get(made, ""))
            if name:
                self.scope.names[last], self.scope.bound[name] = name, last
        self.scope.names |= before

    def begin(self, roll: Roll, carried: Carried, start: int) -> Iterator[Line]:
        """A name for what goes from round to round: the first value's own, if nothing else reads
        that later. The value that a round makes takes it over where it can."""
        first, name = carried.first, self.scope[carried.first]
        wanted = self.calls.tree.inside.get(carried.made, name)
        body = list(enumerate(roll.body, start))
        read = max(at for at, item in body if first in item.reads)
        made = next(at for at, item in body if carried.made in item.makes)
        held = f"{first} in rounds"
        self.scope.last_use[held] = self.writer.last_use[held] = max(read, made)
        if self.scope.last_use[first] > read or not re.fullmatch(rf"{wanted}(_\d+)?", name):
            yield Line(f"{self.scope.bind(held, wanted, start - 1)} = {name}")
        else:
            self.scope.names[held], self.scope.bound[name] = name, held
        self.scope.names[first] = self.scope[held]
        self.writer.fixed = {**self.writer.fixed, carried.made: self.scope[held]}

    def loop_variable(self, first: Item, carried: str, made: str, position: int) -> str:
        """The name that holds what goes from element to element: the user's, if it assigned one."""
        statement = self.graph.statements.get(first.statement)
        name = self.scope[carried]
        wanted = statement.targets[0] if statement and len(statement.targets) == 1 else name
        wanted = self.writer.fixed.get(made, wanted)
        if wanted == name and self.scope.last_use[carried] <= position:
            return name
        return self.scope.bind(made, wanted, position - 1)

    def returned(self, lines: list[Line]) -> list[Line]:
        """The body with its return: `return f(x)` instead of `y = f(x)` and `return y`."""
        names = [self.scope[value] for value in self.function.results]
        if not names:
            return lines
        last = lines[-1] if lines else None
        if last and len(names) == 1 and last.text.startswith(f"{names[0]} = ") and not last.indent:
            return [*lines[:-1], Line(last.text.replace(f"{names[0]} = ", "return ", 1))]
        return [*lines, Line(f"return {', '.join(names)}")]
