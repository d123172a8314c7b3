"""predict: what a step should cost, on a clock of the plan's own costs."""

from dataclasses import replace

import pytest
from graphs import gpt, make_spec, mlp

from ppc.analysis.cost import Costs, price
from ppc.analysis.predict import predict
from ppc.ir.graph import Graph
from ppc.ir.report import Report
from ppc.ir.spec import Spec
from ppc.passes.communicate import communicate
from ppc.passes.localize import localize
from ppc.passes.order import order
from ppc.passes.place.assemble import assemble
from ppc.passes.segment import segment


def predicted(graph: Graph, spec: Spec, *starts: int, clip: bool = False) -> tuple[Report, Costs]:
    """The report of stages that begin at these layers."""
    graph = segment(graph)
    costs = price(graph, spec)
    plan = assemble(graph, costs, spec, starts)
    schedule = order(plan, spec.parallel.schedule)
    programs = communicate(plan, localize(graph, plan), schedule, clip=clip)
    return predict(graph, plan, schedule, programs, costs, spec, ()), costs


def test_one_stage_takes_the_time_of_its_layers() -> None:
    report, costs = predicted(mlp([64] * 5), make_spec(1, 4), 0)
    assert report.makespan_s == pytest.approx(4 * sum(costs.layer_s))
    assert (report.bubble, report.live) == (pytest.approx(0), (1,))


def test_a_step_of_two_stages_has_its_messages_and_its_bubble() -> None:
    """F, message, F B, message, B of the one microbatch, each stage waiting for the other."""
    report, costs = predicted(mlp([64] * 3), make_spec(2, 1), 0, 1)
    message = costs.message_s(0, 1, 8 * 4 * 64)
    assert report.makespan_s == pytest.approx(sum(costs.layer_s) + 2 * message)


def test_a_tied_weight_lengthens_the_step_by_the_sum_of_its_gradient() -> None:
    """The layers cost the same, tied or not: what is added is one all-reduce of the table."""
    spec = make_spec(3)
    last = len(segment(gpt()).layers) - 1
    apart, costs = predicted(gpt(), spec, 0, 2, last)
    tied, _ = predicted(gpt(tied=True), spec, 0, 2, last)
    added = costs.all_reduce_s((0, 2), 4 * 64 * 32)
    assert added > 1e-5
    assert tied.makespan_s - apart.makespan_s == pytest.approx(added)
    assert tied.cost["idle"] - apart.cost["idle"] == pytest.approx(added)


@pytest.mark.parametrize(("precision", "num_bytes"), [("fp32", 4), ("fp64", 8)])
def test_clipping_lengthens_the_step_by_the_norm_of_all(precision: str, num_bytes: int) -> None:
    spec = make_spec(2)
    spec = replace(spec, train=replace(spec.train, precision=precision))
    plain, costs = predicted(mlp([64] * 3), spec, 0, 1)
    clipped, _ = predicted(mlp([64] * 3), spec, 0, 1, clip=True)
    added = costs.all_reduce_s((0, 1), num_bytes)
    assert clipped.makespan_s - plain.makespan_s == pytest.approx(added, rel=1e-6)
