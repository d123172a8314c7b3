"""segment: which calls become layers, and where loose ops go."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from graphs import BATCH, Builder, gpt, make_spec, mlp
from hypothesis import given, settings
from hypothesis import strategies as st

from ppc.analysis.cost import price
from ppc.analysis.dataflow import crossing_bytes, recomputable
from ppc.analysis.invariants.graph import verify_graph
from ppc.analysis.invariants.plan import verify_plan
from ppc.errors import InternalError, PlanError
from ppc.ir.graph import Amount, Graph, Layer, Ref
from ppc.passes.place import place
from ppc.passes.segment import segment


def layers(graph: Graph) -> dict[str, Layer]:
    """The layers by path, verified."""
    segmented = segment(graph)
    verify_graph(segmented)
    return {layer.path: layer for layer in segmented.layers}


def paths(graph: Graph) -> list[str]:
    return list(layers(graph))


def two_calls(share: int) -> Builder:
    """A model of a part with two linear layers that has one `share`-th of the FLOPs, and a rest."""
    b = Builder()
    x = b.input("x", 4)
    b.module("part", "Part", ["a", "b"])
    x = b.linear("part.b", b.linear("part.a", x, 4, 4), 4, 4)
    b.module("rest", "Rest", leaf=True)
    flops = 2 * 2 * 4 * 4 * (share - 1)
    b.op("rest", x, call="rest", flops=flops)
    return b


def test_blocks_of_a_gpt_are_layers() -> None:
    assert paths(gpt(4)) == ["wte", "wpe", *(f"blocks.{i}" for i in range(4)), "ln_f", "head"]


def test_a_block_of_more_than_a_quarter_is_expanded() -> None:
    found = layers(gpt(2))
    assert "blocks.0" not in found
    assert found["blocks.0.attn.qkv"].call == ("blocks.0.attn.qkv", 0)
    assert found["blocks.0.attn"].call is None  # sdpa: loose, but with FLOPs
    assert found["blocks.0.mlp.0"].parameters == ("blocks.0.mlp.0.weight",)


def test_equal_layers_share_a_kind_and_others_do_not() -> None:
    found = layers(gpt(2, dropout=True))
    expanded = [path for path in found if path.startswith("blocks.0")]
    assert len(expanded) > 5
    for path in expanded:
        assert found[path].kind == found[path.replace("blocks.0", "blocks.1")].kind
    assert len({found[path].kind for path in expanded if "ln" not in path}) == len(expanded) - 2
    blocks = layers(gpt(4))
    assert len({blocks[f"blocks.{i}"].kind for i in range(4)}) == 1
    assert blocks["blocks.0"].kind != layers(gpt(4, time=8))["blocks.0"].kind
    assert blocks["blocks.0"].kind.startswith("Block-")


def test_a_leaf_is_one_layer_however_large() -> None:
    """nn.MultiheadAttention, say, whose projection is a module of its own."""
    b = Builder()
    x = b.input("x", 4)
    b.module("attention", "MultiheadAttention", ["out"], leaf=True)
    x = b.op("sdpa", x, call="attention", flops=99)
    x = b.linear("attention.out", x, 4, 4)
    assert paths(b.graph(b.op("relu", x, call="attention"))) == ["attention"]


def test_a_call_without_calls_inside_is_one_layer_however_large() -> None:
    b = Builder()
    b.module("custom", "Custom")
    weight = b.parameter("custom.weight", 4)
    loss = b.op("mul", b.input("x", 4), weight, call="custom", flops=99)
    assert layers(b.graph(loss))["custom"].call == ("custom", 0)


@pytest.mark.parametrize(("share", "expanded"), [(16, False), (15, True)])
def test_a_call_of_a_sixteenth_is_one_layer(share: int, expanded: bool) -> None:
    b = two_calls(share)
    found = paths(b.graph(b.op("mean", Ref(b.ops[-1].name), shape=())))
    assert found == (["part.a", "part.b", "rest"] if expanded else ["part", "rest"])


@pytest.mark.parametrize(("siblings", "expanded"), [(["0"], True), (["0", "1"], False)])
def test_an_only_child_of_a_container_is_no_element(siblings: list[str], expanded: bool) -> None:
    b = Builder()
    x = b.input("x", 4)
    b.module("part", "ModuleList", siblings, indexed=True)
    b.module("part.0", "Part", ["a", "b"])
    x = b.linear("part.0.b", b.linear("part.0.a", x, 4, 4), 4, 4)
    b.module("rest", "Rest", leaf=True)
    loss = b.op("rest", x, call="rest", flops=2 * 2 * 4 * 4 * 4)
    assert ("part.0.a" in paths(b.graph(loss))) == expanded


def test_without_flops_bytes_are_weighed() -> None:
    b = Builder()
    x = b.input("x", 64)
    for part in ("small", "large"):
        b.module(part, "Part", ["a", "b"])
        for name in "ab":
            b.module(f"{part}.{name}", "Part", leaf=True)
            x = b.op("mul", x, call=f"{part}.{name}", shape=(BATCH, 1 if part == "small" else 640))
    x = b.op("mul", x, x, shape=(BATCH, 640))
    found = layers(b.graph(b.op("mean", x, shape=())))
    assert list(found) == ["small", "large.a", "large.b", ""]  # the last is too large for glue


def test_glue_stays_in_its_own_module() -> None:
    """A block's residual sum is not moved into the next block, nor its first view into the last."""
    found = layers(gpt(2))
    add = found["blocks.0.mlp.2"].ops[-1]
    assert [op.target for op in gpt(2).ops if op.name == add] == ["aten.add.default"]


