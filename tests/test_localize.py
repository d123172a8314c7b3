"""localize: what a stage computes, holds, receives and sends."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from graphs import BATCH, Builder, gpt
from printed import fixture_pairs, parse_graph

from ppc.analysis.invariants.graph import verify_graph
from ppc.analysis.invariants.unit import verify_units
from ppc.errors import PlanError
from ppc.ir.graph import Graph, Ref, State
from ppc.ir.plan import Mesh, Plan, Stage
from ppc.ir.show import show_form
from ppc.ir.unit import Unit
from ppc.passes.localize import localize
from ppc.passes.place.assemble import placements
from ppc.passes.segment import segment

fixtures = fixture_pairs("localize")


def cut(graph: Graph, *starts: str) -> tuple[Graph, Plan]:
    """The graph with its layers, and a plan whose stages begin at its first layer and at these."""
    graph = graph if graph.layers else segment(graph)
    verify_graph(graph)
    paths = [layer.path for layer in graph.layers]
    firsts = [0, *map(paths.index, starts), len(paths)]
    stages = tuple(
        Stage(index, tuple(range(first, stop)), Mesh((), (index,)))
        for index, (first, stop) in enumerate(pairwise(firsts))
    )
    return graph, Plan(stages, placements(graph, stages), 4, 2, even=True)


def units_of(graph: Graph, *starts: str) -> tuple[Unit, ...]:
    """Verified."""
    graph, plan = cut(graph, *starts)
    units = localize(graph, plan)
    verify_units(units, graph, plan)
    return units


def moved(units: Sequence[Unit]) -> list[tuple[str, int, int, bool]]:
    """All transfers: value, from, to, gradient back."""
    return [(t.value, t.source, t.target, t.gradient) for unit in units for t in unit.receives]


def targets(unit: Unit, *, sunk: bool | None = None) -> list[str]:
    """What a unit runs; with `sunk`, only what is sunk, or is not."""
    return [
        op.target.split(".")[1] for op in unit.ops if sunk is None or (op.name in unit.sunk) == sunk
    ]


@pytest.mark.parametrize("title", fixtures)
def test_fixture(title: str) -> None:
    before, after = fixtures[title]
    cuts, _, text = before.partition("\n")
    starts = cuts.removeprefix("stages begin at ").split(", ")
    assert show_form(units_of(parse_graph(text), *starts)) == after


def chain(b: Builder, x: Ref, *paths: str) -> Ref:
    for path in paths:
        x = b.linear(path, x, 8, 8)
    return x


def test_a_mask_is_computed_again_where_it_is_used() -> None:
    """Its op is in stage 0, the only reader in stage 1: so it runs there, and there alone."""
    b = Builder()
    x, tokens = b.input("x", 8), b.input("tokens", 8, dtype="int64")
    mask = b.op("gt", tokens, 0, dtype="bool")
    x = b.op("masked_fill", chain(b, x, "a", "c"), mask, 0.0, call="c")
    units = units_of(b.graph(x), "c")
    assert moved(units) == [("v1", 0, 1, True)]
    assert [targets(unit) for unit in units] == [["linear"], ["gt", "linear", "masked_fill"]]
    assert targets(units[1], sunk=True) == ["gt"]
    assert [[i.name for i in unit.inputs] for unit in units] == [["x"], ["tokens"]]


def test_a_mask_that_both_stages_read_runs_in_both() -> None:
    b = Builder()
    x, tokens = b.input("x", 8), b.input("tokens", 8, dtype="int64")
    mask = b.op("gt", tokens, 0, dtype="bool")
    for path in ("a", "c"):
        x = b.op("masked_fill", chain(b, x, path), mask, 0.0, call=path)
    units = units_of(b.graph(x), "c")
    assert [targets(unit) for unit in units] == [["gt", "linear", "masked_fill"]] * 2
    assert [unit.sunk for unit in units] == [frozenset(), {mask.name}]


def test_what_is_written_into_a_sunk_value_is_sunk_too() -> None:
    """Shifted labels of T5 and Whisper: without the copy_ the loss is wrong, silently."""
    b = Builder()
    x, labels = b.input("x", 8), b.input("labels", 8)
    shifted = b.op("zeros", 8, shape=(BATCH, 8))
    part = b.op("slice", shifted, 1, shape=(BATCH, 7), views=[shifted.name])
    b.op("copy_", part, labels, views=[part.name], mutates=[part.name])
    x = b.op("add", chain(b, x, "a", "c"), shifted, call="c")
    units = units_of(b.graph(x), "c")
    assert targets(units[0]) == ["linear"]
    assert targets(units[1], sunk=True) == ["zeros", "slice", "copy_"]


def test_a_buffer_backed_table_is_held_where_it_is_used() -> None:
    b = Builder()
    x, positions = b.input("x", 8), b.input("positions", dtype="int64")
    rotary = b.op("index", b.parameter("rotary", 64, 8, buffer=True), positions, shape=(BATCH, 8))
    for path in ("a", "c", "d"):
        x = b.op("mul", chain(b, x, path), rotary, call=path)
    units = units_of(b.graph(x), "c", "d")
    assert [targets(unit) for unit in units] == [["index", "linear", "mul"]] * 3
    assert ["rotary" in [held.fqn for held in unit.state] for unit in units] == [True] * 3
    assert [value for value, *_ in moved(units)] == ["v2", "v4"]  # the two products


def test_a_value_behind_a_parameter_is_sent_to_each_stage_that_reads_it() -> None:
    """The position bias of T5: made once by stage 0, read by every later layer."""
    b = Builder()
    x, positions = b.input("x", 8), b.input("positions", dtype="int64")
    table = b.parameter("bias.weight", 64, 8)
    b.module("bias", "Embedding", leaf=True)
    bias = b.op("embedding", table, positions, call="bias", shape=(BATCH, 8))
    for path in ("a", "c", "d"):
        x = b.op("add", chain(b, x, path), bias, call=path)
    units = units_of(b.graph(x), "c", "d")
    assert moved(units) == [
        (bias.name, 0, 1, True),
        ("v2", 0, 1, True),
        (bias.name, 0, 2, True),
        ("v4", 1, 2, True),
    ]
    assert not any(unit.sunk for unit in units)
    assert [held.fqn for held in units[0].state] == ["bias.weight", "a.weight"]


def test_a_value_that_skips_a_stage_goes_directly() -> None:
    b = Builder()
    skip = chain(b, b.input("x", 8), "a")
    x = chain(b, skip, "c")
    units = units_of(b.graph(b.op("add", chain(b, x, "d"), skip, call="d")), "c", "d")
    assert moved(units) == [
        (skip.name, 0, 1, True),
        (skip.name, 0, 2, True),
        (x.name, 1, 2, True),
    ]


def stacked(*, transposed_twice: bool = False) -> tuple[Builder, Ref, Ref]:
    """DLRM's product of a stack of embeddings with its transpose."""
    b = Builder()
    x = chain(b, b.input("x", 8), "a")
    stack = b.op("unsqueeze_copy", x, shape=(BATCH, 2, 4), call="a")
    view = b.op("transpose", stack, 1, 2, shape=(BATCH, 4, 2), views=[stack.name], call="a")
    if transposed_twice:
        view = b.op("view", view, shape=(BATCH, 8), views=[view.name], call="a")
    b.module("top", "Top", leaf=True)
    weight = b.parameter("top.weight", 8)
    b.op("bmm", stack, view, weight, call="top", shape=(BATCH, 2, 2), flops=64)
    return b, stack, view


