"""What the ranks of a job did against what one process did with the user's own model.

A difference is max|a-b| / max(1, max|b|) over a tensor, b being the user's model's. Every tensor
that a rank holds is compared, a tied one under each name that some rank has for it. What no rank
holds, what the user's model does not have, and a NaN on one side only are faults.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, get_args

import torch
from torch import Tensor

from ..ir.graph import Parameter
from .observe import Recording, Tensors
from .reference import Trace, Whole

Kind = Literal[
    "recipe",
    "initial",
    "whole",
    "loss",
    "metric",
    "gradient",
    "parameter",
    "replica",
    "buffer",
    "saved",
]
kinds: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Row:
    """One difference; in a Comparison the largest of its kind and step."""

    kind: Kind
    step: int | None
    """Counted from 0, and printed from 1; None for what is compared once."""
    name: str
    difference: float | None
    """None: there is no number for it; the note says why."""
    limit: float
    """The largest that passes."""
    note: str = ""
    compared: int = 1
    """How many of this kind and step there were,"""
    failed: int = 0
    """and how many of them did not pass."""

    @property
    def ok(self) -> bool:
        return self.difference is not None and self.difference <= self.limit

    def badness(self) -> float:
        return math.inf if self.difference is None else self.difference


@dataclass(frozen=True, slots=True)
class Comparison:
    """The worst of each kind and step. Prints as a table."""

    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def __str__(self) -> str:
        header = ("", "step", "difference", "limit", "failed", "worst")
        lines = [header, *map(cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = (map(str.ljust, line, widths) for line in lines)
        table = "\n".join("  ".join(line).rstrip() for line in padded)
        return f"{table}\n{'equal' if self.ok else 'NOT EQUAL'}"


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table."""
    difference = row.note if row.difference is None else f"{row.difference:.1e}"
    limit = f"{row.limit:.0e}" if row.limit else "0"
    step = "" if row.step is None else str(row.step + 1)
    return row.kind, step, difference, limit, f"{row.failed} of {row.compared}", row.name


