"""What place says when no plan is possible, and that its remedies are true."""

import re
from dataclasses import replace
from typing import Any

import pytest
from graphs import gpt, make_spec, mlp

from ppc.analysis.cost import price
from ppc.analysis.memory import measure_memory
from ppc.errors import PlanError
from ppc.ir.graph import Graph
from ppc.ir.plan import Plan
from ppc.ir.spec import Spec
from ppc.passes.place import place
from ppc.passes.place.assemble import assemble
from ppc.passes.place.fit import leanest
from ppc.passes.segment import segment


def planned(graph: Graph, spec: Spec) -> Plan:
    return place(graph, price(graph, spec), spec)


def refused(graph: Graph, spec: Spec) -> PlanError:
    with pytest.raises(PlanError) as caught:
        planned(graph, spec)
    return caught.value


def least(graph: Graph, spec: Spec) -> int:
    """Bytes that the most modest plan needs."""
    plan = assemble(graph, price(graph, spec), spec, leanest(graph, spec))
    return max(memory.total for memory in measure_memory(graph, plan, spec))


def with_memory(spec: Spec, memory: int, **parallel: Any) -> Spec:
    device = replace(spec.cluster.device, memory=memory)
    return replace(
        spec,
        cluster=replace(spec.cluster, device=device),
        parallel=replace(spec.parallel, **parallel),
    )


def test_more_stages_than_layers() -> None:
    assert str(refused(segment(mlp([4, 4, 4])), make_spec(3))) == (
        "small.yaml:1:1: pipeline 3 needs as many layers; the model has 2\nhint: pipeline: 2"
    )


def test_the_message_has_stage_bytes_and_remedy() -> None:
    graph = segment(mlp([64] * 5))
    weights, message = 2 * 4 * 64 * 64, 4 * 64  # of two layers; of one sample
    spec = make_spec(2, 8, memory=4 * weights, devices_per_node=2)
    assert str(refused(graph, spec)) == (
        "small.yaml:1:1: stage 0 (layers net.0 to net.1) needs 146.0 KiB, 18.0 KiB (18432 bytes)"
        " more than the device has (128.0 KiB): parameters 32.0 KiB, gradients 32.0 KiB, optimizer"
        " 64.0 KiB, activations 17.0 KiB, buffers 1.0 KiB"
        "\nhint: pipeline: 4, on nodes: 2"
    )
    error = refused(graph, with_memory(spec, 2 * weights))  # a layer alone is too large
    assert (error.hint, error.where) == (
        "device: {memory: 1MiB}, or a smaller model",
        spec.at("cluster.device"),
    )
    # 2 live x 2 inputs, the gradient of one weight; 2 outputs kept, 2 gradients received
    assert 4 * message + weights // 2 + 4 * message == 18432


def test_activations_ask_for_smaller_microbatches() -> None:
    graph = segment(mlp([64] * 5))
    spec = make_spec(2, 1, devices_per_node=2)
    few = least(graph, with_memory(spec, 0, microbatches=4))
    error = refused(graph, with_memory(spec, few))
    assert (error.hint, error.where) == ("microbatches: 4", spec.at("parallel.microbatches"))
    planned(graph, with_memory(spec, few, microbatches=4))


def test_gpipe_asks_for_1f1b_first() -> None:
    graph = segment(mlp([64] * 5))
    spec = make_spec(2, 8, schedule="gpipe")
    error = refused(graph, with_memory(spec, least(graph, spec) - 1))
    assert (error.hint, error.where) == ("schedule: 1f1b", spec.at("parallel.schedule"))
    planned(graph, with_memory(spec, least(graph, spec) - 1, schedule="1f1b"))


def test_weights_ask_for_more_stages() -> None:
    graph = segment(mlp([64] * 7))
    spec = make_spec(2, 8)
    need = least(graph, with_memory(spec, 0, pipeline=3))
    error = refused(graph, with_memory(spec, need))
    assert (error.hint, error.where) == ("pipeline: 3", spec.at("parallel.pipeline"))
    planned(graph, with_memory(spec, need, pipeline=3))


def test_replicas_make_room_for_stages() -> None:
    """On the devices that there are; a longer pipeline beside the replicas would need more."""
    graph = segment(mlp([64] * 7))
    spec = with_memory(make_spec(2, 8, devices_per_node=6), 0, data=3)
    need = least(graph, with_memory(spec, 0, pipeline=6, data=1))
    error = refused(graph, with_memory(spec, need))
    assert (error.hint, error.where) == ("pipeline: 6, data: 1", spec.at("parallel.pipeline"))
    planned(graph, with_memory(spec, need, pipeline=6, data=1))


def test_cuts_that_do_not_fit_ask_for_auto() -> None:
    graph = segment(mlp([64] * 5))
    spec = make_spec(2, 8, cuts=("net.3",))
    need = least(graph, spec)
    error = refused(graph, with_memory(spec, need))
    assert (error.hint, error.where) == ("cuts: auto", spec.at("parallel.cuts"))
    assert "stage 0 (layers net.0 to net.2)" in str(error)
    planned(graph, with_memory(spec, need, cuts="auto"))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_plan_is_refused_only_if_none_fits(schedule: str) -> None:
    """The bound that the most modest plan just meets is met; one byte less is refused, in bytes."""
    graph = segment(gpt(6, tied=True))
    spec = make_spec(4, 4, schedule=schedule, devices_per_node=4, global_batch=4)
    need = least(graph, spec)
    plan = planned(graph, with_memory(spec, need))
    assert max(m.total for m in measure_memory(graph, plan, spec)) <= need
    assert re.search(r" \(1 bytes\) more than", str(refused(graph, with_memory(spec, need - 1))))
