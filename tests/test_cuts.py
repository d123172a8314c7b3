"""Cuts that the spec names."""

import pytest
from graphs import Builder, gpt, make_spec

from ppc.analysis.cost import price
from ppc.analysis.invariants.plan import verify_plan
from ppc.errors import Complaints, PlanError
from ppc.ir.graph import Graph
from ppc.passes.place import place
from ppc.passes.place.cuts import beginnings
from ppc.passes.segment import segment

GPT = segment(gpt(4))  # wte, wpe, blocks.0 to blocks.3, ln_f, head


def starts(*cuts: str, graph: Graph = GPT) -> list[int]:
    spec = make_spec(len(cuts) + 1, cuts=cuts)
    plan = place(graph, price(graph, spec), spec)
    verify_plan(plan, graph, spec)
    return [stage.layers[0] for stage in plan.stages]


def complaint(*cuts: str, pipeline: int | None = None, graph: Graph = GPT) -> str:
    spec = make_spec(pipeline or len(cuts) + 1, cuts=cuts)
    with pytest.raises((PlanError, Complaints)) as caught:
        place(graph, price(graph, spec), spec)
    return str(caught.value)


def test_a_cut_names_the_layer_where_a_stage_begins() -> None:
    assert starts("blocks.1", "head") == [0, 3, 7]


def test_a_module_of_several_layers_begins_at_the_first() -> None:
    expanded = segment(gpt(2))
    paths = [layer.path for layer in expanded.layers]
    assert starts("blocks") == [0, 2]
    assert starts("blocks.1.mlp", graph=expanded) == [0, paths.index("blocks.1.mlp.0")]
    assert starts("blocks.1", graph=expanded) == [0, paths.index("blocks.1.ln_1")]


def test_a_later_call_of_a_module_may_be_named() -> None:
    b = Builder()
    x = b.linear("a", b.input("x", 4), 4, 4)
    x = b.linear("b", x, 4, 4)
    graph = segment(b.graph(b.linear("a", x, 4, 4, number=1)))
    assert starts("a@1", graph=graph) == [0, 2]
    assert beginnings(graph) == {"a": 0, "b": 1, "a@1": 2}


def test_an_unknown_module() -> None:
    assert complaint("block.1") == (
        "small.yaml:3:1: the model has no module block.1\nhint: blocks.1 or blocks.3 or blocks.2"
    )


def test_an_unknown_module_like_none() -> None:
    assert complaint("xyz") == (
        "small.yaml:3:1: the model has no module xyz"
        "\nhint: one of wte, wpe, blocks, blocks.0, blocks.1, blocks.2, blocks.3, ln_f"
    )


def test_a_module_inside_a_layer() -> None:
    assert complaint("blocks.1.mlp.0") == (
        "small.yaml:3:1: blocks.1.mlp.0 lies inside blocks.1, which is one layer and is not cut"
        "\nhint: blocks.1 or blocks.2"
    )


def test_a_module_that_no_layer_begins_at() -> None:
    assert complaint("drop").startswith("small.yaml:3:1: no layer begins at drop\nhint: ")


def test_wrong_order() -> None:
    assert complaint("blocks.2", "blocks.1") == (
        "small.yaml:4:1: blocks.1 begins before blocks.2 begins: the stage between them has no"
        " layer\nhint: list the cuts in the model's order, each once"
    )


@pytest.mark.parametrize(("cuts", "name"), [(("wte",), "the model"), (("wpe", "wpe"), "wpe")])
def test_an_empty_stage(cuts: tuple[str, ...], name: str) -> None:
    assert f"{cuts[-1]} begins where {name} begins" in complaint(*cuts)


def test_the_wrong_number_of_cuts() -> None:
    assert complaint("blocks.1", "blocks.2", pipeline=4) == (
        "small.yaml:2:1: pipeline 4 needs 3 cuts; the spec lists 2\nhint: pipeline: 3"
    )


def test_all_complaints_at_once() -> None:
    lines = complaint("nothing", "wte", pipeline=5).splitlines()
    assert [line.partition(": ")[0] for line in lines if "hint" not in line] == [
        "small.yaml:2:1",
        "small.yaml:3:1",
        "small.yaml:4:1",
    ]
