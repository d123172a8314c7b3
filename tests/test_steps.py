"""The text of a step runs just what the program says, with the values that belong to it."""

from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Pipeline, kinds, make_pipeline, meta, pipelines

from ppc.emit.boundary import name_boundary
from ppc.emit.messages import is_general, variable
from ppc.emit.steps import Steps, StepWriter
from ppc.errors import InternalError
from ppc.ir.graph import Input
from ppc.ir.plan import Plan
from ppc.ir.program import Collective, Compute, Flush, Loop, Post, Program, Send, Wait, unroll
from ppc.ir.schedule import Kind
from ppc.ir.unit import Held, Transfer, Unit
from ppc.passes.roll import roll


@dataclass
class Value:
    """A tensor that knows what it is."""

    name: str
    mb: int
    log: list[Any]
    grad: "Value | None" = None
    requires_grad: bool = False

    def requires_grad_(self) -> None:
        self.requires_grad = True

    def backward(self, gradient: "Value | None" = None) -> None:
        self.log.append(("B", self.mb, self.name, gradient and gradient.name))

    def detach(self) -> "Value":
        return self

    double = detach

    def __truediv__(self, _: int) -> "Value":
        return self

    def __mul__(self, _: float) -> "Value":
        return self


class Losses(list):
    """The sum or mean of values, as the list of them."""

    def __add__(self, value: Value) -> "Losses":
        return Losses([*self, value])

    def __truediv__(self, _: int) -> "Losses":
        return self


@dataclass
class Reducer:
    """Notes which backwards it is told of, and which of them is said to be the last."""

    log: list[Any]

    def begin(self, *, last: bool) -> None:
        self.log.append(("begin", last))


@dataclass
class Edge:
    """The messages that a step takes and sends."""

    edge: Any
    log: list[Any]
    multi: bool

    def post(self, _: int) -> None:
        self.log.append(("post", self.edge.name))

    def take(self, mb: int) -> Value | list[Value]:
        self.post(mb + self.edge.ahead)
        self.log.append(("wait", self.edge.name, mb))
        found = [Value(f"{self.edge.name} {v}", mb, self.log) for v, _ in self.edge.values]
        return found if self.multi else found[0]

    def send(self, mb: int, *values: Value) -> None:
        assert all(value.mb == mb for value in values)
        self.log.append(("send", self.edge.name, mb, tuple(value.name for value in values)))

    def wait(self) -> None:
        self.log.append(("flush", self.edge.name))


def write_steps(
    plan: Plan, units: tuple[Unit, ...], program: Program, names=None, longer: Program | None = None
) -> Steps:
    """`longer`: the program for more microbatches, where numbers are to grow with their count."""
    unit = unit_of(units, program)
    results = tuple(v for _, v in unit.outputs) + tuple(dict.fromkeys(t.value for t in unit.sends))
    names = names or name_boundary(units, {})
    longer = longer or program
    return StepWriter(plan, program, longer, unit, names, results, seeds=False).write()


def unit_of(units: tuple[Unit, ...], program: Program) -> Unit:
    """The unit of a program's rank."""
    (unit,) = (unit for unit in units if unit.rank == program.rank)
    return unit


