"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""

from ...ir.schedule import Action, Kind


def gpipe(stage: int, _stages: int, microbatches: int) -> tuple[Action, ...]:
    """F0 F1 F2 F3 B0 B1 B2 B3, the same on every stage.

    Every microbatch is live between the two halves. A rank idles for as many forwards and
    backwards a step as there are other stages.
    """
    return tuple(Action(stage, kind, m) for kind in (Kind.F, Kind.B) for m in range(microbatches))
