"""Programs that break a promise are refused, naming rank and instruction.

The mutations are what a wrong pass would do: leave out, repeat, exchange or misaddress one thing.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import kinds, make_pipeline, meta, pipelines

from ppc.analysis.invariants.program import verify_programs
from ppc.errors import InternalError
from ppc.ir.graph import TensorMeta
from ppc.ir.program import (
    Checkpoint,
    Collective,
    Compute,
    Flush,
    Log,
    Loop,
    Microbatch,
    Post,
    Save,
    Send,
    Update,
    Wait,
)
from ppc.ir.schedule import Action, Kind
from ppc.ir.unit import Held
from ppc.passes.communicate import communicate
from ppc.passes.roll import roll

moves = Compute | Send | Wait
work = (Compute, Send, Wait, Post, Flush)
addressed = {Compute, Send, Wait, Post, Flush}


def with_step(program, step):
    return replace(program, actions=(Loop("STEPS", tuple(step)), *program.actions[1:]))


def step_of(program):
    return program.actions[0].body


def changed(programs, rank, step):
    return tuple(with_step(p, step) if p.rank == rank else p for p in programs)


def refused(programs, pipeline, message=""):
    with pytest.raises(InternalError) as error:
        verify_programs(programs, pipeline.plan, pipeline.units)
    assert message in str(error.value)


def renumbered(action, microbatch):
    if isinstance(action, Compute):
        moved = replace(action.action, microbatch=microbatch)
        return Compute(moved, Microbatch(microbatch))
    return replace(action, microbatch=Microbatch(microbatch))


@st.composite
def readdressed(draw, action, program, microbatches):
    """The same instruction for another microbatch, edge, stage or kind of compute."""
    edges = [edge.name for edge in program.edges] + ["activations 7->8"]
    choices = []
    if isinstance(action, moves):
        number = st.integers(-1, microbatches).filter(lambda m: m != action.microbatch.offset)
        choices.append(renumbered(action, draw(number)))
    if isinstance(action, Compute):
        stage = draw(st.integers(0, 6).filter(lambda s: s != action.action.stage))
        kind = "B" if action.action.kind == "F" else "F"
        choices.append(replace(action, action=replace(action.action, stage=stage)))
        choices.append(replace(action, action=replace(action.action, kind=kind)))
    else:
        name = draw(st.sampled_from(edges).filter(lambda name: name != action.edge))
        choices.append(replace(action, edge=name))
    return draw(st.sampled_from(choices))


@settings(max_examples=300)
@given(data=st.data(), pipeline=pipelines(), kind=kinds)
def test_dropped_duplicated_and_readdressed_instructions_are_refused(data, pipeline, kind):
    programs = pipeline.programs(kind)
    program = data.draw(st.sampled_from(programs))
    step = step_of(program)
    of = data.draw(st.sampled_from(sorted({type(a) for a in step} & addressed, key=str)))
    place = data.draw(st.sampled_from([i for i, a in enumerate(step) if type(a) is of]))
    how = data.draw(st.sampled_from(["drop", "duplicate", "readdress"]))
    new = list(step)
    if how == "drop":
        del new[place]
    elif how == "duplicate":
        new.insert(data.draw(st.integers(place, len(step))), step[place])
    else:
        action = readdressed(step[place], program, pipeline.plan.microbatches)
        new[place] = data.draw(action)
    refused(changed(programs, program.rank, new), pipeline)


@settings(max_examples=300)
@given(data=st.data(), pipeline=pipelines(min_stages=2, frozen=False), kind=kinds)
def test_exchanged_instructions_are_refused(data, pipeline, kind):
    """Two computes, two sends or two waits; sends and waits of one microbatch may come in any
    order."""
    programs = pipeline.programs(kind)
    program = data.draw(st.sampled_from(programs))
    step = list(step_of(program))
    of = data.draw(st.sampled_from([Compute, Send, Wait]))
    places = [i for i, action in enumerate(step) if isinstance(action, of)]
    one = data.draw(st.sampled_from(places))
    others = [i for i in places if step[i].microbatch != step[one].microbatch or of is Compute]
    others = [i for i in others if i != one]
    if not others:
        return
    other = data.draw(st.sampled_from(others))
    step[one], step[other] = step[other], step[one]
    refused(changed(programs, program.rank, step), pipeline)


@given(data=st.data(), pipeline=pipelines(), kind=kinds)
def test_wrong_loops_are_refused(data, pipeline, kind):
    programs = roll(pipeline.programs(kind))
    program = data.draw(st.sampled_from(programs))
    step = list(step_of(program))
    places = [i for i, action in enumerate(step) if isinstance(action, Loop)]
    if not places:
        return
    place = data.draw(st.sampled_from(places))
    loop = step[place]
    first = next(i for i, action in enumerate(loop.body) if isinstance(action, Compute))
    stride = replace(loop.body[first], microbatch=replace(loop.body[first].microbatch, stride=2))
    step[place] = data.draw(
        st.sampled_from(
            [
                replace(loop, count=loop.count - 1),
                replace(loop, count=loop.count + 1),
                replace(loop, count="STEPS"),
                replace(loop, body=(*loop.body[:first], stride, *loop.body[first + 1 :])),
            ]
        )
    )
    refused(changed(programs, program.rank, step), pipeline)


tied = (
    Held("a", "a", (), (0, 2), trainable=True),
    Held("b", "b", (), (0, 2), trainable=True),
    Held("c", "c", (), (0, 1, 2), trainable=True),
)
three = make_pipeline(3, 4, skips=((0, 2),), tied=tied, clip=True)
programs = three.programs("1f1b")
norm = Collective("all_reduce", "norm", (0, 1, 2))
sum_a = Collective("all_reduce", "gradient of a", (0, 2))
update = Update(clip=True)


def replaced(rank, old, *new):
    step = [b for a in step_of(programs[rank]) for b in (new if a == old else (a,))]
    return changed(programs, rank, step)


def test_the_example_is_good():
    verify_programs(programs, three.plan, three.units)


ends = {
    "rank 0, Collective all_reduce norm (0, 1, 2): it is missing": replaced(0, norm),
    "rank 2, Collective all_reduce gradient of a (0, 2): it is missing": replaced(2, sum_a),
    "rank 1: a step has 0 updates": replaced(1, update),
    "rank 2: a step has 2 updates": replaced(2, Log(), update),
    "rank 2, Log: it is missing": replaced(2, Log()),
    "gradient of a (0, 2): it runs twice": replaced(0, sum_a, sum_a, sum_a),
    "rank 1, Collective all_reduce gradient of a (0, 2): nothing": replaced(1, norm, sum_a, norm),
    "norm (0, 1): nothing": replaced(0, norm, replace(norm, group=(0, 1))),
    "rank 0, Log: nothing": replaced(0, update, Log(), update),
    "norm (0, 1, 2): nothing at the end": replaced(0, update, Update(clip=False)),
}


@pytest.mark.parametrize("message", ends)
def test_the_end_of_the_step(message):
    refused(ends[message], three, message)


def test_sums_come_after_the_last_transfer_and_before_the_norm():
    step = list(step_of(programs[0]))
    step.remove(sum_a)
    refused(changed(programs, 0, [sum_a, *step]), three, "it comes before the last transfer")
    at = step.index(norm)
    refused(changed(programs, 0, [*step[: at + 1], sum_a, *step[at + 1 :]]), three, "this order")


def test_sums_in_another_order_on_one_rank_deadlock():
    sum_b = replace(sum_a, value="gradient of b")
    step = list(step_of(programs[2]))
    one, other = step.index(sum_a), step.index(sum_b)
    step[one], step[other] = sum_b, sum_a
    refused(changed(programs, 2, step), three, "deadlock: rank 0 waits at Collective all_reduce")


first = Send("activations 0->1", Microbatch(0))
flush = Flush("activations 0->1")
taken = Wait("activations 0->1", Microbatch(0))
back = Flush("gradients 1->0")
post = Post("activations 0->1")
f0 = Compute(Action(0, Kind.F, 0), Microbatch(0))
b0 = Compute(Action(0, Kind.B, 0), Microbatch(0))
w0 = Compute(Action(0, Kind.W, 0), Microbatch(0))
f4 = Compute(Action(0, Kind.F, 4), Microbatch(4))
other_stage = Compute(Action(1, Kind.F, 0), Microbatch(0))
other_action = Compute(Action(0, Kind.F, 1), Microbatch(0))
faults = {
    "rank 0: activations 0->1 moves microbatches [1, 2, 3]": replaced(0, first),
    "rank 0, Send activations 0->1 0: the message is sent twice": replaced(0, first, first, first),
    "rank 0, Send activations 0->1 0: what it sends is not computed": replaced(0, f0, first, f0),
    "Send activations 0->1 0: what it sends is not computed": replaced(0, f0),
    "0->1 0: the edge is flushed already": changed(programs, 0, [flush, *step_of(programs[0])]),
    "rank 0: activations 0->1 is not flushed": replaced(0, flush),
    "rank 0, Flush activations 0->1: the edge is flushed twice": replaced(0, flush, flush, flush),
    "rank 1, 1F(0): its message on activations 0->1 is not waited for": replaced(1, taken),
    "Wait activations 0->1 0: 0 receives are posted by then, not 2": replaced(1, post),
    "activations 0->1: 6 receives are posted, not 5": replaced(1, back, post, back),
    "Wait activations 0->1 0: the message is taken twice": replaced(1, taken, taken, post, taken),
    "rank 1, Send activations 0->1 0: this end of the edge is not here": replaced(1, taken, first),
    "rank 0, 0F(0): it runs twice": replaced(0, f0, f0, f0),
    "rank 0, 0B(0): it comes before its F": replaced(0, f0, b0),
    "rank 0, 0F(4): this rank has no such stage or microbatch": replaced(0, f0, f4),
    "rank 0, 1F(0): this rank has no such stage or microbatch": replaced(0, f0, other_stage),
    "rank 0, 0F(0): the action is 0F1": replaced(0, f0, other_action),
    "is neither forward nor backward": replaced(0, f0, f0, w0),
    "a loop in a step runs its body a number": replaced(0, f0, Loop("STEPS", (f0,))),
}


@pytest.mark.parametrize("message", faults)
def test_computes_and_messages(message):
    refused(faults[message], three, message)


def test_a_missing_compute_is_named():
    lone = make_pipeline(1, 1)
    (program,) = lone.programs("gpipe")
    step = [action for action in step_of(program) if action != b0]
    refused((with_step(program, step),), lone, "rank 0: 0B(0) is missing")


def test_a_group_that_no_rank_makes():
    lone = make_pipeline(3, 1, tied=(tied[0],))
    wrong = tuple(replace(p, groups=p.groups[:-1]) for p in lone.programs("gpipe"))
    refused(
        wrong, lone, "rank 0, Collective all_reduce gradient of a (0, 2): there is no such group"
    )


def edge_changed(rank, name, **changes):
    def change(program):
        edges = tuple(replace(e, **changes) if e.name == name else e for e in program.edges)
        return replace(program, edges=edges)

    return tuple(change(p) if rank in (p.rank, None) else p for p in programs)


@pytest.mark.parametrize(
    ("rank", "changes", "message"),
    [
        (1, {"values": (("x01", TensorMeta((4, 8), "float32")),)}, "differs from its other end"),
        (0, {"window": 7}, "rank 1: activations 0->1 differs from its other end"),
        (None, {"values": (("x01", replace(meta, dtype="float64")),)}, "the units send"),
        (None, {"values": ()}, "rank 0: activations 0->1 holds ()"),
        (None, {"window": 0}, "window 0"),
        (None, {"ahead": 0}, "ahead 0"),
        (None, {"ahead": 2}, "2 receives are posted by then, not 3"),
        (None, {"kind": "gradients"}, "no further edge activations 0->1"),
        (None, {"target": 2}, "rank 0: its edges are not in the order of the groups"),
    ],
)
def test_edges(rank, changes, message):
    refused(edge_changed(rank, "activations 0->1", **changes), three, message)


def change(at, **changes):
    return tuple(replace(p, **changes) if p.rank == at else p for p in programs)


def without(group):
    return tuple(replace(p, groups=tuple(g for g in p.groups if g != group)) for p in programs)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (change(1, live=3), "rank 1: 2 microbatches are live at once, 3 are declared"),
        (change(1, stages=(2,)), "rank 1: it has stages (2,), not (1,)"),
        (change(1, rank=0), "there are programs for ranks [0, 0, 2], not for 0..2"),
        (programs[:2], "there are programs for ranks [0, 1], not for 0..2"),
        (change(1, groups=programs[1].groups[::-1]), "rank 1: its groups are"),
        (change(1, edges=programs[1].edges[::-1]), "rank 1: its edges are not in the order"),
        (change(1, edges=programs[1].edges[1:]), "rank 1: there is no edge for activations 0->1"),
        (change(1, actions=programs[1].actions[:1]), "rank 1: it is not a training loop"),
        (change(1, actions=(*programs[1].actions, Save())), "rank 1: it is not a training loop"),
        (without((2, 1)), "2->1 has no group"),
        (without((0, 1, 2)), "gradient of c (0, 1, 2): there is no such group"),
    ],
)
def test_frames(wrong, message):
    refused(wrong, three, message)


def test_units_must_agree():
    units = (replace(three.units[0], sends=three.units[0].sends[:1]), *three.units[1:])
    refused(programs, three._replace(units=units), "units do not agree on x02: f32[batch, 8] stage")


def test_messages_taken_in_another_order_are_found():
    """Both ranks are right by themselves: one runs its forwards 0, 1, the other 1, 0."""
    two = make_pipeline(2, 2)
    swapped = {0: 1, 1: 0}
    mine, other = two.programs("gpipe")
    step = [
        renumbered(a, swapped[a.microbatch.offset]) if isinstance(a, moves) else a
        for a in step_of(other)
    ]
    refused((mine, with_step(other, step)), two, "activations 0->1: sent in order [0, 1], taken in")


def test_a_schedule_that_needs_more_receives_ahead_is_refused(monkeypatch):
    monkeypatch.setattr("ppc.passes.communicate.receives_ahead", lambda _: 1)
    four = make_pipeline(4, 8, skips=((0, 3),))
    refused(four.programs("1f1b"), four, "deadlock: rank 0 waits at Send activations 0->3 3")


own = Held("d", "d", (), (0,), trainable=True)
unreached = Held("e", "e", (), (1,), trainable=True, reached=False)
double = make_pipeline(
    2, 2, tied=(replace(tied[0], stages=(0, 1)), own, unreached), clip=True, replicas=2
)
doubled = double.programs("1f1b")
gradients = Collective("all_reduce", "gradients of stage 0", (0, 1), 2**22)
shared = Collective("all_reduce", "gradient of a", (0, 1, 2, 3))
norms = {r: Collective("all_reduce", "norm", (r % 2, r % 2 + 2)) for r in range(4)}
loss = Collective("all_reduce", "loss", (2, 3))


def on(rank, old, *new):
    """The programs of the replicas; rank None: all of them changed."""

    def change(step):
        return [b for a in step for b in (new if a == old else (a,))]

    return tuple(with_step(p, change(step_of(p))) if rank in (p.rank, None) else p for p in doubled)


def test_what_replicas_do():
    verify_programs(doubled, double.plan, double.units)
    ends = [[a for a in step_of(p) if not isinstance(a, work)] for p in doubled]
    assert ends == [
        [gradients, shared, norms[0], Update(clip=True)],
        [gradients, shared, norms[1], Update(clip=True)],
        [shared, norms[2], Update(clip=True), loss, Log()],
        [shared, norms[3], Update(clip=True), loss],
    ]
    assert [Save() in p.actions for p in doubled] == [True, False, True, False]
    edges, sums = ((0, 2), (2, 0), (1, 3), (3, 1)), ((0, 1), (0, 1, 2, 3), (2, 3))
    assert {p.groups for p in doubled} == {(*edges, *sums)}  # the norm's are among the edges'
    edges = {(e.source, e.target) for p in doubled for e in p.edges}
    assert edges == {(0, 2), (2, 0), (1, 3), (3, 1)}


wrong_sums = {
    "gradients of stage 0 (0, 1) 4194304: it is missing": on(0, gradients),
    "gradients of stage 0 (0, 1) 4194304: it runs twice": on(1, gradients, gradients, gradients),
    "gradients of stage 0 (0, 2) 4194304: nothing": on(
        0, gradients, replace(gradients, group=(0, 2))
    ),
    "gradients of stage 0 (0, 1): nothing": on(None, gradients, replace(gradients, bucket_bytes=0)),
    "gradients of stage 1 (2, 3) 4194304: nothing": on(
        None, loss, replace(gradients, value="gradients of stage 1", group=(2, 3)), loss
    ),
    "gradient of a (0, 1, 2, 3): it is missing": on(3, shared),
    "gradient of a (0, 2): nothing": on(0, shared, replace(shared, group=(0, 2))),
    "norm (0, 1, 2, 3): nothing": on(0, norms[0], replace(norms[0], group=(0, 1, 2, 3))),
    "norm (0, 2): it is missing": on(2, norms[2]),
    "rank 3, Log: nothing": on(3, loss, loss, Log()),
    "rank 2, Log: it is missing": on(2, Log()),
    "loss (2, 3): it is missing": on(3, loss),
    "rank 0, Collective all_reduce loss (2, 3): nothing": on(0, shared, shared, loss),
    "rank 1: it is not a training loop, then Save on replica 0": tuple(
        replace(p, actions=(p.actions[0], Save())) for p in doubled
    ),
    "rank 2: it is not a training loop, then Save on replica 0": tuple(
        replace(p, actions=p.actions[:1]) if p.rank == 2 else p for p in doubled
    ),
}


@pytest.mark.parametrize("message", wrong_sums)
def test_sums_of_replicas(message):
    refused(wrong_sums[message], double, message)


def test_replicas_do_not_pass_microbatches_to_each_other():
    first, *others = doubled
    edges = tuple(replace(edge, target=3) if edge.source == 0 else edge for edge in first.edges)
    refused((replace(first, edges=edges), *others), double, "rank 0: activations 0->1 has no group")


def test_replicas_run_the_same_instructions():
    """Also where another order would do: whatever is made for the one serves the other."""
    step = step_of(doubled[1])
    first, second = (
        i for i, a in enumerate(step) if isinstance(a, Compute) and a.action.kind == "F"
    )
    order = [second if i == first else first if i == second else i for i in range(len(step))]
    assert order != sorted(order)
    refused(changed(doubled, 1, [step[i] for i in order]), double)


def test_checkpoints():
    """All ranks write them, at the end of a step, in a group of all."""
    schedule = three.order("1f1b")
    saving = communicate(three.plan, three.units, schedule, clip=True, checkpoint=True)
    verify_programs(saving, three.plan, three.units)
    assert [step_of(p)[-1] for p in saving] == 3 * [Checkpoint((0, 1, 2))]
    assert {p.groups[-1] for p in saving} == {(0, 1, 2)}
    first, *others = saving
    refused((with_step(first, step_of(first)[:-1]), *others), three, "some ranks write checkpoints")
    *body, save = step_of(first)
    refused((with_step(first, [*body[:-1], save, body[-1]]), *others), three, "rank 0")
    refused((with_step(first, [*body, save, save]), *others), three, "Checkpoint (0, 1, 2)")