def test_a_sum_joins_the_last_of_its_terms() -> None:
    """The cut after `wte + wpe` carries one value, the cut before it two."""
    graph = segment(gpt(4, dropout=True))
    found = {layer.path: layer for layer in graph.layers}
    targets = {op.name: op.target for op in graph.ops}
    assert targets[found["wpe"].ops[-1]] == "aten.add.default"
    assert list(found)[:3] == ["wte", "wpe", "drop"]


def test_a_mask_joins_what_it_masks() -> None:
    b = Builder()
    x = b.linear("a", b.input("x", 4), 4, 4)
    seed = b.parameter("seed", 4)
    b.module("b", "Mask", leaf=True)
    gate = b.op("sigmoid", b.op("neg", x), call="")
    loss = b.op("mul", x, gate, seed, call="b", flops=9)
    assert [layer.ops for layer in segment(b.graph(loss)).layers] == [("v0",), ("v1", "v2", "v3")]


def test_glue_that_changes_no_cut_stays_with_what_it_reads() -> None:
    b = Builder()
    x = b.op("relu", b.linear("a", b.input("x", 4), 4, 4))
    found = layers(b.graph(b.linear("b", x, 4, 4)))
    assert [layer.ops for layer in found.values()] == [("v0", "v1"), ("v2",)]


def test_the_loss_joins_the_last_layer() -> None:
    assert layers(mlp([4, 4, 4]))["net.1"].ops == ("v1", "v2")


def test_a_loose_parameter_or_random_op_is_a_layer() -> None:
    b = Builder()
    x = b.linear("a", b.input("x", 4), 4, 4)
    x = b.op("add", x, b.parameter("offset", 4))
    x = b.linear("b", x, 4, 4)
    x = b.op("dropout", x, 0.1, random=True)
    found = layers(b.graph(b.linear("c", x, 4, 4)))
    assert list(found) == ["a", "", "b", "#1", "c"]
    assert (found[""].parameters, found["#1"].call) == (("offset",), None)


def test_calls_of_one_module_are_layers_of_their_own() -> None:
    b = Builder()
    x = b.linear("a", b.input("x", 4), 4, 4)
    found = layers(b.graph(b.linear("a", x, 4, 4, number=1)))
    assert [layer.call for layer in found.values()] == [("a", 0), ("a", 1)]
    assert list(found) == ["a", "a@1"]
    assert found["a"].parameters == found["a@1"].parameters == ("a.weight",)
    assert found["a"].kind != found["a@1"].kind  # the first input needs no gradient


def test_a_block_called_twice_holds_the_calls_made_inside_it() -> None:
    b = Builder()
    x = b.input("x", 4)
    b.module("net", "Net", ["a", "b"])
    for number in range(2):
        b.call("net", number)
        for name in "ab":
            b.call(f"net.{name}", number, parent=("net", number))
            x = b.linear(f"net.{name}", x, 4, 4, number=number)
    b.module("rest", "Rest", leaf=True)
    loss = b.op("rest", x, call="rest", flops=10**6)
    assert [(layer.path, layer.ops) for layer in segment(b.graph(loss)).layers] == [
        ("net", ("v0", "v1")),
        ("net@1", ("v2", "v3")),
        ("rest", ("v4",)),
    ]


