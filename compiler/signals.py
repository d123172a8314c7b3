"""The signals that end a process, as exceptions: what it holds is let go on the way out."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

ending = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Ended(BaseException):
    """A signal asks the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within, these signals raise Ended, as Ctrl-C raises KeyboardInterrupt: by default they would
    leave running ranks and scratch folders behind. One that is ignored, as by nohup, stays so."""

    def end(number: int, _: object) -> None:
        raise Ended(number)

    ours = [number for number in ending if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
