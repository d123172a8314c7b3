"""Bytes on each rank, counted by hand."""

from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np
import pytest
from graphs import BATCH, Builder, gpt, make_spec, mlp

from ppc.analysis.cost import price
from ppc.analysis.dataflow import cut_bytes, holders
from ppc.analysis.memory import (
    COMMUNICATOR_BYTES,
    live_microbatches,
    measure_memory,
    measure_runs,
    peak_bytes,
)
from ppc.ir.graph import Graph, State
from ppc.ir.program import Compute, Edge, Post, Program, Wait, unroll
from ppc.ir.report import Memory, show_bytes
from ppc.ir.schedule import Kind
from ppc.ir.spec import Checkpoint, Group, Optimizer, Spec
from ppc.passes.communicate import communicate
from ppc.passes.localize import localize
from ppc.passes.order import order
from ppc.passes.place.assemble import assemble
from ppc.passes.segment import segment


def measure(
    graph: Graph, spec: Spec, *starts: int, kind: Literal["cpu", "cuda"] = "cpu"
) -> tuple[Memory, ...]:
    """On CPUs, where process groups take no memory of the device."""
    spec = on(kind, spec)
    return measure_memory(graph, assemble(graph, price(graph, spec), spec, starts), spec)


def on(kind: Literal["cpu", "cuda"], spec: Spec) -> Spec:
    device = replace(spec.cluster.device, kind=kind)
    return replace(spec, cluster=replace(spec.cluster, device=device))


def test_kinds_of_a_chain_of_linear_layers() -> None:
    """Two stages of one 8 x 8 layer; each microbatch is 2 samples, each message 2 x 8 floats."""
    first, last = measure(segment(mlp([8, 8, 8])), make_spec(), 0, 1)
    weight, message = 4 * 8 * 8, 4 * 8 * 2
    assert first == Memory(
        rank=0,
        parameters=weight,
        gradients=weight,
        optimizer=2 * weight,
        activations=2 * message + weight,  # 2 live microbatches, and the gradient of the weight
        buffers=2 * message + 2 * message,  # 2 outputs kept; 2 gradients received
        capacity=2**40,
    )
    assert last.activations == message + weight
    assert last.buffers == 2 * message + 2 * message  # 1 kept, 1 posted; 2 gradients sent
    assert first.total == 5 * weight + 6 * message


def test_the_largest_gradient_may_be_that_of_a_value() -> None:
    (memory,) = measure(segment(mlp([2, 100])), make_spec(1, 1), 0)
    assert memory.activations == 4 * 8 * 2 + 4 * 8 * 100


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [
        (Optimizer(), 2),
        (Optimizer(options={"amsgrad": True}), 3),
        (Optimizer(name="SGD", options={"momentum": 0.9}), 1),
        (Optimizer(name="SGD"), 0),
        (Optimizer(groups=(Group(params=("*",), options={"amsgrad": True}),)), 3),
    ],
)
def test_optimizer_state(optimizer: Optimizer, copies: int) -> None:
    spec = make_spec(1, optimizer=optimizer)
    (memory,) = measure(segment(mlp([8, 8])), spec, 0)
    assert memory.optimizer == copies * memory.parameters > -1


@pytest.mark.parametrize(
    ("schedule", "microbatches", "live"),
    [
        ("1f1b", 8, [4, 3, 2, 1]),
        ("1f1b", 2, [2, 2, 2, 1]),
        ("gpipe", 8, [8, 8, 8, 8]),
    ],
)
def test_live_microbatches(schedule: str, microbatches: int, live: list[int]) -> None:
    spec = make_spec(4, microbatches, schedule=schedule)
    assert [live_microbatches(spec, stage) for stage in range(4)] == live


