"""Process groups as text: written out where they are few, by the rule that they follow where they
are many.

Eight replicas of 128 stages need 2168 groups, and every rank makes them all:

    members = [g for r in range(8) for i in range(r, r + 1016, 8) for g in [(i, i + 8), (i + 8, i)]]
    members += [tuple(range(i, i + 8)) for i in range(0, 1024, 8)]
    members += [tuple(range(i, i + 1024, 8)) for i in range(8)]
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from .layout import wrap

Group = tuple[int, ...]
Groups = Sequence[Group]
written_out = 24
"""So many groups, or ranks in a group, are still read at a glance."""


@dataclass(frozen=True, slots=True)
class Run:
    """Groups that repeat, all ranks `step` further on each time."""

    body: tuple[Group, ...]
    """The first of them, relative to `start`."""
    start: int
    step: int
    count: int


def member_lines(groups: Groups, name: str) -> Iterator[str]:
    """Statements that make the list `name` of all groups."""
    if len(groups) <= written_out:
        yield from wrap(f"{name} = [{', '.join(map(spell_ranks, groups))}]", 0)
        return
    sign = "="
    for key, alike in groupby(find_runs(groups), key=lambda run: (run.body, run.step, run.count)):
        for starts in even([run.start for run in alike]):
            yield from wrap(f"{name} {sign} [{spell_runs(*key, starts)}]", 0)
            sign = "+="


def spell_ranks(group: Group) -> str:
    """A group as a tuple; one of many ranks at equal distances as a range."""
    step = group[1] - group[0] if len(group) > 1 else 1
    if len(group) <= written_out or any(b - a != step for a, b in pairwise(group)):
        return str(group)
    return f"tuple({spell_range(group[0], group[-1] + step, step)})"


def find_runs(groups: Groups) -> Iterator[Run]:
    """The groups as runs, each as long as it can be; of the next two or one groups what is more."""
    at = 0
    while at < len(groups):
        run = max((run_at(groups, at, length) for length in (1, 2)), key=covered)
        yield run
        at += covered(run)


def covered(run: Run) -> int:
    return len(run.body) * run.count


def run_at(groups: Groups, at: int, length: int) -> Run:
    """The run of so many groups that begins at one of them."""
    first, second = groups[at : at + length], groups[at + length : at + 2 * length]
    start = first[0][0]
    step = second[0][0] - start if second else 0
    count = 1
    while step > 0 and moved(first, step * count) == tuple(
        groups[at + length * count : at + length * (count + 1)]
    ):
        count += 1
    return Run(moved(first, -start), start, step if count > 1 else 0, count)


def moved(groups: Groups, distance: int) -> tuple[Group, ...]:
    return tuple(tuple(rank + distance for rank in group) for group in groups)


def even(starts: Sequence[int]) -> Iterator[range]:
    """The starts as ranges."""
    at = 0
    while at < len(starts):
        step = max(starts[at + 1] - starts[at], 0) if at + 1 < len(starts) else 0
        stop = at + 1
        while step and stop < len(starts) and starts[stop] - starts[stop - 1] == step:
            stop += 1
        yield range(starts[at], starts[stop - 1] + 1, step or 1)
        at = stop


def spell_runs(body: tuple[Group, ...], step: int, count: int, starts: range) -> str:
    """Equal runs that begin at these ranks, as what stands inside a list."""
    if count == 1 and len(starts) == 1:
        return ", ".join(map(spell_ranks, moved(body, starts[0])))
    loops = []
    if count > 1 and len(starts) > 1:
        loops.append(f"for r in {spell_range(starts[0], starts[-1] + starts.step, starts.step)}")
        loops.append(f"for i in {spell_range('r', step * count, step)}")
    elif count > 1:
        loops.append(f"for i in {spell_range(starts[0], starts[0] + step * count, step)}")
    else:
        loops.append(f"for i in {spell_range(starts[0], starts[-1] + starts.step, starts.step)}")
    groups = [spell_relative(group) for group in body]
    if len(groups) == 1:
        return " ".join([*groups, *loops])
    return " ".join(["g", *loops, f"for g in [{', '.join(groups)}]"])


def spell_relative(group: Group) -> str:
    """A group of ranks counted from `i`."""
    step = group[1] - group[0] if len(group) > 1 else 1
    if len(group) < 3 or group[0] or any(b - a != step for a, b in pairwise(group)):
        return f"({', '.join(f'i + {rank}' if rank else 'i' for rank in group)})"
    return f"tuple({spell_range('i', group[-1] + step, step)})"


def spell_range(start: int | str, stop: int, step: int) -> str:
    """`range(8)`, `range(0, 1024, 8)`, `range(r, r + 1016, 8)`"""
    if start == 0 and step == 1:
        return f"range({stop})"
    end = f"{start} + {stop}" if isinstance(start, str) else str(stop)
    return f"range({start}, {end}{f', {step}' if step != 1 else ''})"