def worst(rows: Iterable[Row]) -> tuple[Row, ...]:
    """The worst of each kind and step, with the count of all: faults before numbers."""

    def place(row: Row) -> tuple[int, int]:
        return kinds.index(row.kind), -1 if row.step is None else row.step

    found = []
    for _, group in groupby(sorted(rows, key=place), key=place):
        members = list(group)
        failed = sum(not row.ok for row in members)
        top = max(members, key=lambda row: (not row.ok, row.badness()))  # limits differ
        found.append(replace(top, compared=len(members), failed=failed))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Compare:
    """What is compared, and how strictly."""

    ranks: Sequence[Recording]
    logged: Sequence[Mapping[str, float]]
    """By step, the loss and the metrics as the scripts logged them, among more."""
    reference: Trace
    replicas: int
    """Rank r is of replica r mod replicas."""
    parameters: Mapping[str, Parameter]
    """Of the graph: which names are one tensor, which are buffers, which a state dict has."""
    limit: float
    gradient_limit: float
    whole_limit: float
    """Of a batch in one go, whose sums have another order."""

    def rows(self) -> Iterator[Row]:
        yield from self.initial()
        for step in range(len(self.reference.steps)):
            yield from self.results(step)
            yield from self.gradients(step)
            yield from self.states(step)
        for step in range(len(self.reference.steps), len(self.logged)):
            yield Row("loss", step, "loss", None, self.limit, "a step too many")
        for step, whole in enumerate(self.reference.whole):
            yield from self.at_once(step, whole)

    def initial(self) -> Iterator[Row]:
        """First values are equal bit by bit."""
        held = [rank.initial for rank in self.ranks]
        for tensors in held:
            for name, tensor in self.known(tensors):
                yield measure("initial", None, name, tensor, self.reference.initial, 0.0)
        yield from self.missing("initial", None, held, self.persistent())

    def results(self, step: int) -> Iterator[Row]:
        """The loss, the metrics, and the norm: steps that clip hide the size of gradients."""
        row = self.logged[step] if step < len(self.logged) else {}
        for name, value in self.reference.results[step].items():
            kind: Kind = "loss" if name == "loss" else "metric"
            if name not in row:
                yield Row(kind, step, name, None, self.limit, "not in metrics.jsonl")
                continue
            found = torch.tensor(row[name], dtype=torch.float64)
            expected = torch.tensor(value, dtype=torch.float64)
            limit = self.gradient_limit if name == "gradient_norm" else self.limit
            yield measure(kind, step, name, found, {name: expected}, limit)

    def at_once(self, step: int, whole: Whole) -> Iterator[Row]:
        """The batch in one go gives what its microbatches give; a metric may be no mean."""
        found = torch.tensor(self.reference.results[step]["loss"], dtype=torch.float64)
        expected = {"loss": torch.tensor(whole.results["loss"], dtype=torch.float64)}
        yield measure("whole", step, "loss", found, expected, self.whole_limit)
        scale = min(1.0, largest(whole.gradients.values()))
        for name, tensor in whole.summed.items():
            rounding = 100 * torch.finfo(tensor.dtype).eps  # a complex64 stays one in float64
            limit = max(self.whole_limit, rounding) * scale
            yield measure("whole", step, name, tensor, whole.gradients, limit)

    def gradients(self, step: int) -> Iterator[Row]:
        """As the optimizer reads them; a parameter has one on some rank, or nowhere.

        The limit shrinks with the largest of the step: small gradients are no excuse for errors.
        """
        expected = self.reference.steps[step].gradients
        limit = self.gradient_limit * min(1.0, largest(expected.values()))
        held = [rank.steps[step].gradients for rank in self.ranks if step < len(rank.steps)]
        for tensors in held:
            for name, tensor in tensors.items():
                yield measure("gradient", step, name, tensor, expected, limit)
        yield from self.missing("gradient", step, held, expected)

    def states(self, step: int) -> Iterator[Row]:
        """Parameters and buffers; a rank without an optimizer tells only the last."""
        last = step == len(self.reference.steps) - 1
        held = []
        for rank in self.ranks:
            if step < len(rank.steps):
                held.append(rank.steps[step].state)
                yield from self.state(step, rank, rank.steps[step].state)
                yield from self.equal_replicas(step, rank)
            elif not rank.steps:
                held.append(rank.final)
                yield from self.state(step, rank, rank.final) if last else ()
        yield from self.missing("parameter", step, held, self.persistent())

    def equal_replicas(self, step: int, rank: Recording) -> Iterator[Row]:
        """Replicas of a stage have the same parameters, bit by bit."""
        first = self.ranks[rank.rank - rank.rank % self.replicas]
        if first is not rank and step < len(first.steps):
            canonical = self.canonical()
            for name, tensor in rank.steps[step].state.items():
                fqn = canonical.get(name, name)
                if fqn in self.parameters and not self.parameters[fqn].buffer:
                    yield measure("replica", step, name, tensor, first.steps[step].state, 0.0)

    def state(self, step: int, rank: Recording, tensors: Tensors) -> Iterator[Row]:
        buffers = self.reference.buffers[step][rank.rank % self.replicas]
        expected, canonical = {**self.reference.steps[step].state, **buffers}, self.canonical()
        for name, tensor in self.known(tensors):
            fqn = canonical.get(name, name)
            buffer = fqn in self.parameters and self.parameters[fqn].buffer
            kind: Kind = "buffer" if buffer else "parameter"
            yield measure(kind, step, name, tensor, expected, self.limit)

    def canonical(self) -> dict[str, str]:
        """Each name of a tensor -> its first."""
        return {n: p.fqn for p in self.parameters.values() for n in (p.fqn, *p.aliases)}

    def persistent(self) -> list[str]:
        """What a state dict has: some rank must hold it."""
        return [p.fqn for p in self.parameters.values() if p.persistent]

    def known(self, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
        """Those that the user's model could have: not the literals of its forward."""
        literals = self.parameters.keys() - self.reference.initial.keys()
        return ((name, tensor) for name, tensor in tensors.items() if name not in literals)

    def missing(
        self, kind: Kind, step: int | None, held: Sequence[Tensors], expected: Iterable[str]
    ) -> Iterator[Row]:
        """Tensors of the model that no rank has, under any of their names."""
        canonical = self.canonical()
        there = {canonical.get(name, name) for tensors in held for name in tensors}
        for fqn in dict.fromkeys(canonical.get(name, name) for name in expected):
            if fqn not in there:
                yield Row(kind, step, fqn, None, self.limit, "on no rank")


def largest(tensors: Iterable[Tensor]) -> float:
    """The largest finite element of all."""
    tops = (torch.where(t.isfinite(), t.abs(), 0.0).max().item() for t in tensors if t.numel())
    return max(tops, default=0.0)


def measure(
    kind: Kind, step: int | None, name: str, found: Tensor, expected: Tensors, limit: float
) -> Row:
    """The difference of one tensor."""
    if name not in expected:
        return Row(kind, step, name, None, limit, "not in the model")
    a, b = found, expected[name]
    if a.shape != b.shape or a.dtype != b.dtype:
        note = f"{a.dtype}{list(a.shape)}, the model's is {b.dtype}{list(b.shape)}"
        return Row(kind, step, name, None, limit, note.replace("torch.", ""))
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    a, b = a.to(torch.float64), b.to(torch.float64)
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, (a - b).abs())
    if not gap.isfinite().all():
        return Row(kind, step, name, None, limit, "not finite on one side")
    return Row(kind, step, name, largest([gap]) / max(1.0, largest([b])), limit)