def test_a_tied_parameter_counts_on_every_stage_that_holds_it() -> None:
    tied, untied = (segment(gpt(tied=tied)) for tied in (True, False))
    spec, last = make_spec(), len(tied.layers) - 1
    for one, two in zip(measure(tied, spec, 0, last), measure(untied, spec, 0, last), strict=True):
        assert (one.parameters, one.optimizer) == (two.parameters, two.optimizer)
    (tied_alone,) = measure(tied, make_spec(1), 0)
    (untied_alone,) = measure(untied, make_spec(1), 0)
    assert untied_alone.parameters - tied_alone.parameters == 4 * 64 * 32


def test_frozen_parameters_and_buffers_have_no_gradient() -> None:
    b = Builder()
    b.parameter("a.weight", 8, 8, trainable=False)
    x = b.linear("a", b.input("x", 8), 8, 8)
    x = b.op("add", x, b.parameter("shift", 8, buffer=True))
    (memory,) = measure(segment(b.graph(b.linear("c", x, 8, 8))), make_spec(1), 0)
    assert memory.parameters == 4 * (64 + 8 + 64)
    assert memory.gradients == 4 * 64
    assert memory.optimizer == 8 * 64


def skipping() -> Graph:
    """Layers a, b, c; c reads the outputs of a and b, and of a mask that any stage can make."""
    b = Builder()
    x = b.input("x", 8)
    mask = b.op("add", b.parameter("mask", 8, buffer=True), x, shape=(BATCH, 8))
    first = b.linear("a", x, 8, 8)
    second = b.linear("b", first, 8, 8)
    b.module("c", "Join", leaf=True)
    weight = b.parameter("c.weight", 8)
    return segment(b.graph(b.op("join", first, second, mask, weight, call="c", flops=64)))


def test_a_value_may_skip_a_stage() -> None:
    message = 4 * 8 * 2
    one, two, three = measure(skipping(), make_spec(3), 0, 1, 2)
    assert one.buffers == 3 * message + 2 * (2 * message)  # gradients come back on two edges
    assert two.buffers == (2 + 1) * message + 2 * message + 2 * (2 * message)
    assert three.buffers == (1 + 1) * 2 * message + 2 * 2 * message


def test_bytes_over_a_cut_there_and_back() -> None:
    """The first layer is frozen: nothing flows back over the first cut."""
    b = Builder()
    b.parameter("a.weight", 8, 8, trainable=False)
    x = b.linear("a", b.input("x", 8), 8, 8)
    x = b.linear("b", x, 8, 2)
    graph = segment(b.graph(b.linear("c", x, 2, 8)))
    assert cut_bytes(graph, 3) == (0, 3 * 32, 3 * 8)
    assert cut_bytes(graph, 3, gradients=True) == (0, 0, 3 * 8)


def test_buffers_behind_a_recomputed_value_are_held_where_it_is_computed() -> None:
    assert holders(skipping())["mask"] == (0, 2)


def test_buffers_behind_what_is_written_into_a_recomputed_value_are_held_too() -> None:
    b = Builder()
    x = b.linear("a", b.input("x", 8), 8, 8)
    mask = b.op("zeros", 8, shape=(8,))
    b.op("copy_", mask, b.parameter("mask", 8, buffer=True), mutates=[mask.name])
    x = b.linear("b", b.linear("c", x, 8, 8), 8, 8)
    graph = segment(b.graph(b.op("join", x, mask, b.parameter("shift", 8))))
    assert [layer.path for layer in graph.layers] == ["a", "c", "b", ""]
    assert holders(graph)["mask"] == (1, 3)


def test_what_nothing_reads_goes_where_its_neighbours_are() -> None:
    b = Builder()
    b.parameter("lost", 8)
    x = b.input("x", 8)
    for name in ("part.a", "part.b"):
        x = b.linear(name, x, 8, 8)
    b.parameter("part.b.unused", 8)
    assert holders(segment(b.graph(x))) == {
        "lost": (0,),
        "part.a.weight": (0,),
        "part.b.weight": (1,),
        "part.b.unused": (1,),
    }


