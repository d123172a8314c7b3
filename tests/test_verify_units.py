"""Units that break a promise are refused, by name of what is wrong."""

from dataclasses import replace
from typing import Any

import pytest
from graphs import BATCH, Builder
from test_localize import cut

from ppc.analysis.invariants.unit import verify_units
from ppc.errors import InternalError
from ppc.ir.graph import Graph, TensorMeta
from ppc.ir.plan import Mesh
from ppc.ir.unit import Transfer, Unit
from ppc.passes.localize import localize

Units = tuple[Unit, ...]


def three_stages() -> Graph:
    """Stages a, c, d: each later one reads labels that it shifts itself, a view that it takes
    itself, noise that stage 0 drew, and what the stage before made."""
    b = Builder()
    x, labels = b.input("x", 8), b.input("labels", 8)
    shifted = b.op("zeros", 8, shape=(BATCH, 8))  # v0
    part = b.op("slice", shifted, 1, shape=(BATCH, 7), views=[shifted.name])  # v1
    b.op("copy_", part, labels, views=[part.name], mutates=[part.name])  # v2
    noise = b.op("rand_like", x, random=True)  # v3
    first = x = b.linear("a", x, 8, 8)  # v4
    view = b.op("view", x, shape=(BATCH, 2, 4), views=[x.name], call="a")  # v5
    for path in ("c", "d"):
        x = b.linear(path, x, 8, 8)  # v6, v8
        x = b.op("join", x, first, view, noise, shifted, call=path)  # v7, v9
    return b.graph(x)


graph, plan = cut(three_stages(), "c", "d")
units = localize(graph, plan)
ops = {op.name: op for op in graph.ops}


def changed(stage: int, **changes: Any) -> Units:
    """The units, one of them changed."""
    return tuple(replace(u, **changes) if u.stage == stage else u for u in units)


def with_ops(stage: int, *names: str, sunk: tuple[str, ...] | None = None) -> Units:
    """The units, one of which runs these ops."""
    more = {} if sunk is None else {"sunk": frozenset(sunk)}
    values = units[stage].values | {name: graph.values[name] for name in names}
    return changed(stage, ops=tuple(ops[name] for name in names), values=values, **more)


def without(stage: int, name: str) -> Units:
    """The units, one of which does not run an op."""
    names = [op.name for op in units[stage].ops if op.name != name]
    return with_ops(stage, *names, sunk=tuple(units[stage].sunk - {name}))