def test_a_view_of_what_is_sent_is_taken_again() -> None:
    b, stack, view = stacked()
    units = units_of(b.graph(Ref("v3")), "top")
    assert moved(units) == [(stack.name, 0, 1, True)]
    assert targets(units[1]) == ["transpose", "bmm"]
    assert units[1].sunk == {view.name}
    assert targets(units[0]) == ["linear", "unsqueeze_copy", "transpose"]


def test_a_view_of_such_a_view_is_taken_again() -> None:
    """Both are read, so both were to be sent; in whichever order they are looked at."""
    b, stack, view = stacked(transposed_twice=True)
    b.op("add", Ref("v4"), b.op("mul", Ref("v2"), view, call="top"), call="top")
    units = units_of(b.graph(Ref("v6")), "top")
    assert moved(units) == [(stack.name, 0, 1, True)]
    assert units[1].sunk == {"v2", "v3"}


def test_a_view_of_a_part_is_sent_by_itself() -> None:
    """Nobody else reads the whole, which has more bytes."""
    b = Builder()
    x = chain(b, b.input("x", 8), "a")
    part = b.op("slice", x, 0, shape=(BATCH, 4), views=[x.name], call="a")
    units = units_of(b.graph(b.linear("c", part, 4, 8)), "c")
    assert moved(units) == [(part.name, 0, 1, True)]


@pytest.mark.parametrize("dtype", ["bool", "int64"])
def test_no_gradient_comes_back_to_a_mask_that_is_sent(dtype: str) -> None:
    """Whole numbers that a parameter is behind, such as the experts that a router chose."""
    b = Builder()
    x = chain(b, b.input("x", 8), "a")
    chosen = b.op("topk", x, dtype=dtype, call="a")
    units = units_of(b.graph(b.op("where", chain(b, x, "c"), chosen, call="c")), "c")
    assert moved(units) == [("v0", 0, 1, True), (chosen.name, 0, 1, False)]