def test_a_module_shared_by_blocks_is_inside_the_block_that_calls_it() -> None:
    b = Builder()
    x = b.input("x", 4)
    b.module("blocks", "ModuleList", list("0123"), indexed=True)
    for i in range(4):
        b.module(f"blocks.{i}", "Block", ["a", "b"])
        x = b.linear(f"blocks.{i}.a", x, 4, 4)
        b.call("shared", i, parent=(f"blocks.{i}", 0))
        x = b.linear("shared", x, 4, 4, number=i)
        x = b.linear(f"blocks.{i}.b", x, 4, 4)
    assert paths(b.graph(x)) == [f"blocks.{i}" for i in range(4)]


def test_interleaved_calls_are_split_into_runs() -> None:
    b = Builder()
    b.module("b", "Part", leaf=True)
    x = b.linear("a", b.input("x", 4), 4, 4)
    for call in ("b", "a", "b"):
        x = b.op("mul", x, call=call, flops=1)
    found = layers(b.graph(x))
    assert list(found) == ["a", "b", "a#1", "b#1"]
    assert all(layer.call is None for layer in found.values())


def test_memory_written_in_place_is_not_cut_apart() -> None:
    b = Builder()
    x = b.linear("a", b.input("x", 4), 4, 4)
    y = b.linear("b", x, 4, 4)
    view = b.op("view", x, call="b", views=[x.name])
    z = b.op("mul_", view, y, call="b", views=[view.name], mutates=[view.name])
    graph = b.graph(b.linear("c", z, 4, 4))
    assert [(layer.path, layer.call) for layer in segment(graph).layers] == [
        ("a", None),
        ("c", ("c", 0)),
    ]


def test_a_written_buffer_is_held_by_one_layer() -> None:
    b = Builder()
    x = b.linear("a", b.input("x", 4), 4, 4)
    mean = b.parameter("mean", 4, buffer=True)
    for number in range(2):
        b.module("norm", "BatchNorm1d", leaf=True)
        x = b.op("batch_norm", x, mean, call=("norm", number), mutates=["mean"])
        x = b.linear(f"b{number}", x, 4, 4)
    assert paths(b.graph(x)) == ["a", "norm", "b1"]


def test_what_is_read_after_a_write_is_in_its_layer() -> None:
    """Each stage has its own copy of a buffer, and reads its own input from the data."""
    b = Builder()
    x = b.input("x", 4)
    y = b.linear("a", x, 4, 4)
    b.op("add_", x, 1, call="b", views=["x"], mutates=["x"])
    y = b.linear("b", y, 4, 4)
    y = b.op("mul", b.linear("c", x, 4, 4), y, call="c")
    assert paths(b.graph(b.linear("d", y, 4, 4))) == ["a", "b", "d"]
    b = Builder()
    count = b.parameter("count", 4, buffer=True)
    y = b.linear("a", b.input("x", 4), 4, 4)
    b.op("add_", count, 1, call="a", views=["count"], mutates=["count"])
    y = b.linear("b", y, 4, 4)
    y = b.op("mul", b.linear("c", y, 4, 4), count, call="c")
    assert paths(b.graph(b.linear("d", y, 4, 4))) == ["a", "d"]


def test_a_view_moves_no_bytes() -> None:
    """The head of a GPT: linear, view of the logits, cross entropy."""
    read, logits, labels = 4 * 16 * 32, 4 * 16 * 64, 8 * 16
    moved = layers(gpt())["head"].bytes_moved
    assert moved == Amount(4 * 64 * 32 + 4, read + logits + logits + labels)


def test_sizes_of_a_layer() -> None:
    layer = layers(mlp([4, 8, 8]))["net.0"]
    assert (layer.param_bytes, layer.flops) == (4 * 32, Amount(0, 64))
    assert layer.bytes_moved == Amount(4 * 32, 4 * (4 + 8))
    assert layer.activation_bytes == Amount(0, 16)