def long_skip(*, tied: bool = False) -> Graph:
    """Layers a, b, c, d; d reads a's output too, and a's weight if `tied`."""
    b = Builder()
    if tied:
        b.parameter("a.weight", 8, 8, aliases=["d.weight"])
    first = x = b.linear("a", b.input("x", 8), 8, 8)
    for path in ("b", "c"):
        x = b.linear(path, x, 8, 8)
    b.module("d", "Join", leaf=True)
    weight = State("d.weight") if tied else b.parameter("d.weight", 8, 8)
    return segment(b.graph(b.op("join", x, first, weight, call="d", flops=128)))


def programs_of(graph: Graph, spec: Spec, *starts: int) -> tuple[Program, ...]:
    plan = assemble(graph, price(graph, spec), spec, starts)
    schedule = order(plan, spec.parallel.schedule)
    clips = spec.train.clip_norm is not None
    return communicate(plan, localize(graph, plan), schedule, clip=clips)


def most(edge: Edge, program: Program) -> int:
    """Messages of an edge that ends here, posted or kept, at once: a backward is done with one."""
    actions = list(unroll(program.actions))
    left = sum(isinstance(action, Wait) and action.edge == edge.name for action in actions)
    have = found = 0
    for action in actions:
        if action == Post(edge.name) and left:
            have, left = have + 1, left - 1
        elif isinstance(action, Compute) and action.action.kind is Kind.B:
            have -= 1
        found = max(found, have)
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
@pytest.mark.parametrize("graph", [long_skip(), segment(mlp([8] * 5))])
def test_messages_are_those_that_the_programs_have_at_once(
    graph: Graph, microbatches: int, schedule: str
) -> None:
    """4 stages with an edge from 0 to 3 post two receives ahead, on every edge."""
    spec = make_spec(4, microbatches, schedule=schedule, global_batch=2 * microbatches)
    programs = programs_of(graph, spec, 0, 1, 2, 3)
    for memory, program in zip(measure(graph, spec, 0, 1, 2, 3), programs, strict=True):
        sent, expected = set[str](), 0
        for edge in program.edges:
            content = sum(meta.bytes.at(2) for _, meta in edge.values)
            if edge.kind == "activations" and edge.source == program.rank:
                sent.update(name for name, _ in edge.values)
            elif edge.target == program.rank:
                expected += most(edge, program) * content
            else:  # as many gradients under way as the other end has room for
                expected += min(1 + edge.ahead, microbatches) * content
        assert memory.buffers == expected + program.live * 4 * 8 * 2 * len(sent)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("graph", "starts"),
    [
        (segment(mlp([8] * 5)), (0,)),
        (segment(mlp([8] * 5)), (0, 2)),
        (segment(mlp([8] * 5)), (0, 1, 2, 3)),
        (long_skip(), (0, 1, 2, 3)),
        (long_skip(), (0, 1, 3)),
        (long_skip(tied=True), (0, 1, 3)),
        (segment(gpt(tied=True)), (0, 2, 4, 7)),
        (segment(gpt(tied=True)), (0, 4)),
    ],
)
def test_each_process_group_has_a_communicator_on_gpus(
    graph: Graph, starts: tuple[int, ...], kind: Literal["cpu", "cuda"]
) -> None:
    """The edges', those of a tied weight and the norm, and the world's, of the groups that the
    programs make."""
    spec = make_spec(len(starts))
    programs = programs_of(graph, spec, *starts)
    plain = measure(graph, spec, *starts)
    for memory, bare, program in zip(
        measure(graph, spec, *starts, kind=kind), plain, programs, strict=True
    ):
        groups = sum(program.rank in group for group in program.groups)
        groups += len(starts) > 1
        assert memory.buffers - bare.buffers == (kind == "cuda") * groups * COMMUNICATOR_BYTES


