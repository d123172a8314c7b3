"""1F1B: one forward, one backward (PipeDream-Flush, Narayanan et al. 2021, arXiv 2006.09503)."""

from ...ir.schedule import Action, Kind


def one_f_one_b(stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    """F0 F1 .. B0 F2 B1 F3 B2 .. B3 on stage 0 of 2 with four microbatches.

    The warm-up is one forward for each later stage, or all forwards where these are fewer; then
    forwards and backwards alternate until the forwards are used up. At most `stages - stage`
    microbatches are live. Ranks idle as long as under GPipe.
    """
    warmup = min(microbatches, stages - 1 - stage)
    forwards = [Action(stage, Kind.F, m) for m in range(microbatches)]
    backwards = [Action(stage, Kind.B, m) for m in range(microbatches)]
    steady = zip(forwards[warmup:], backwards, strict=False)
    drain = backwards[microbatches - warmup :]
    return (*forwards[:warmup], *(action for pair in steady for action in pair), *drain)
