"""Finds what a loop of the user's became when it was traced: the same statements again and again.

`for t in range(T): h = a * h + x[:, t]; out.append(h)` is traced as T times its body. Runs of equal
bodies are a loop again, if all that differs from round to round is an index that grows evenly, and
what the round before made; and if what a round makes is read later only as an element of the one
list that `torch.stack` or `torch.cat` takes. What comes out runs the same operations in the same
order.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..ir.graph import Arg, Ref
from .rounds import leaves, progression, skeleton, with_leaves
from .tree import Item

fewest = 4
"""Rounds from which on a loop is shorter and clearer."""
widest = 8
"""How often the first operation of a body may stand in it."""
joining = ("aten.stack.default", "aten.cat.default")


@dataclass(frozen=True, slots=True)
class Carried:
    """What one round gives to the next."""

    first: str
    """The value that the first round is given."""
    made: str
    """The value that the first round makes."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What every round adds to a list."""

    value: str
    """Stands for the list."""
    before: tuple[str, ...]
    """What the list begins with."""
    made: str
    """The value that the first round adds."""


@dataclass(frozen=True, slots=True)
class Roll:
    """Rounds of one body."""

    items: tuple[Item, ...]
    """All of them."""
    body: tuple[Item, ...]
    """The first round, its indices in terms of the loop's variable."""
    carried: tuple[Carried, ...]
    collected: tuple[Collected, ...]
    last: Mapping[str, str]
    """Value of the first round -> that of the last."""
    numbers: Mapping[str, str]
    """What stands for an index -> its text."""

    @property
    def count(self) -> int:
        return len(self.items) // len(self.body)


def find_rolls(
    items: Sequence[Item], results: Sequence[str], barred: frozenset[int]
) -> tuple[tuple[Item, ...], tuple[Roll, ...]]:
    """The items with each roll's body and with lists in place of what is joined, and the rolls.

    `barred`: items, by id, that no roll may have.
    """
    finder = Finder(items, results, barred)
    rolls, at = [], 0
    while at < len(items):
        roll = finder.roll_at(at)
        if roll:
            rolls.append(roll)
        at += len(roll.items) if roll else 1
    inside = {id(item) for roll in rolls for item in roll.items}
    rolls = [
        roll
        for roll in rolls
        if all(id(items[finder.joins[c.value]]) not in inside for c in roll.collected)
    ]
    found = list(items)
    for roll in rolls:
        start = finder.positions[id(roll.items[0])]
        found[start : start + len(roll.body)] = roll.body
        for listed in roll.collected:
            place = finder.joins[listed.value]
            found[place] = with_list(found[place], listed.value)
    return tuple(found), tuple(rolls)


def with_list(item: Item, name: str) -> Item:
    """An op that reads a list instead of its elements."""
    op = replace(item.op, args=(Ref(name), *item.op.args[1:]))
    return replace(item, ops=(op,), reads=(name,))


@dataclass
class Links:
    """What is known of some rounds so far."""

    start: int
    period: int
    count: int
    carried: dict[tuple[int, int], str] = field(default_factory=dict)
    """(place in a round, output) of what the next round is given -> what the first one is."""
    constant: set[str] = field(default_factory=set)
    """Values that every round reads."""
    numbers: dict[str, str] = field(default_factory=dict)


