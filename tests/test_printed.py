"""Fixture pairs of the passes from graph to schedule: passes/segment.txt, place.txt, order.txt."""

import pytest
from graphs import make_spec
from printed import fixture_pairs, parse_graph, parse_plan

from ppc.analysis.cost import price
from ppc.analysis.invariants.graph import verify_graph
from ppc.analysis.invariants.plan import verify_plan
from ppc.analysis.invariants.schedule import verify_schedule
from ppc.ir.show import show_form, show_layer
from ppc.passes.order import order
from ppc.passes.place import place
from ppc.passes.segment import segment

segment_pairs, place_pairs, order_pairs = map(fixture_pairs, ("segment", "place", "order"))


@pytest.mark.parametrize("title", segment_pairs)
def test_segment(title: str) -> None:
    before, after = segment_pairs[title]
    graph = parse_graph(before)
    assert str(graph) == before
    graph = segment(graph)
    verify_graph(graph)
    assert "".join(map(show_layer, graph.layers)) == after


@pytest.mark.parametrize("title", place_pairs)
def test_place(title: str) -> None:
    """The first line has stages and microbatches, of 2 samples."""
    before, after = place_pairs[title]
    first, _, text = before.partition("\n")
    stages, microbatches = (int(word) for word in first.split() if word.isdigit())
    graph = segment(parse_graph(text))
    spec = make_spec(stages, microbatches, global_batch=2 * microbatches)
    plan = place(graph, price(graph, spec), spec)
    verify_plan(plan, graph, spec)
    assert show_form(plan) == after


@pytest.mark.parametrize("title", order_pairs)
def test_order(title: str) -> None:
    before, after = order_pairs[title]
    kind, _, text = before.partition("\n")
    plan = parse_plan(text)
    schedule = order(plan, kind)
    verify_schedule(schedule, plan)
    assert str(schedule) == after
