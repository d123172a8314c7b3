"""Where a step's transfers stand, as the text takes for granted: checked before it is written.

Every compute stands between its own waits and sends, and each edge's receives are posted so many
ahead: what forward, backward and Edge do.
"""

from collections.abc import Iterator, Sequence

from ..errors import InternalError
from ..ir.program import Compute, Flush, Instruction, Loop, Post, Program, Send, Wait
from ..ir.schedule import Kind
from .messages import incoming, outgoing


def check_pattern(program: Program, body: Sequence[Instruction]) -> None:
    """Raises InternalError where a step's body has another pattern."""
    flat = tuple(flatten(body))
    waits: list[str] = []
    for i, item in enumerate(flat):
        if isinstance(item, Wait):
            waits.append(item.edge)
            if not (i and flat[i - 1] == Post(item.edge)):
                raise InternalError(f"rank {program.rank}: {item} without a Post before it")
        elif isinstance(item, Compute):
            kind = "activations" if item.action.kind is Kind.F else "gradients"
            sends = [s.edge for s in leading_sends(flat[i + 1 :])]
            expected = (
                [e.name for e in incoming(program, kind)],
                [e.name for e in outgoing(program, kind)],
            )
            if (waits, sends) != expected:
                raise InternalError(
                    f"rank {program.rank}: {item}: {waits}, {sends}, not {expected}"
                )
            waits = []
        elif isinstance(item, Flush) and waits:
            raise InternalError(f"rank {program.rank}: waits {waits} without a compute")


def leading_sends(items: Sequence[Instruction]) -> Iterator[Send]:
    for item in items:
        if not isinstance(item, Send):
            return
        yield item


def flatten(body: Sequence[Instruction]) -> Iterator[Instruction]:
    """Instructions with loops' bodies once."""
    for item in body:
        if isinstance(item, Loop):
            yield from flatten(item.body)
        else:
            yield item