class Finder:
    """Looks for rolls in the items of one function."""

    def __init__(
        self, items: Sequence[Item], results: Sequence[str], barred: frozenset[int]
    ) -> None:
        self.items, self.results = items, frozenset(results)
        self.positions = {id(item): at for at, item in enumerate(items)}
        self.readers: dict[str, list[int]] = {}
        for at, item in enumerate(items):
            for value in dict.fromkeys(item.reads):
                self.readers.setdefault(value, []).append(at)
        self.made = {v: (at, o) for at, i in enumerate(items) for o, v in enumerate(i.makes) if v}
        self.joins: dict[str, int] = {}
        """What stands for a list -> where it is joined."""
        kinds: dict[object, int] = {}
        self.kinds = [
            -1 - at if id(item) in barred else kinds.setdefault(skeleton(item), len(kinds))
            for at, item in enumerate(items)
        ]
        self.places: dict[int, list[int]] = {}
        for at, kind in enumerate(self.kinds):
            self.places.setdefault(kind, []).append(at)

    def roll_at(self, start: int) -> Roll | None:
        """The roll that begins with an item, if one does."""
        places = self.places[self.kinds[start]]
        later = bisect_right(places, start)
        for place in places[later : later + widest]:
            period = place - start
            body, count = self.kinds[start:place], 1
            while self.kinds[start + count * period : start + (count + 1) * period] == body:
                count += 1
            if count >= fewest:
                roll = self.check(start, period, count)
                if roll:
                    return roll
        return None

    def check(self, start: int, period: int, count: int) -> Roll | None:
        """The roll of so many rounds, if the values go as in a loop."""
        rounds = [self.items[start + k * period : start + (k + 1) * period] for k in range(count)]
        known = Links(start, period, count)
        body = [item for same in zip(*rounds, strict=True) for item in self.follow(same, known)]
        collected, firsts = self.collect(rounds, start), set(known.carried.values())
        if (
            len(body) < period
            or collected is None
            or firsts & known.constant
            or len(firsts) < len(known.carried)
        ):
            return None
        first, last = rounds[0], rounds[-1]
        pairs = [
            pair
            for one, other in zip(first, last, strict=True)
            for pair in zip(one.makes, other.makes, strict=True)
        ]
        return Roll(
            items=tuple(item for each in rounds for item in each),
            body=tuple(body),
            carried=tuple(Carried(v, first[i].makes[o]) for (i, o), v in known.carried.items()),
            collected=tuple(collected),
            last={made: later for made, later in pairs if made},
            numbers=known.numbers,
        )

    def follow(self, same: Sequence[Item], known: Links) -> Iterator[Item]:
        """The first of items that stand at one place of all rounds, its indices in terms of the
        loop's variable; nothing if they are no rounds of a loop."""
        changed: dict[int, Arg] = {}
        for leaf, column in enumerate(zip(*map(leaves, same), strict=True)):
            if len(set(map(repr, column))) == 1:
                if self.is_inside(column[0], known):
                    return
                known.constant.update([column[0].name] if isinstance(column[0], Ref) else [])
            elif index := progression(same[0], column):
                changed[leaf], known.numbers[index] = Ref(index), index
            else:
                source = self.source(column, known.start, known.period)
                if source is None:
                    return
                place, lag = source
                first = str(column[0])
                if lag and known.carried.setdefault(place, first) != first:
                    return
        yield with_leaves(same[0], changed)

    def is_inside(self, leaf: Arg, known: Links) -> bool:
        """Whether all rounds read what one of them made."""
        made = self.made.get(leaf.name) if isinstance(leaf, Ref) else None
        return made is not None and 0 <= made[0] - known.start < known.period * known.count

    def source(
        self, column: Sequence[Arg], start: int, period: int
    ) -> tuple[tuple[int, int], int] | None:
        """Where in a round the values of a column are made, and how many rounds before: 0 or 1."""
        refs = [leaf.name for leaf in column if isinstance(leaf, Ref)]
        if len(refs) != len(column) or any(name not in self.made for name in refs[1:]):
            return None
        found = set()
        for number, name in enumerate(refs[1:], 1):
            at, output = self.made[name]
            back = number - (at - start) // period
            found.add((((at - start) % period, output), back))
        if len(found) != 1:
            return None
        ((place, lag),) = found
        first = self.made.get(refs[0])
        if lag == 0:
            expected = (start + place[0], place[1])
            return (place, 0) if first == expected else None
        outside = first is None or first[0] < start
        return (place, 1) if lag == 1 and outside else None

    def collect(self, rounds: Sequence[Sequence[Item]], start: int) -> list[Collected] | None:
        """The lists that rounds add to; None where something else reads what a round made."""
        period, count = len(rounds[0]), len(rounds)
        span = range(start, start + period * count)
        found = []
        for number in range(period):
            for values in zip(*(each[number].makes for each in rounds), strict=True):
                later = {
                    at for v in values[:-1] for at in self.readers.get(v, ()) if at not in span
                }
                if self.results.intersection(values[:-1]) or len(later) > 1:
                    return None
                for at in later:
                    before = self.joined_before(at, values, start)
                    if before is None:
                        return None
                    name = f"list of {values[0]}"
                    self.joins[name] = at
                    found.append(Collected(name, before, values[0]))
        return found

    def joined_before(self, at: int, values: Sequence[str], start: int) -> tuple[str, ...] | None:
        """What an item joins these values to: values that are there before the loop."""
        item = self.items[at]
        if item.call or item.op.target not in joining or not isinstance(item.op.args[0], tuple):
            return None
        names = [leaf.name for leaf in item.op.args[0] if isinstance(leaf, Ref)]
        before = tuple(names[: -len(values)])
        there = all(self.made.get(name, (-1, 0))[0] < start for name in before)
        whole = len(names) == len(item.op.args[0]) and names[len(before) :] == list(values)
        return before if there and whole else None
