"""Diagram: schedules as text, for docstrings, plans and errors.

Time runs to the right, a column for each F and each B:

    rank 0 | F0 F1 .. B0 F2 B1 F3 B2 .. B3 |
    rank 1 | .. F0 B0 F1 B1 F2 B2 F3 B3 .. |
"""

from ..ir.schedule import Action, Kind, Schedule

Done = dict[tuple[int, Kind, int], int]

idle = ".."
elision = "..."
shown_rows = 3
"""Ranks above and below the one that an error points at."""


def timing_diagram(schedule: Schedule, width: int = 100) -> tuple[str, ...]:
    """A line for each rank, at most `width` columns; where time is longer, `...` in its middle.

    Every action takes one slot and messages take none. Actions of a schedule that cannot go on are
    left out.
    """
    starts = unit_slots(schedule)
    several = any(len({action.stage for action in row.actions}) > 1 for row in schedule.rows)
    span = 1 + max((start for row in starts for start in row), default=-1)
    table = {}
    for row, columns in zip(schedule.rows, starts, strict=True):
        if row.actions not in table:  # replicas have one row
            cells = table[row.actions] = [idle] * span
            for action, column in zip(row.actions, columns, strict=False):
                name = f"{action.kind}{action.microbatch}"
                cells[column] = f"{action.stage}{name}" if several else name
    cell = max((len(label) for cells in table.values() for label in cells), default=0)
    ranks = len(str(max((row.rank for row in schedule.rows), default=0)))
    room = width - len(f"rank {'':{ranks}} |  |")
    texts = {
        actions: elide([f"{label:{cell}}" for label in cells], room)
        for actions, cells in table.items()
    }
    return tuple(f"rank {row.rank:>{ranks}} | {texts[row.actions]} |" for row in schedule.rows)


def elide(cells: list[str], room: int) -> str:
    """The cells of one row, equally wide, with the middle left out where they do not fit."""
    text = " ".join(cells)
    if len(text) <= room:
        return text
    kept = (room - len(elision)) // (len(cells[0]) + 1)
    head, tail = cells[: kept - kept // 2], cells[len(cells) - kept // 2 :]
    return " ".join([*head, elision, *tail])


def unit_slots(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """The slot in which each action of each row runs, if all take one and messages none.

    A row ends early where an action would wait for ever. Equal rows, those of replicas, run alike.
    """
    last = max((a.stage for row in schedule.rows for a in row.actions), default=0)
    done: Done = {}
    slots: dict[tuple[Action, ...], list[int]] = {row.actions: [] for row in schedule.rows}
    progress = True
    while progress:
        progress = False
        for actions, columns in slots.items():
            for action in actions[len(columns) :]:
                ready = [done.get(needed) for needed in needs(action, last)]
                if None in ready:
                    break
                free = columns[-1] + 1 if columns else 0
                start = max([free, *(end for end in ready if end is not None)])
                columns.append(start)
                done[key(action)] = start + 1
                progress = True
    return tuple(tuple(slots[row.actions]) for row in schedule.rows)


def key(action: Action) -> tuple[int, Kind, int]:
    """What is done after an action; the gradients of an I are there as after a B."""
    kind = Kind.B if action.kind is Kind.I else action.kind
    return (action.stage, kind, action.microbatch)


def needs(action: Action, last: int) -> list[tuple[int, Kind, int]]:
    """What an action waits for: the stage before in a forward, that after in a backward."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.F:
        return [(stage - 1, Kind.F, microbatch)] if stage else []
    if action.kind is Kind.W:
        return [(stage, Kind.B, microbatch)]
    later = [(stage + 1, Kind.B, microbatch)] if stage < last else []
    return [(stage, Kind.F, microbatch), *later]


def grid(schedule: Schedule, rank: int, slot: int, width: int = 100) -> str:
    """The rows around `rank` in the order of their actions, an arrow below its `slot`-th one."""
    table = {row.rank: list(map(str, row.actions)) for row in schedule.rows}
    cell = 1 + max((len(label) for row in table.values() for label in row), default=0)
    columns = max(1, (width - len("  rank 000 | ...")) // cell)
    first = max(0, slot - columns // 2)
    lines = []
    for other, labels in table.items():
        if abs(other - rank) > shown_rows:
            continue
        start = f"  rank {other:3} | {elision + ' ' if first else ''}"
        lines.append(
            start + "".join(f"{label:{cell}}" for label in labels[first : first + columns])
        )
        if other == rank:
            lines.append(" " * (len(start) + cell * (slot - first)) + "^")
    return "\n".join(line.rstrip() for line in lines)
