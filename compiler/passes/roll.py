"""Roll: straight-line programs to loops, so that a script shows warm-up, steady state and drain.

A compute and the transfers around it are one block. Stage 0 of 2 under 1F1B with 4 microbatches:

    F0 F1 B0 F2 B1 F3 B2 B3    ->    F0 | 3 x [F(i+1), B(i)] | B3
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise

from ..ir.program import (
    Compute,
    Flush,
    Instruction,
    Loop,
    Microbatch,
    Post,
    Program,
    Send,
    Wait,
)

Instructions = tuple[Instruction, ...]
Shape = tuple[int, int] | None
"""A number for the block's structure, and its microbatch; None for a block without a compute."""

moving = (Compute, Flush, Post, Send, Wait)
together = {(Post, Wait), (Wait, Post), (Wait, Compute), (Compute, Send), (Send, Send)}
"""Neighbours that belong to one block."""


@dataclass(frozen=True, slots=True)
class Run:
    """Bodies of `length` blocks, each with the microbatches of the one before it plus `stride`."""

    start: int
    length: int
    count: int
    stride: int

    @property
    def covered(self) -> int:
        return self.length * self.count


def roll(programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Put the longest run of repeating blocks into a loop, then those before and after it.

    Before: a compute's Post and Wait stand right before it, its Send right after. After: the
    programs unroll to what they were; no loop runs only once. What replicas share they still do.
    """
    rolled: list[Program] = []
    for moves, alike in groupby(programs, key=microbatches):
        loops = roll_blocks(split_blocks(moves))
        rolled += [with_microbatches(program, loops) for program in alike]
    return tuple(rolled)


def microbatches(program: Program) -> Instructions:
    """What a step computes and exchanges; sums, the update and the log come after it."""
    (step,) = (action.body for action in program.actions if isinstance(action, Loop))
    return step[: len(step) - end_length(step)]


def with_microbatches(program: Program, moves: Instructions) -> Program:
    """The program with other instructions in that place."""

    def put(action: Instruction) -> Instruction:
        if not isinstance(action, Loop):
            return action
        end = action.body[len(action.body) - end_length(action.body) :]
        return replace(action, body=(*moves, *end))

    return replace(program, actions=tuple(map(put, program.actions)))


def end_length(step: Instructions) -> int:
    """How many instructions of a step come after its microbatches."""
    backwards = enumerate(reversed(step))
    return next((n for n, action in backwards if isinstance(action, moving)), len(step))


def split_blocks(body: Instructions) -> tuple[Instructions, ...]:
    """Each compute with its transfers; every other instruction on its own."""
    starts = [0] + [
        index
        for index, (before, after) in enumerate(pairwise(body), start=1)
        if (type(before), type(after)) not in together
    ]
    return tuple(body[start:end] for start, end in pairwise([*starts, len(body)]))


def roll_blocks(blocks: tuple[Instructions, ...]) -> Instructions:
    """The instructions of the blocks, with loops in place of runs."""
    run = longest_run(blocks)
    if run is None:
        return tuple(chain.from_iterable(blocks))
    first = chain.from_iterable(blocks[run.start : run.start + run.length])
    loop = Loop(run.count, tuple(renumber(action, 0, run.stride) for action in first))
    before, after = blocks[: run.start], blocks[run.start + run.covered :]
    return (*roll_blocks(before), loop, *roll_blocks(after))


def renumber(action: Instruction, shift: int, stride: int = 0) -> Instruction:
    """The instruction for the microbatch `shift` further on, growing by `stride` in a loop."""
    if not isinstance(action, Compute | Wait | Send):
        return action
    microbatch = Microbatch(action.microbatch.offset + shift, stride)
    if isinstance(action, Compute):
        return Compute(replace(action.action, microbatch=microbatch.offset), microbatch)
    return replace(action, microbatch=microbatch)


def longest_run(blocks: tuple[Instructions, ...]) -> Run | None:
    """The run that covers most blocks; of equals the one of the shortest body, then the first."""
    shapes = number_shapes(blocks)
    best: Run | None = None
    for length in range(1, len(blocks) // 2 + 1):
        least = max(length, best.covered + 1 - length if best else 0)
        places = range(least - 1, len(blocks) - length, least)  # a better run has one of them
        if all(stride_between(shapes[i], shapes[i + length]) is None for i in places):
            continue
        for run in runs(shapes, length):
            if run.count > 1 and (best is None or run.covered > best.covered):
                best = run
    return best


def number_shapes(blocks: tuple[Instructions, ...]) -> list[Shape]:
    numbers: dict[Instructions, int] = {}
    shapes: list[Shape] = []
    for block in blocks:
        first = next((a.microbatch.offset for a in block if isinstance(a, Compute)), None)
        if first is None:
            shapes.append(None)
        else:
            structure = tuple(renumber(action, -first) for action in block)
            shapes.append((numbers.setdefault(structure, len(numbers)), first))
    return shapes


def runs(shapes: list[Shape], length: int) -> Iterator[Run]:
    """Every run whose bodies have so many blocks and which cannot be continued."""
    start = 0
    for stride, group in groupby(map(stride_between, shapes, shapes[length:])):
        matched = len(list(group))
        if stride is not None:
            yield Run(start, length, 1 + matched // length, stride)
        start += matched


def stride_between(one: Shape, other: Shape) -> int | None:
    """How much later the other block's microbatch is, if the blocks are equal apart from it."""
    if one is None or other is None or one[0] != other[0]:
        return None
    return other[1] - one[1]