def test_recomputable_values_cross_no_cut() -> None:
    b = Builder()
    tokens = b.input("tokens", 4)
    constant = b.parameter("mask", 4, buffer=True)
    counter = b.parameter("count", 4, buffer=True)
    mask = b.op("add", constant, tokens)
    b.op("add_", counter, 1, mutates=["count"])
    counted = b.op("add", counter, mask)
    noisy = b.op("rand", 4, shape=(4,), random=True)
    x = b.linear("a", mask, 4, 4)
    target = b.op("zeros", 4, shape=(4,))
    spoilt = b.op("copy_", target, x, views=[target.name], mutates=[target.name])
    graph = b.graph(b.op("add", spoilt, target, counted, noisy, mask))
    assert recomputable(graph) == {mask.name}
    assert crossing_bytes(graph)[2] == 0  # only the mask and the counter's result, unread


@st.composite
def tangled(draw: st.DrawFn) -> Graph:
    """Calls in any order, views and writes of anything, parameters used anywhere."""
    b = Builder()
    values = [b.input("x", 4)]
    states = [b.parameter("weight", 4), b.parameter("buffer", 4, buffer=True)]
    b.module("blocks", "ModuleList", list("012"), indexed=True)
    paths = [
        "",
        "a",
        "a.b",
        "a.b.c",
        "leaf",
        *(f"blocks.{i}{p}" for i in range(3) for p in ("", ".b")),
    ]
    for path in paths[1:]:
        b.module(path, "Part", leaf=path == "leaf")
    for _ in range(draw(st.integers(1, 25))):
        kind = draw(st.sampled_from(["plain", "view", "write", "random"]))
        operand = draw(st.sampled_from([*values, *(states if kind in ("plain", "write") else [])]))
        names = [getattr(operand, "name", None) or operand.fqn]
        value = b.op(
            kind,
            operand,
            draw(st.sampled_from(values)),
            call=draw(st.sampled_from(paths)),
            shape=(BATCH, 4),
            flops=draw(st.sampled_from([0, 0, 1, 10])),
            random=kind == "random",
            views=names if kind in ("view", "write") else (),
            mutates=names if kind == "write" else (),
        )
        values.append(value)
    return b.graph(values[-1])


@given(tangled(), st.integers(1, 4), st.sampled_from(["gpipe", "1f1b"]))
@settings(max_examples=100, deadline=None)
def test_any_graph_is_divided_and_placed(graph: Graph, stages: int, schedule: str) -> None:
    segmented = segment(graph)
    verify_graph(segmented)
    spec = make_spec(min(stages, len(segmented.layers)), schedule=schedule)
    costs = price(segmented, spec)
    try:
        plan = place(segmented, costs, spec)
    except PlanError as error:  # masks and positions alone make no stage
        spec = make_spec(int(error.hint.removeprefix("pipeline: ")), schedule=schedule)
        plan = place(segmented, costs, spec)
    verify_plan(plan, segmented, spec)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda g: replace(g, ops=(g.ops[0], *g.ops)), "defined 2 times"),
        (lambda g: replace(g, ops=g.ops[::-1]), "before it is defined"),
        (lambda g: replace(g, values={}), "no meta"),
        (lambda g: replace(g, parameters={}), "before it is defined"),
        (lambda g: replace(g, outputs=(("loss", "nothing"),)), "output loss"),
        (lambda g: replace(g, layers=g.layers[1:]), "layers are not the ops in order"),
        (lambda g: replace(g, layers=g.layers[::-1]), "layers are not the ops in order"),
        (lambda g: replace(g, layers=(*g.layers, g.layers[0])), "layers are not the ops in order"),
        (
            lambda g: replace(g, layers=tuple(replace(layer, path="x") for layer in g.layers)),
            "2 layers are called 'x'",
        ),
        (
            lambda g: replace(g, layers=tuple(replace(layer, parameters=()) for layer in g.layers)),
            "other parameters",
        ),
        (
            lambda g: replace(g, ops=(g.ops[0], replace(g.ops[1], mutates=("v0",)), *g.ops[2:])),
            "written in place",
        ),
        (
            lambda g: replace(g, ops=(replace(g.ops[0], mutates=("v9",)), *g.ops[1:])),
            "not defined",
        ),
    ],
)
def test_verify_graph_finds(fault: Callable[[Graph], Graph], message: str) -> None:
    graph = segment(mlp([4, 4, 4]))
    verify_graph(graph)
    with pytest.raises(InternalError, match=message):
        verify_graph(fault(graph))