def run_text(plan, units, program, names, sizes, steps=None) -> list[Any]:
    """What a step's text does."""
    steps = steps or write_steps(plan, units, program, names)
    unit = unit_of(units, program)
    log: list[Any] = []
    mbs: list[int] = []  # of the forward that runs

    def stage(*given: Value) -> Value | tuple[Value, ...]:
        mb = mbs[-1]
        assert all(value.mb == mb for value in given)
        log.append(("F", mb, tuple((v.name, v.requires_grad) for v in given)))
        made = [v for _, v in unit.outputs] or list(dict.fromkeys(t.value for t in unit.sends))
        for value in given:  # as the backward leaves it
            value.grad = Value(f"gradient of {value.name}", mb, log)
        found = tuple(Value(v, mb, log) for v in made)
        return found if len(found) > 1 else found[0]

    def backward(outputs, gradients) -> None:
        pairs = [(o.name, g.name) for o, g in zip(outputs, gradients, strict=True)]
        log.append(("B", outputs[0].mb, pairs))

    multi = is_general(program)
    scope: dict[str, Any] = {
        "stage": stage,
        "torch": SimpleNamespace(
            autograd=SimpleNamespace(backward=backward),
            stack=lambda losses: SimpleNamespace(
                mean=lambda: Losses(losses), sum=lambda: Losses(losses)
            ),
            zeros=lambda *_, **__: Losses(),
            float64="float64",
        ),
        "MICROBATCHES": plan.microbatches,
        "sizes": sizes,
        "device": "cpu",
        "reducer": Reducer(log),
        **({"REPLICAS": plan.replicas, "batch_size": 99} if plan.replicas > 1 else {}),
        **{variable(edge, program.rank): Edge(edge, log, multi) for edge in program.edges},
    }
    lines = [steps.state, f"def forward({steps.parameters}):", *steps.forward]
    lines += ["def backward(mb):", *steps.backward] if steps.backward else []
    lines += [f"def run_microbatches({steps.run_parameters}):", *steps.run]
    exec("\n".join(lines), scope)  # noqa: S102  # our own text
    forward = scope["forward"]

    def noted(mb: int, *data: Any) -> None:
        mbs.append(mb)
        forward(mb, *data)

    scope["forward"] = noted
    data = [[Value(i.name, mb, log) for mb in range(plan.microbatches)] for i in unit.inputs]
    batch = [tuple(field[mb] for field in data) for mb in range(plan.microbatches)]
    loss = scope["run_microbatches"](*([data[0]] if len(data) == 1 else [batch] * bool(data)))
    if unit.outputs:
        assert [v.mb for v in loss] == [e[1] for e in log if e[0] == "F"]
    assert not scope.get("live")
    return log


def expected(units, program, sizes) -> list[Any]:
    """What the program says."""
    unit = unit_of(units, program)
    edges = {edge.name: edge for edge in program.edges}
    back = {e.name for e in program.edges if e.kind == "gradients" and e.target == program.rank}
    log: list[Any] = []
    for item in unroll(program.actions[0].body):
        if isinstance(item, Post):
            log.append(("post", item.edge))
        elif isinstance(item, Flush):
            log.append(("flush", item.edge))
        elif isinstance(item, Wait | Send | Compute) and sizes[mb := item.microbatch.offset]:
            if isinstance(item, Wait):
                log.append(("wait", item.edge, mb))
            elif isinstance(item, Send):
                log.append(("send", item.edge, mb, sent(edges[item.edge])))
            elif item.action.kind is Kind.F:
                takes = [
                    (f"{came_by(edges, t, program.rank)} {t.value}", t.gradient)
                    for t in unit.receives
                ]
                takes += [(i.name, False) for i in unit.inputs]
                log.append(("F", mb, tuple(takes)))
            elif unit.has_backward:
                log.append(
                    ("B", mb, *gradient(unit, [e for e in edges.values() if e.name in back]))
                )
    return log


def came_by(edges, transfer: Transfer, rank: int) -> str:
    return next(
        name
        for name, edge in edges.items()
        if edge.kind == "activations" and edge.target == rank
        and transfer.value in [v for v, _ in edge.values]
    )  # fmt: skip


def sent(edge) -> tuple[str, ...]:
    if edge.kind == "activations":
        return tuple(value for value, _ in edge.values)
    sender, receiver = edge.stages
    there = f"activations {receiver}->{sender}"
    return tuple(f"gradient of {there} {value}" for value, _ in edge.values)


def gradient(unit: Unit, edges) -> tuple[Any, ...]:
    """What a backward starts from."""
    if unit.outputs:
        return "loss", None
    pairs = [(value, f"{edge.name} {value}") for edge in edges for value, _ in edge.values]
    return pairs[0] if len(pairs) == 1 else (pairs,)


