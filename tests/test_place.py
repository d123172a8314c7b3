"""place: whole plans."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from graphs import gpt, make_spec, mlp

from ppc.analysis.cost import price
from ppc.analysis.invariants.plan import verify_plan
from ppc.analysis.memory import measure_memory
from ppc.analysis.predict import step_s
from ppc.errors import InternalError
from ppc.ir.graph import Graph
from ppc.ir.plan import Mesh, Plan
from ppc.ir.spec import Random, Spec, Text
from ppc.passes.communicate import communicate
from ppc.passes.localize import localize
from ppc.passes.order import order
from ppc.passes.place import place
from ppc.passes.place.assemble import assemble
from ppc.passes.segment import segment
from ppc.pipeline import runners_up


def planned(graph: Graph, spec: Spec) -> Plan:
    plan = place(graph, price(graph, spec), spec)
    verify_plan(plan, graph, spec)
    return plan


def blocks(graph: Graph, plan: Plan) -> list[int]:
    """Whole blocks by stage."""
    return [
        sum(graph.layers[layer].path.startswith("blocks.") for layer in stage.layers)
        for stage in plan.stages
    ]


@pytest.mark.parametrize("stages", [2, 3])
def test_c22_seven_blocks_are_placed_once_each(stages: int) -> None:
    """C22: 30 layers on 4 stages built 28 of them, silently."""
    graph = segment(gpt(7))
    plan = planned(graph, make_spec(stages))
    assert [layer for stage in plan.stages for layer in stage.layers] == list(range(11))
    assert sum(blocks(graph, plan)) == 7
    assert max(blocks(graph, plan)) - min(blocks(graph, plan)) <= 1
    assert set(plan.placements) == set(graph.parameters)
    held = {
        fqn
        for stage in plan.stages
        for layer in stage.layers
        for fqn in graph.layers[layer].parameters
    }
    assert held == set(graph.parameters)


def test_c23_embedding_and_head_count() -> None:
    """C23: with a vocabulary of 50k the stages at the ends get fewer blocks."""
    graph = segment(gpt(6, width=256, vocab=50_000, time=64))
    plan = planned(graph, make_spec(3, microbatches=8))
    first, middle, last = blocks(graph, plan)
    assert (first + middle + last, last) == (6, 0)
    assert first < middle
    times = [stage.time_s for stage in plan.stages]
    even = planned(graph, make_spec(3, microbatches=8, cuts=("blocks.2", "blocks.4")))
    assert max(times) < max(stage.time_s for stage in even.stages)
    memory = measure_memory(graph, plan, make_spec(3, microbatches=8))
    table = 4 * 50_000 * 256
    assert memory[0].parameters > table == memory[2].parameters > memory[1].parameters


def test_c58_neighbours_are_on_one_node_where_they_can_be() -> None:
    """C58: 8 stages on 2 nodes of 4 have one edge between the nodes."""
    graph, spec = segment(gpt(12)), make_spec(8, nodes=2, devices_per_node=4)
    plan, costs = planned(graph, spec), price(graph, spec)
    ranks = [stage.mesh.ranks[0] for stage in plan.stages]
    slow = [pair for pair in pairwise(ranks) if costs.message_s(*pair, 0) == 1e-4]
    assert slow == [(3, 4)]


def shorter(graph: Graph, spec: Spec, percent: int) -> Spec:
    """The spec on devices of so much less memory than its plan needs."""
    need = max(memory.total for memory in measure_memory(graph, planned(graph, spec), spec))
    device = replace(spec.cluster.device, memory=need * (100 - percent) // 100)
    return replace(spec, cluster=replace(spec.cluster, device=device))


def test_early_stages_of_1f1b_get_fewer_layers_when_memory_is_short() -> None:
    graph, roomy = segment(gpt(12, vocab=8)), make_spec(4, 64, global_batch=1024)
    assert blocks(graph, planned(graph, roomy)) == [3, 3, 3, 3]
    plan = planned(graph, shorter(graph, roomy, 20))
    assert blocks(graph, plan) == [2, 2, 4, 4]
    gpipe = replace(roomy, parallel=replace(roomy.parallel, schedule="gpipe"))
    assert blocks(graph, planned(graph, gpipe)) == [3, 3, 3, 3]


@pytest.mark.parametrize("tenths", [10, 8, 7, 6])
def test_the_plan_is_the_fastest_that_fits(tenths: int) -> None:
    """Against every cut of a tied GPT, under bounds that forbid ever more of them."""
    graph = segment(gpt(5, tied=True, dropout=True))
    spec = make_spec(3, 8, global_batch=64)
    costs = price(graph, spec)
    cuts = combinations(range(1, len(graph.layers)), 2)
    plans = [assemble(graph, costs, spec, (0, *cut)) for cut in cuts]
    needs = [max(m.total for m in measure_memory(graph, plan, spec)) for plan in plans]
    bound = min(needs) + (max(needs) - min(needs)) * (tenths - 5) // 50
    device = replace(spec.cluster.device, memory=bound)
    spec = replace(spec, cluster=replace(spec.cluster, device=device))
    best = min(
        max(stage.time_s for stage in plan.stages)
        for plan, need in zip(plans, needs, strict=True)
        if need <= bound
    )
    assert max(stage.time_s for stage in planned(graph, spec).stages) == pytest.approx(best)


def test_a_tied_parameter_is_placed_on_both_stages() -> None:
    graph = segment(gpt(4, tied=True))
    plan = planned(graph, make_spec(3))
    assert plan.placements["wte.weight"] == ((0, ()), (2, ()))
    assert plan.placements["wpe.weight"] == ((0, ()),)
    assert plan.world_size == 3


@pytest.mark.parametrize(
    ("microbatches", "last_batch", "samples", "even"),
    [
        (4, "drop", 100, True),
        (4, "keep", 64, True),
        (4, "keep", 100, False),
        (3, "drop", 64, False),
    ],
)
def test_even_microbatches(microbatches: int, last_batch: str, samples: int, even: bool) -> None:
    data = Random(samples=samples, fields={}, last_batch=last_batch)
    graph = segment(mlp([4, 4, 4]))
    assert planned(graph, make_spec(2, microbatches, data=data)).even == even


def test_text_of_unknown_length_is_not_even() -> None:
    graph = segment(mlp([4, 4, 4]))
    text = Text(files=("*.txt",), sequence=4)
    assert not planned(graph, make_spec(data=text)).even
    assert planned(graph, make_spec(data=replace(text, last_batch="drop"))).even


def test_one_stage_and_one_layer_a_stage() -> None:
    graph = segment(gpt(4))
    assert len(planned(graph, make_spec(1)).stages[0].layers) == 8
    assert [len(stage.layers) for stage in planned(graph, make_spec(8)).stages] == [1] * 8


def test_runners_up_say_why_they_lost() -> None:
    graph, spec = segment(gpt(6, width=256, vocab=50_000, time=64)), make_spec(3, microbatches=8)
    costs = price(graph, spec)
    plan = planned(graph, spec)
    found = {name: (seconds, why) for name, seconds, why in runners_up(graph, costs, plan, spec)}
    seconds, why = found["equal numbers of layers"]
    units, schedule = localize(graph, plan), order(plan, "1f1b")
    programs = communicate(plan, units, schedule, clip=False)
    assert seconds > step_s(graph, plan, programs, costs, spec)
    assert why.startswith("its largest stage, 2, takes ")
    assert why.endswith("; to have it: cuts: [blocks.1, blocks.4]")
    assert "smallest largest stage, whatever memory it needs" not in found


def test_a_runner_up_may_need_too_much_memory() -> None:
    graph = segment(gpt(12, vocab=8))
    short = shorter(graph, make_spec(4, 64, global_batch=1024), 20)
    found = runners_up(graph, price(graph, short), planned(graph, short), short)
    whys = {name: why for name, _, why in found}
    assert whys["smallest largest stage, whatever memory it needs"].startswith("rank 0 needs ")


def test_the_spec_s_cuts_are_kept_though_others_are_faster() -> None:
    graph, spec = segment(gpt(4)), make_spec(2, cuts=("wpe",))
    plan = planned(graph, spec)
    names = [name for name, *_ in runners_up(graph, price(graph, spec), plan, spec)]
    assert names[0] == "smallest largest stage, whatever memory it needs"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda p: replace(p, stages=p.stages[:1]), "1 stages for pipeline 2"),
        (lambda p: replace(p, stages=p.stages[::-1]), "stages hold layers"),
        (
            lambda p: replace(
                p, stages=(p.stages[0], replace(p.stages[1], layers=p.stages[1].layers[1:]))
            ),
            "stages hold layers",
        ),
        (
            lambda p: replace(
                p, stages=(p.stages[0], replace(p.stages[1], mesh=Mesh(axes=(), ranks=(2,))))
            ),
            "ranks are",
        ),
        (lambda p: replace(p, placements={}), "is on stages"),
        (
            lambda p: replace(p, placements=p.placements | {"wpe.weight": ((1, ()),)}),
            "wpe.weight is on stages",
        ),
        (
            lambda p: replace(p, placements=p.placements | {"nothing": ((1, ()),)}),
            "nothing is placed",
        ),
        (lambda p: replace(p, global_batch=9), "global batch 9"),
        (lambda p: replace(p, microbatches=3, even=True), "called even"),
    ],
)
def test_verify_plan_finds(fault: Callable[[Plan], Plan], message: str) -> None:
    graph, spec = segment(gpt(4)), make_spec(2)
    plan = planned(graph, spec)
    with pytest.raises(InternalError, match=message):
        verify_plan(fault(plan), graph, spec)


def test_verify_plan_finds_too_little_memory() -> None:
    graph, spec = segment(gpt(4)), make_spec(2)
    with pytest.raises(InternalError, match="rank 0 needs"):
        verify_plan(planned(graph, spec), graph, make_spec(2, memory=1000))