def test_no_gradient_comes_back_from_where_none_is_wanted() -> None:
    """Stage 1 only counts what it takes from the first value: it leads to no loss."""
    b = Builder()
    x = chain(b, b.input("x", 8), "a")
    y = b.op("exp", x, call="a")
    count = b.op("argmax", b.op("neg", y, call="c"), dtype="int64", call="c")
    units = units_of(b.graph(b.op("take", chain(b, x, "c"), count, call="c")), "c")
    assert moved(units) == [("v0", 0, 1, True), (y.name, 0, 1, False)]


def test_the_gradient_of_what_is_written_in_place_comes_back() -> None:
    """`out[:, :4] = h`: nobody reads the view that is written, only `out`."""
    b = Builder()
    h = chain(b, b.input("x", 8), "a")
    b.module("c", "Linear", leaf=True)
    out = b.op("zeros", 8, shape=(BATCH, 16), call="part")
    part = b.op("slice", out, shape=(BATCH, 8), views=[out.name], call="part")
    b.op("copy_", part, h, views=[part.name], mutates=[part.name], call="part")
    for name in (out.name, part.name):  # as capture finds it, after all has run
        b.values[name] = replace(b.values[name], requires_grad=True)
    units = units_of(b.graph(b.linear("c", out, 16, 1)), "part")
    assert moved(units) == [(h.name, 0, 1, True)]
    assert all(unit.has_backward for unit in units)


def test_random_ops_are_never_computed_again() -> None:
    b = Builder()
    x, y = b.input("x", 8), b.input("y", 8)
    noise = b.op("rand_like", y, random=True)
    for path in ("a", "c"):
        x = b.op("add", chain(b, x, path), noise, call=path)
    units = units_of(b.graph(x), "c")
    assert (noise.name, 0, 1, False) in moved(units)
    assert targets(units[1]) == ["linear", "add"]
    assert [unit.seeds for unit in units] == [((noise.name, ""),), ()]


def test_tied_names_belong_to_the_stages_that_read_them() -> None:
    first, middle, last = units_of(gpt(4, tied=True), "blocks.1", "ln_f")
    held = [{h.fqn: h for h in unit.state} for unit in (first, middle, last)]
    assert (held[0]["wte.weight"].canonical, held[0]["wte.weight"].aliases) == ("wte.weight", ())
    assert (held[2]["head.weight"].canonical, held[2]["head.weight"].aliases) == ("wte.weight", ())
    assert held[0]["wte.weight"].stages == held[2]["head.weight"].stages == (0, 2)
    assert not {"wte.weight", "head.weight"} & set(held[1])


def test_a_name_that_nothing_reads_is_saved_by_the_first_stage() -> None:
    b = Builder()
    b.parameter("a.weight", 8, 8, aliases=["lost.weight", "d.weight"])
    b.module("d", "Linear", leaf=True)
    x = chain(b, b.input("x", 8), "a", "c")
    x = b.op("linear", x, State("d.weight"), call="d", flops=128)
    first, second = units_of(b.graph(x), "d")
    assert [(h.fqn, h.aliases) for h in first.state] == [
        ("a.weight", ("lost.weight",)),
        ("c.weight", ()),
    ]
    assert [(h.fqn, h.aliases) for h in second.state] == [("d.weight", ())]


def test_a_frozen_beginning_has_no_backward() -> None:
    b = Builder()
    b.parameter("a.weight", 8, 8, trainable=False)
    units = units_of(b.graph(chain(b, b.input("x", 8), "a", "c", "d")), "c", "d")
    assert [unit.has_backward for unit in units] == [False, True, True]
    assert [gradient for *_, gradient in moved(units)] == [False, True]


def test_a_frozen_middle_passes_the_gradient_on() -> None:
    b = Builder()
    b.parameter("c.weight", 8, 8, trainable=False)
    units = units_of(b.graph(chain(b, b.input("x", 8), "a", "c", "d")), "c", "d")
    assert [unit.has_backward for unit in units] == [True, True, True]


def test_a_backward_needs_a_gradient_and_something_to_train() -> None:
    """Stage 0 could train a, which leads to whole numbers only; stage 1 has nothing to train."""
    b = Builder()
    b.parameter("c.weight", 8, 8, trainable=False)
    chosen = b.op("topk", chain(b, b.input("x", 8), "a"), dtype="int64", call="a")
    b.module("c", "Embedding", leaf=True)
    x = b.op("embedding", State("c.weight"), chosen, call="c", shape=(BATCH, 8))
    units = units_of(b.graph(x), "c")
    assert [any(held.trainable for held in unit.state) for unit in units] == [True, False]
    assert [unit.has_backward for unit in units] == [False, False]


def test_a_stage_that_makes_nothing_is_refused() -> None:
    b = Builder()
    x = b.op("exp", b.input("x", 8), call="norm")
    b.module("norm", "Norm", leaf=True)
    graph, plan = cut(b.graph(chain(b, x, "a")), "a")
    with pytest.raises(PlanError, match="stage 0 makes nothing"):
        localize(graph, plan)
