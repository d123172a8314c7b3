"""Hypothesis strategies for forms, and the plainest forms to write tests with."""

from typing import NamedTuple

from hypothesis import strategies as st

from ppc.ir.graph import Dim, TensorMeta
from ppc.ir.plan import Mesh, Plan, Stage
from ppc.ir.program import Program
from ppc.ir.schedule import Schedule
from ppc.ir.unit import Held, Transfer, Unit
from ppc.passes.communicate import communicate
from ppc.passes.order import order

meta = TensorMeta((Dim(), 8), "float32", requires_grad=True)
kinds = st.sampled_from(["gpipe", "1f1b"])


class Pipeline(NamedTuple):
    """All that the passes behind `localize` start from."""

    plan: Plan
    units: tuple[Unit, ...]
    clip: bool

    def order(self, kind: str) -> Schedule:
        return order(self.plan, kind)

    def programs(self, kind: str) -> tuple[Program, ...]:
        return communicate(self.plan, self.units, self.order(kind), clip=self.clip)


def make_pipeline(
    stages: int,
    microbatches: int,
    *,
    skips: tuple[tuple[int, int], ...] = (),
    tied: tuple[Held, ...] = (),
    transfers: tuple[Transfer, ...] | None = None,
    ranks: tuple[int, ...] | None = None,
    clip: bool = False,
    replicas: int = 1,
) -> Pipeline:
    """A stage on each rank, one value from each stage to the next, and one for each skip.

    With replicas, all of a stage's ranks follow each other.
    """
    places = [range(r * replicas, (r + 1) * replicas) for r in ranks or range(stages)]
    axes = (("data", replicas),) if replicas > 1 else ()
    plan = Plan(
        stages=tuple(Stage(i, (i,), Mesh(axes, tuple(places[i]))) for i in range(stages)),
        placements={},
        global_batch=2 * microbatches * replicas,
        microbatches=microbatches,
        even=True,
    )
    if transfers is None:
        pairs = [(s, s + 1) for s in range(stages - 1)] + list(skips)
        transfers = tuple(Transfer(f"x{s}{t}", s, t, meta, gradient=True) for s, t in pairs)
    units = tuple(
        Unit(
            stage=s,
            rank=rank,
            ops=(),
            values={},
            inputs=(),
            receives=tuple(t for t in transfers if t.target == s),
            sends=tuple(t for t in transfers if t.source == s),
            state=tuple(held for held in tied if s in held.stages),
            outputs=(("loss", "loss"),) if s == stages - 1 else (),
        )
        for s in range(stages)
        for rank in places[s]
    )
    return Pipeline(plan, units, clip)


@st.composite
def pipelines(draw: st.DrawFn, *, min_stages: int = 1, frozen: bool = True) -> Pipeline:
    """Up to 6 stages on shuffled ranks, 3 replicas, 12 microbatches, skips, tied parameters; the
    first stages may be frozen."""
    stages = draw(st.integers(min_stages, 6))
    thawed = draw(st.integers(0, stages - 1)) if frozen else 0
    distant = [(s, t) for s in range(stages) for t in range(s + 2, stages)]
    skips = draw(st.lists(st.sampled_from(distant), unique=True)) if distant else []
    transfers = []
    for s, t in [(s, s + 1) for s in range(stages - 1)] + skips:
        for i in range(draw(st.integers(1, 2))):
            # The first value of a pair of neighbours carries the gradient of the whole chain.
            gradient = s >= thawed and ((i == 0 and t == s + 1) or draw(st.booleans()))
            transfers.append(Transfer(f"x{s}{t}{i}", s, t, meta, gradient))
    holders = st.sets(st.integers(0, stages - 1), min_size=1)
    tied = tuple(
        Held(f"w{i}", f"w{i}", (), tuple(sorted(draw(holders))), trainable=draw(st.booleans()))
        for i in range(draw(st.integers(0, 3)))
    )
    return make_pipeline(
        stages,
        draw(st.integers(1, 12)),
        tied=tied,
        transfers=tuple(transfers),
        ranks=tuple(draw(st.permutations(range(stages)))),
        clip=draw(st.booleans()),
        replicas=draw(st.integers(1, 3)),
    )
