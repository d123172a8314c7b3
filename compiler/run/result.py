"""How a run of the emitted scripts ended, whichever way it was launched."""

import signal
from dataclasses import dataclass
from typing import Self

from ..errors import RunError

TAIL_LINES = 30  # of a rank's output in an explanation


@dataclass(frozen=True, slots=True)
class Rank:
    """How one rank ended."""

    rank: int
    returncode: int | None
    """Negative: the signal that ended it. None: torchrun did not say."""
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class Result:
    """How all of them ended."""

    ranks: tuple[Rank, ...]
    seconds: float
    timed_out: bool
    first_failed: int | None
    """The rank that failed first, by itself; the others fail when they lose it."""
    launcher: str = ""
    """torchrun's own words."""

    @property
    def ok(self) -> bool:
        return not self.timed_out and all(rank.returncode == 0 for rank in self.ranks)

    def check(self) -> Self:
        """Itself, if all went well. Raises RunError with the explanation otherwise."""
        if not self.ok:
            raise RunError(self.explain())
        return self

    def explain(self) -> str:
        """What went wrong, and the last words of the first failing rank, or of all that hung."""
        count = f"{len(self.ranks)} ranks"
        if self.ok:
            return f"{count} done after {self.seconds:.1f} s"
        if self.first_failed is not None and not self.timed_out:
            first = self.ranks[self.first_failed]
            how = ending(first.returncode)
            return f"rank {first.rank} of {count} failed first, {how}\n{last_words(first)}"
        unfinished = [rank for rank in self.ranks if rank.returncode != 0]
        names = ", ".join(str(rank.rank) for rank in unfinished)
        heading = f"of {count}, not done after {self.seconds:.1f} s: {names}"
        words = [f"rank {rank.rank}:\n{last_words(rank)}" for rank in unfinished]
        return "\n".join([heading, *words, tail(self.launcher)]).rstrip()


def ending(returncode: int | None) -> str:
    """The return code in words."""
    if returncode is None or returncode >= 0:
        return f"exit code {returncode}"
    return f"ended by {signal.Signals(-returncode).name}"


def last_words(rank: Rank) -> str:
    """The end of what it wrote, its complaints if it had any."""
    return tail(rank.stderr or rank.stdout)


def tail(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-TAIL_LINES:])
