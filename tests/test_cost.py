"""The roofline, the factor of the backward, messages and collectives."""

from dataclasses import replace

import pytest
from graphs import Builder, gpt, make_spec, mlp

from ppc.analysis.cost import price
from ppc.ir.graph import Graph, Ref
from ppc.ir.report import show_seconds
from ppc.passes.segment import segment


def test_a_layer_takes_the_longer_of_arithmetic_and_traffic() -> None:
    """At 1e12 FLOP/s and 1e11 bytes/s a linear layer is bound by its weights, until it is not."""
    graph = segment(mlp([1000, 1000, 1000]))
    small = price(graph, make_spec(microbatches=8, global_batch=8))
    assert small.microbatch_size == 1
    assert small.forward_s[0] == pytest.approx((4 * 1000 * 1000 + 4 * 2000) / 1e11)
    large = price(graph, make_spec(microbatches=8, global_batch=8000))
    assert large.forward_s[0] == pytest.approx(2 * 1000 * 1000 * 1000 / 1e12)


def test_the_largest_microbatch_counts() -> None:
    graph = segment(mlp([1000, 1000, 1000]))
    assert price(graph, make_spec(microbatches=3, global_batch=8)).microbatch_size == 3


def test_the_precision_has_its_own_peak() -> None:
    graph = segment(mlp([1000, 1000, 1000]))
    spec = make_spec(microbatches=1, global_batch=10000)
    double = replace(spec, train=replace(spec.train, precision="fp64"))
    half = replace(spec, train=replace(spec.train, precision="bf16"))
    single = price(graph, spec).forward_s[0]
    assert price(graph, double).forward_s[0] == pytest.approx(2 * single)
    assert price(graph, half).forward_s[0] == pytest.approx(single / 2)


def chain(*, frozen: bool = False, flow: bool = True) -> Graph:
    """A trained layer before (if `flow`), then a layer `b`, frozen or not."""
    b = Builder()
    x = b.input("x", 4)
    if flow:
        x = b.linear("a", x, 4, 4)
    b.parameter("b.weight", 4, 4, trainable=not frozen)
    x = b.linear("b", x, 4, 4)
    return segment(b.graph(x))


@pytest.mark.parametrize(
    ("graph", "factor"),
    [
        (chain(), 2),
        (chain(flow=False), 1),
        (chain(frozen=True), 1),
        (chain(frozen=True, flow=False), 0),
    ],
)
def test_the_backward_has_a_product_for_each_gradient(graph: Graph, factor: int) -> None:
    costs = price(graph, make_spec())
    at = [layer.path for layer in graph.layers].index("b")
    assert costs.backward_s[at] == factor * costs.forward_s[at] > -1
    assert costs.layer_s[at] == (1 + factor) * costs.forward_s[at]


def test_attention_without_parameters_has_a_backward_of_two() -> None:
    b = Builder()
    x = b.linear("a", b.input("x", 4), 4, 4)
    x = b.op("matmul", x, x, call="attention", flops=1000)
    graph = segment(b.graph(x))
    costs = price(graph, make_spec())
    assert costs.backward_s[1] == 2 * costs.forward_s[1] > 0


def test_an_embedding_has_only_the_gradient_of_its_table() -> None:
    graph = segment(gpt())
    costs = price(graph, make_spec())
    assert costs.backward_s[0] == costs.forward_s[0]
    assert costs.backward_s[2] == 2 * costs.forward_s[2]


def test_messages_within_and_between_nodes() -> None:
    costs = price(segment(mlp([4, 4])), make_spec(nodes=2, devices_per_node=4))
    assert costs.message_s(0, 3, 10**7) == pytest.approx(1e-5 + 1e-3)
    assert costs.message_s(3, 4, 10**7) == pytest.approx(1e-4 + 1e-2)
    assert costs.message_s(4, 3, 0) == 1e-4


def test_an_all_reduce_is_a_ring() -> None:
    costs = price(segment(mlp([4, 4])), make_spec(nodes=2, devices_per_node=4))
    assert costs.all_reduce_s((0, 1, 2, 3), 4 * 10**7) == pytest.approx(6 * (1e-5 + 1e-3))
    assert costs.all_reduce_s((0, 4), 2 * 10**7) == pytest.approx(2 * (1e-4 + 1e-2))
    assert costs.all_reduce_s((0,), 10**7) == 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (0.0125, "12.5 ms"), (3e-6, "3 us"), (0, "0 us")]
)
def test_show_seconds(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text


def test_a_value_without_gradient_costs_no_backward() -> None:
    b = Builder()
    x = b.op("exp", b.input("x", 4), call="norm")
    b.module("norm", "Norm", leaf=True)
    x = b.linear("a", x, 4, 4)
    costs = price(segment(b.graph(Ref(x.name))), make_spec())
    assert costs.forward_s[0] > 0 == costs.backward_s[0]
