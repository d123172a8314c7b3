"""Names of the values that go from stage to stage: one name each, the same in every script."""

from collections.abc import Mapping, Sequence

from ..ir.unit import Unit
from .scope import clean_outside


def name_boundary(units: Sequence[Unit], hints: Mapping[str, str]) -> dict[str, str]:
    """Value -> name. Two values that leave one stage, or come to one, have different names, and a
    value that a stage receives has none of the data fields' that it reads."""
    targets: dict[str, list[int]] = {}
    for unit in units:
        for transfer in unit.sends:
            targets.setdefault(transfer.value, [transfer.source]).append(transfer.target)
    fields = {unit.stage: {clean_outside(i.name) for i in unit.inputs} for unit in units}
    names: dict[str, str] = {}
    for value, (source, *others) in targets.items():
        meets = [v for v in names if targets[v][0] == source or set(others) & set(targets[v][1:])]
        taken = {names[v] for v in meets}.union(*(fields[stage] for stage in others))
        names[value] = free(clean_outside(hints.get(value, value.rstrip("_0123456789"))), taken)
    return names


def free(wanted: str, taken: set[str]) -> str:
    """The wanted name, or it with the lowest number that is free."""
    name, count = wanted, 1
    while name in taken:
        count += 1
        name = f"{wanted}_{count}"
    return name