@pytest.mark.parametrize("starts", [(0, 4), (0, 2, 4, 7)])
def test_a_communicator_for_checkpoints(starts: tuple[int, ...]) -> None:
    graph, spec = segment(gpt()), make_spec(len(starts))
    saving = replace(spec, checkpoint=Checkpoint(dir="checkpoints"))
    found = measure(graph, saving, *starts, kind="cuda")
    without = measure(graph, spec, *starts, kind="cuda")
    more = {a.buffers - b.buffers for a, b in zip(found, without, strict=True)}
    assert more == {(len(starts) > 2) * COMMUNICATOR_BYTES}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_planner_takes_the_most_that_a_run_of_layers_could_need(
    kind: Literal["cpu", "cuda"],
) -> None:
    """It does not know who is at the other end: here a stage may be b and c, or only b."""
    graph = long_skip(tied=True)
    for starts in ((0, 1, 3), (0, 2, 3), (0, 1, 2)):
        spec = on(kind, make_spec(3))
        footprint = measure_runs(graph, 2)
        for memory, run in zip(
            measure(graph, spec, *starts, kind=kind), pairwise((*starts, 4)), strict=True
        ):
            assert np.sum(peak_bytes(footprint, spec, memory.rank, run)) >= memory.total


@pytest.mark.parametrize("graph", [gpt(tied=True, dropout=True), gpt(2), mlp([4] * 6)])
def test_all_runs_at_once_are_each_run_alone(graph: Graph) -> None:
    """The arrays that the planner looks at agree with sums over the layers of a run."""
    graph = segment(graph)
    footprint, size = measure_runs(graph, 2), len(graph.layers)
    for first in range(size):
        for stop in range(first + 1, size + 1):
            inside = graph.layers[first:stop]
            fqns = {fqn for layer in inside for fqn in layer.parameters}
            made = {o for op in graph.ops for o in op.outputs}
            own = {op.name for layer in inside for op in graph.ops if op.name in layer.ops}
            names = {o.name: {r.name for r in o.operands if hasattr(r, "name")} for o in graph.ops}
            read = {n for op in own for n in names[op]} & made - own
            out = own & {n for op, ns in names.items() if op not in own for n in ns}
            before = {name for layer in graph.layers[:first] for name in layer.ops}
            free = {op.name for op in graph.ops if op.target == "aten.arange.default"}
            assert footprint.state[first, stop] == sum(
                graph.parameters[fqn].meta.bytes.at(2) for fqn in fqns
            )
            assert footprint.received[first, stop] == sum(
                graph.values[n].bytes.at(2) for n in read & before - free
            )
            assert footprint.sent[first, stop] == sum(
                graph.values[n].bytes.at(2) for n in out - free
            )
            assert footprint.saved[first, stop] == sum(
                layer.activation_bytes.at(2) for layer in inside
            )


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_planner_measures_what_it_is_measured_by(kind: Literal["cpu", "cuda"]) -> None:
    graph = segment(gpt(tied=True))
    spec = on(kind, make_spec(3, schedule="gpipe"))
    starts = (0, 3, 5)
    footprint = measure_runs(graph, 2)
    for memory, run in zip(
        measure(graph, spec, *starts, kind=kind),
        pairwise((*starts, len(graph.layers))),
        strict=True,
    ):
        everything = np.sum(peak_bytes(footprint, spec, memory.rank, ...), axis=0)
        assert everything[run] == memory.total


def test_capacity_is_the_device_s() -> None:
    spec = make_spec(1)
    device = replace(spec.cluster.device, memory=77)
    spec = replace(spec, cluster=replace(spec.cluster, device=device))
    assert measure(segment(mlp([8, 8])), spec, 0)[0].capacity == 77


@pytest.mark.parametrize(
    ("count", "text"),
    [(12, "12 bytes"), (1536, "1.5 KiB"), (5 * 2**30, "5.0 GiB"), (2**52, "4096.0 TiB")],
)
def test_show_bytes(count: int, text: str) -> None:
    assert show_bytes(count) == text