def compare(pipeline: Pipeline, kind: str, names, sizes=None) -> None:
    plan, units = pipeline.plan, pipeline.units
    if sizes is not None:
        plan = replace(plan, even=False)
    for program in roll(pipeline.programs(kind)):
        told = sizes or [1] * plan.microbatches
        found = run_text(plan, units, program, names, told)
        said = expected(units, program, told)
        if sizes is not None:  # posts of microbatches without samples do nothing
            found, said = ([e for e in log if e[0] != "post"] for log in (found, said))
        assert apart(program, unit_of(units, program), found) == said


def apart(program: Program, unit: Unit, log: list[Any]) -> list[Any]:
    """The log without what the reducer is told: of each backward before it takes anything, and the
    last one is the one that is said to be."""
    reduces = any(isinstance(i, Collective) and i.bucket_bytes for i in program.actions[0].body)
    told = [entry for entry in log if entry[0] in ("begin", "B")]
    if reduces and unit.has_backward:
        assert [entry[0] for entry in told] == ["begin", "B"] * (len(told) // 2)
        assert [last for name, last, *_ in told if name == "begin"] == [
            number == len(told) - 2 for number in range(0, len(told), 2)
        ]
        for before, entry in pairwise(log):
            backs = [e.name for e in program.edges if e.kind == "gradients"]
            assert not (before[0] == "wait" and before[1] in backs and entry[0] == "begin")
    else:
        assert all(name == "B" for name, *_ in told)
    return [entry for entry in log if entry[0] != "begin"]


def grown(pipeline: Pipeline, more: int) -> Pipeline:
    """The pipeline with more microbatches."""
    plan = replace(pipeline.plan, microbatches=pipeline.plan.microbatches + more)
    return pipeline._replace(plan=plan)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", range(1, 9))
def test_an_edited_number_of_microbatches(stages, microbatches, kind):
    """A text in terms of MICROBATCHES is right for each number of them; there is one if there are
    enough of them, and else every number is written out."""
    skips = ((0, 2), (0, 3))[: max(0, stages - 2)]
    pipeline = trained(make_pipeline(stages, microbatches, skips=skips))
    programs = roll(pipeline.programs(kind))
    for program, longer in zip(programs, roll(grown(pipeline, stages).programs(kind)), strict=True):
        plan, units = pipeline.plan, pipeline.units
        names = name_boundary(units, {})
        steps = write_steps(plan, units, program, names, longer)
        assert run_text(plan, units, program, names, [1] * microbatches, steps) == expected(
            units, program, [1] * microbatches
        )
        if not any("MICROBATCHES" in line for line in steps.run):
            assert microbatches <= stages + len(skips)
            continue
        for more in (1, 2, 7):
            other = grown(pipeline, more)
            told = [1] * (microbatches + more)
            wanted = roll(other.programs(kind))[program.rank]
            assert run_text(other.plan, units, wanted, names, told, steps) == expected(
                units, wanted, told
            )


def trained(pipeline: Pipeline) -> Pipeline:
    """The pipeline with something to train wherever a gradient begins."""
    units = tuple(
        replace(u, state=(*u.state, Held(f"own{u.stage}", "", (), (u.stage,), trainable=True)))
        if any(t.gradient for t in u.sends)
        else u
        for u in pipeline.units
    )
    return pipeline._replace(units=units)


def named(pipeline: Pipeline, one: bool) -> dict[str, str]:
    """Names of the values that cross: all wish for one and the same, or for their own."""
    values = {t.value for unit in pipeline.units for t in unit.sends}
    return name_boundary(pipeline.units, dict.fromkeys(values, "x") if one else {})


@settings(deadline=None)
@given(pipelines(), kinds, st.booleans(), st.data())
def test_text_is_the_program(pipeline, kind, one, data):
    inputs = {
        unit.stage: data.draw(st.lists(st.sampled_from("xyz"), unique=True, max_size=2))
        for unit in pipeline.units
    }
    units = tuple(
        replace(u, inputs=tuple(Input(n, n, meta) for n in inputs[u.stage])) for u in pipeline.units
    )
    pipeline = trained(pipeline._replace(units=units))
    compare(pipeline, kind, named(pipeline, one))
    count = pipeline.plan.microbatches
    left = data.draw(st.integers(1, count))
    compare(pipeline, kind, named(pipeline, one), [2] * left + [0] * (count - left))


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", range(1, 9))
def test_every_size(stages, microbatches, kind):
    skips = ((0, 2), (0, 3))[: max(0, stages - 2)]
    pipeline = trained(make_pipeline(stages, microbatches, skips=skips))
    compare(pipeline, kind, named(pipeline, one=True))


def lines_of(kind: str, stages: int, microbatches: int, stage: int) -> list[str]:
    pipeline = trained(make_pipeline(stages, microbatches))
    program = roll(pipeline.programs(kind))[stage]
    longer = roll(grown(pipeline, stages).programs(kind))[stage]
    steps = write_steps(pipeline.plan, pipeline.units, program, longer=longer)
    return [line.removeprefix("    ") for line in steps.run]


def test_1f1b_reads_as_warm_up_steady_state_and_drain():
    assert lines_of("1f1b", 2, 4, 0) == [
        "gradients_from_1.post(0)",
        "forward(0)",
        "for mb in range(1, MICROBATCHES):",
        "    forward(mb)",
        "    backward(mb - 1)",
        "backward(MICROBATCHES - 1)",
        "activations_to_1.wait()",
    ]
    assert lines_of("1f1b", 2, 4, 1) == [
        "activations_from_0.post(0)",
        "for mb in range(MICROBATCHES):",
        "    forward(mb)",
        "    backward(mb)",
        "gradients_to_0.wait()",
        "loss = torch.stack(losses).mean()",
        "losses.clear()",
        "return loss",
    ]


def test_gpipe_reads_as_two_loops():
    assert lines_of("gpipe", 2, 4, 0) == [
        "gradients_from_1.post(0)",
        "for mb in range(MICROBATCHES):",
        "    forward(mb)",
        "for mb in range(MICROBATCHES):",
        "    backward(mb)",
        "activations_to_1.wait()",
    ]


def test_a_value_that_comes_does_not_hide_the_one_that_goes():
    pipeline = trained(make_pipeline(3, 2))
    program = pipeline.programs("gpipe")[1]
    names = {"x01": "x", "x12": "x"}
    steps = write_steps(pipeline.plan, pipeline.units, program, names)
    assert [line.strip() for line in steps.forward] == [
        "x_in = activations_from_0.take(mb)",
        "x_in.requires_grad_()",
        "x = stage(x_in)",
        "activations_to_2.send(mb, x)",
        "live[mb] = x_in, x",
    ]
    assert [line.strip() for line in steps.backward] == [
        "x_in, x = live.pop(mb)",
        "x.backward(gradients_from_2.take(mb))",
        "gradients_to_0.send(mb, x_in.grad)",
    ]


def test_names_that_look_like_others():
    """A stage gets x and x_in, and makes an x."""
    transfers = (
        Transfer("a", 0, 1, meta, gradient=True),
        Transfer("b", 0, 1, meta, gradient=True),
        Transfer("c", 1, 2, meta, gradient=True),
    )
    pipeline = trained(make_pipeline(3, 2, transfers=transfers))
    compare(pipeline, "1f1b", {"a": "x", "b": "x_in", "c": "x"})


def test_another_pattern_is_refused():
    pipeline = trained(make_pipeline(2, 3))
    program = pipeline.programs("1f1b")[0]
    loop, save = program.actions
    moved = [item for item in loop.body if not isinstance(item, Send)]
    spoilt = replace(program, actions=(Loop("STEPS", tuple(moved)), save))
    with pytest.raises(InternalError, match="not"):
        write_steps(pipeline.plan, pipeline.units, spoilt)


def test_forwards_in_another_order_are_refused():
    transfers = (Transfer("x", 0, 1, meta, gradient=False),)
    pipeline = trained(make_pipeline(2, 3, transfers=transfers))
    program = pipeline.programs("gpipe")[0]
    loop, save = program.actions
    body = list(loop.body)
    body[:2], body[2:4] = body[2:4], body[:2]
    with pytest.raises(InternalError, match="forwards in the order"):
        write_steps(
            pipeline.plan,
            pipeline.units,
            replace(program, actions=(Loop("STEPS", tuple(body)), save)),
        )