def moved(value: str, at: int, **changes: Any) -> Units:
    """The units, the transfer of a value to stage `at` changed at both of its ends."""

    def change(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return tuple(
            replace(t, **changes) if (t.value, t.target) == (value, at) else t for t in transfers
        )

    return tuple(replace(u, receives=change(u.receives), sends=change(u.sends)) for u in units)


def refused(wrong: Units, message: str) -> None:
    with pytest.raises(InternalError) as caught:
        verify_units(wrong, graph, plan)
    assert message in str(caught.value)


def test_the_example_is_good_and_has_all_that_is_broken_below() -> None:
    verify_units(units, graph, plan)
    assert [[op.name for op in unit.ops] for unit in units] == [
        ["v3", "v4", "v5"],
        ["v0", "v1", "v2", "v5", "v6", "v7"],
        ["v0", "v1", "v2", "v5", "v8", "v9"],
    ]
    assert [(t.value, t.source, t.gradient) for t in units[2].receives] == [
        ("v3", 0, False),
        ("v4", 0, True),
        ("v7", 1, True),
    ]


shift = ("v0", "v1", "v2")
faults = {
    "the units are not the plan's stages and ranks": units[:2],
    "stage 1 runs an op that the graph does not have": changed(
        1, ops=(*units[1].ops, replace(ops["v6"], target="aten.addmm.default"))
    ),
    "stage 1 does not run its ops in the graph's order": changed(1, ops=units[1].ops[::-1]),
    "in the graph's order, each once": changed(1, ops=(*units[1].ops, units[1].ops[-1])),
    "stage 1 calls ops sunk that are its own": changed(1, sunk=units[1].sunk | {"v6"}),
    "or does not name all that are": changed(1, sunk=frozenset(shift)),
    "stage 1 does not run its own op v7": without(1, "v7"),
    "stage 0 does not run its own op v3": without(0, "v3"),
    "stage 1 computes v3 again, which is not the same twice": with_ops(
        1, *shift, "v3", "v5", "v6", "v7", sunk=(*shift, "v3", "v5")
    ),
    "stage 1 computes v4 again, which is not the same twice": with_ops(
        1, *shift, "v4", "v5", "v6", "v7", sunk=(*shift, "v4", "v5")
    ),
    "stage 1 makes what v2 writes to, and does not run it": without(1, "v2"),
    "stage 2: v8 reads v7, which is not there yet": changed(2, receives=units[2].receives[:2]),
    "stage 2: v2 reads labels, which is not there yet": changed(2, inputs=()),
    "stage 1: v7 reads v0, which is not there yet": with_ops(1, "v5", "v6", "v7", sunk=("v5",)),
    "stage 1: v6 reads c.weight, which is not there": changed(1, state=()),
    "stage 1 gives v4, which it does not make": changed(
        1, sends=(replace(units[1].sends[0], value="v4"),)
    ),
    "stage 1 gives v9, which it does not make": changed(1, outputs=(("loss", "v9"),)),
    "transfers have other than two ends: v7": changed(1, sends=()),
    "transfers have other than two ends: v3": changed(0, sends=2 * units[0].sends),
    "stage 1 -> 2, gradient back does not go from the stage that makes it": moved(
        "v4", 2, source=1
    ),
    "is not of the value's shape and dtype": moved(
        "v7", 2, meta=TensorMeta((8, BATCH), "float32", True)
    ),
    "stage 1 receives what goes to another": moved("v4", 1, target=3),
    "the gradient of v4: f32[batch, 8] stage 0 -> 2 does not come back": moved(
        "v4", 2, gradient=False
    ),
    "the gradient of v7: f32[batch, 8] stage 1 -> 2 does not come back": moved(
        "v7", 2, gradient=False
    ),
    "the gradient of v3: f32[batch, 8] stage 0 -> 1, gradient back comes back but": moved(
        "v3", 1, gradient=True
    ),
    "the outputs given are [('loss', 'v9'), ('loss', 'v9')], not": changed(
        2, outputs=2 * units[2].outputs
    ),
}


@pytest.mark.parametrize("message", faults)
def test_a_fault_is_named(message: str) -> None:
    refused(faults[message], message)


def test_replicas_hold_the_same() -> None:
    twice = replace(
        plan,
        stages=tuple(
            replace(s, mesh=Mesh((("data", 2),), (2 * s.index, 2 * s.index + 1)))
            for s in plan.stages
        ),
    )
    good = localize(graph, twice)
    verify_units(good, graph, twice)
    assert [unit.rank for unit in good] == [*range(6)]
    wrong = tuple(replace(u, state=()) if u.rank == 3 else u for u in good)
    with pytest.raises(InternalError, match="rank 3 does not hold what rank 2 does"):
        verify_units(wrong, graph, twice)


def test_the_error_shows_both_forms() -> None:
    with pytest.raises(InternalError) as caught:
        verify_units(units[:2], graph, plan)
    assert "localize" in str(caught.value)


def test_the_gradient_of_what_is_written_in_place_is_asked_for() -> None:
    """`out[:] = h; y = out`: the value that is read has no op between it and `h`."""
    b = Builder()
    h = b.linear("a", b.input("x", 8), 8, 8)
    out = b.op("zeros", 8, shape=(BATCH, 8), call="c")
    part = b.op("slice", out, shape=(BATCH, 8), views=[out.name], call="c")
    b.op("copy_", part, h, views=[part.name], mutates=[part.name], call="c")
    for name in (out.name, part.name):
        b.values[name] = replace(b.values[name], requires_grad=True)
    written, cuts = cut(b.graph(b.op("mul", out, b.parameter("scale", 8), call="c")), "c")
    good = localize(written, cuts)
    verify_units(good, written, cuts)
    wrong = tuple(
        replace(
            unit,
            sends=tuple(replace(t, gradient=False) for t in unit.sends),
            receives=tuple(replace(t, gradient=False) for t in unit.receives),
        )
        for unit in good
    )
    with pytest.raises(InternalError, match="does not come back"):
        verify_units(wrong, written, cuts)
