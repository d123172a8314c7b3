"""The order of a step's computes as text: loops, with bounds in terms of MICROBATCHES.

A number hangs on the number of microbatches if it grows with it; the program for more of them
tells. Where that program has other loops, as with fewer microbatches than stages, all numbers are
written out.
"""

from collections.abc import Callable, Iterator, Sequence

from ..ir.program import Compute, Instruction, Loop, Microbatch

Body = Sequence[Instruction]
Call = Callable[[Compute, str], str]
"""A compute and its microbatch as text -> the statement that runs it."""


def spell_sequence(
    body: Body, longer: Body, microbatches: int, more: int, call: Call
) -> Iterator[str]:
    """The computes of a body in order; `longer`: the body for so many microbatches more."""
    other = longer if grows_by(more, body, longer) else body
    for item, grown in zip(body, other, strict=True):
        if isinstance(item, Loop) and isinstance(grown, Loop):
            first, start, stop = bounds(item)
            _, grown_start, grown_stop = bounds(grown)
            said = [spell_number(stop, grown_stop, microbatches)]
            if start or first.stride != 1:
                said.insert(0, spell_number(start, grown_start, microbatches))
            said += [str(first.stride)] if first.stride != 1 else []
            yield f"for mb in range({', '.join(said)}):"
            for inner in item.body:
                if isinstance(inner, Compute):
                    yield f"    {call(inner, relative(inner.microbatch, first))}"
        elif isinstance(item, Compute) and isinstance(grown, Compute):
            number = spell_number(item.microbatch.offset, grown.microbatch.offset, microbatches)
            yield call(item, number)


def grows_by(more: int, body: Body, longer: Body) -> bool:
    """Whether two bodies differ only in numbers, each the same or so much more."""
    pairs = zip(numbers(body), numbers(longer), strict=False)
    return outline(body) == outline(longer) and all(b - a in (0, more) for a, b in pairs)


def numbers(body: Body) -> list[int]:
    """The numbers of a text, in order."""
    found: list[int] = []
    for item in body:
        if isinstance(item, Loop):
            found += bounds(item)[1:]
        elif isinstance(item, Compute):
            found.append(item.microbatch.offset)
    return found


def outline(body: Body) -> list[object]:
    """A text without its numbers."""
    found: list[object] = []
    for item in body:
        if isinstance(item, Loop):
            first = bounds(item)[0]
            inside = [i for i in item.body if isinstance(i, Compute)]
            calls = [(i.action.kind, relative(i.microbatch, first)) for i in inside]
            found.append((first.stride, calls))
        else:
            found.append(item.action.kind if isinstance(item, Compute) else type(item))
    return found


def bounds(loop: Loop) -> tuple[Microbatch, int, int]:
    """The microbatch of a loop's first compute, where it starts, and where it stops."""
    first = next(i for i in loop.body if isinstance(i, Compute)).microbatch
    return first, first.offset, first.offset + first.stride * int(loop.count)


def spell_number(number: int, grown: int, microbatches: int) -> str:
    """A number, or its distance from MICROBATCHES if it grows with that."""
    if grown == number:
        return str(number)
    left = microbatches - number
    return f"MICROBATCHES - {left}" if left else "MICROBATCHES"


def relative(microbatch: Microbatch, first: Microbatch) -> str:
    """A microbatch in terms of the loop variable, the first compute's microbatch."""
    offset = microbatch.offset - first.offset
    return "mb" if not offset else f"mb + {offset}" if offset > 0 else f"mb - {-offset}"
