"""Every kind of fault is seen and named; equal runs pass."""

import copy
import json
from dataclasses import asdict, replace

import pytest
import torch

from ppc.ir.graph import Parameter, TensorMeta
from ppc.run.compare import Compare, Comparison, worst
from ppc.run.observe import Recording, Step
from ppc.run.reference import Trace, Whole

pytestmark = pytest.mark.torch

LIMIT = 1e-5


def parameter(name, *aliases, **options):
    return Parameter(
        name, TensorMeta((3,), "float32", requires_grad=True), aliases=aliases, **options
    )


parameters = {
    p.fqn: p
    for p in (
        parameter("embed", "head"),
        parameter("up"),
        parameter("frozen"),
        parameter("mean", buffer=True),
        parameter("mask", buffer=True, persistent=False),
        parameter("lifted_tensor_0", buffer=True, persistent=False),
    )
}


def tensors(*names, plus=0.0):
    return {name: torch.arange(3.0) + len(name) + plus for name in names}


def job():
    """Two ranks that hold a tied tensor under a name each, and the reference that they equal."""
    first, second = ("embed", "frozen", "mask"), ("head", "up", "mean", "lifted_tensor_0")
    everything = tensors("embed", "head", "up", "frozen", "mean", "mask")
    everything["head"] = everything["embed"]

    def state(names, plus):
        return {n: everything.get(n, torch.zeros(2)) + plus for n in names}

    def gradients(*names):
        return {n: everything[n] / 10 for n in names}

    def steps(trained, held):
        return tuple(Step(gradients(*trained), state(held, plus)) for plus in (1, 2))

    ranks = [
        Recording(0, state(first, 0), steps(["embed"], first), {}),
        Recording(1, state(second, 0), steps(["head", "up"], second), {}),
    ]
    expected = steps(["embed", "head", "up"], everything)
    buffers = tuple((state(("mean", "mask"), plus),) for plus in (1, 2))
    results = ({"loss": 2.5, "accuracy": 0.5, "gradient_norm": 40.0},
               {"loss": 2.25, "accuracy": 0.625, "gradient_norm": 20.0})  # fmt: skip
    logged = [{"step": i + 1, "lr": 0.1, **row} for i, row in enumerate(results)]
    return copy.deepcopy((ranks, logged, Trace(everything, results, expected, buffers, (), {})))


def compare(ranks, logged, reference, replicas=1, gradient_limit=LIMIT, whole_limit=LIMIT):
    compared = Compare(
        ranks, logged, reference, replicas, parameters, LIMIT, gradient_limit, whole_limit
    )
    return Comparison(worst(compared.rows()))


def failures(comparison):
    assert comparison.ok == (not [row for row in comparison.rows if not row.ok])
    return {(row.kind, row.step, row.name, row.note) for row in comparison.rows if not row.ok}


def test_equal_runs_are_equal():
    comparison = compare(*job())
    assert failures(comparison) == set()
    found = {(row.kind, row.step): row.compared for row in comparison.rows}
    assert found == {
        ("initial", None): 6,
        ("loss", 0): 1,
        ("metric", 0): 2,
        ("gradient", 0): 3,
        ("parameter", 0): 4,
        ("buffer", 0): 2,
        ("loss", 1): 1,
        ("metric", 1): 2,
        ("gradient", 1): 3,
        ("parameter", 1): 4,
        ("buffer", 1): 2,
    }
    assert {row.difference for row in comparison.rows} == {0.0}


def test_the_difference_is_relative_to_large_values_only():
    ranks, logged, reference = job()
    reference.steps[0].gradients["up"][2] = 400.0
    ranks[1].steps[0].gradients["up"][2] = 400.2
    logged[1]["loss"] += 0.25
    comparison = compare(ranks, logged, reference)
    found = {(row.kind, row.step): row.difference for row in comparison.rows}
    assert found["gradient", 0] == pytest.approx(0.2 / 400, rel=1e-4)
    assert found["loss", 1] == pytest.approx(0.25 / 2.25)


def test_small_gradients_are_compared_more_strictly():
    ranks, logged, reference = job()
    for step in (*reference.steps, *ranks[0].steps, *ranks[1].steps):
        for gradient in step.gradients.values():
            gradient.mul_(1e-6)
    assert compare(ranks, logged, reference).ok
    ranks[1].steps[0].gradients["up"] *= 1.01
    assert failures(compare(ranks, logged, reference)) == {("gradient", 0, "up", "")}


@pytest.mark.parametrize("kind", ["gradient", "parameter", "buffer"])
def test_a_tensor_that_is_off_is_named(kind):
    ranks, logged, reference = job()
    name = "mean" if kind == "buffer" else "head"
    step = ranks[1].steps[1]
    (step.gradients if kind == "gradient" else step.state)[name][1] *= 1.01
    assert failures(compare(ranks, logged, reference)) == {(kind, 1, name, "")}


def test_first_values_must_be_equal_bit_by_bit():
    ranks, logged, reference = job()
    ranks[0].initial["frozen"][0] = torch.nextafter(
        ranks[0].initial["frozen"][0], torch.tensor(99.0)
    )
    assert failures(compare(ranks, logged, reference)) == {("initial", None, "frozen", "")}


def test_a_loss_that_is_missing_or_too_many_is_seen():
    ranks, logged, reference = job()
    too_many = {("loss", 2, "loss", "a step too many")}
    assert failures(compare(ranks, [*logged, {"loss": 1.0}], reference)) == too_many
    found = compare(ranks, logged[:1], reference)
    note = "not in metrics.jsonl"
    assert failures(found) == {("loss", 1, "loss", note), ("metric", 1, "accuracy", note)}
    assert next(row.failed for row in found.rows if row.kind == "metric" and row.step == 1) == 2


@pytest.mark.parametrize("name", ["accuracy", "gradient_norm"])
def test_each_metric_and_the_norm_are_compared(name):
    ranks, logged, reference = job()
    assert compare(ranks, logged, reference).ok
    logged[1][name] *= 1.01
    assert failures(compare(ranks, logged, reference)) == {("metric", 1, name, "")}
    del logged[1][name]
    missing = {("metric", 1, name, "not in metrics.jsonl")}
    assert failures(compare(ranks, logged, reference)) == missing


def test_the_norm_is_as_exact_as_the_gradients_and_relative_when_large():
    ranks, logged, reference = job()
    logged[0]["gradient_norm"] += 0.3  # of 40
    assert failures(compare(ranks, logged, reference)) == {("metric", 0, "gradient_norm", "")}
    found = compare(ranks, logged, reference, gradient_limit=1e-2)
    assert found.ok
    off = next(row for row in found.rows if row.kind == "metric" and row.step == 0)
    assert off.difference == pytest.approx(0.3 / 40)
    logged[0]["accuracy"] += 0.005
    found = failures(compare(ranks, logged, reference, gradient_limit=1e-2))
    assert {(kind, step) for kind, step, *_ in found} == {("metric", 0)}


def at_once(reference):
    """The reference whose first step was also taken with the batch in one go, alike."""
    gradients = reference.steps[0].gradients
    whole = Whole({"loss": 2.5}, copy.deepcopy(gradients), copy.deepcopy(gradients))
    return replace(reference, whole=(whole,))


def test_the_batch_in_one_go_gives_the_same():
    ranks, logged, reference = job()
    reference = at_once(reference)
    found = compare(ranks, logged, reference)
    assert found.ok
    assert next(row.compared for row in found.rows if row.kind == "whole") == 4
    reference.whole[0].summed["up"] *= 1.01
    assert failures(compare(ranks, logged, reference)) == {("whole", 0, "up", "")}
    assert compare(ranks, logged, reference, whole_limit=0.02).ok
    loss = replace(at_once(reference).whole[0], results={"loss": 2.6})
    reference = replace(reference, whole=(loss,))
    assert failures(compare(ranks, logged, reference)) == {("whole", 0, "loss", "")}


def test_a_gradient_that_no_rank_has_is_seen_and_so_is_one_too_many():
    ranks, logged, reference = job()
    del ranks[1].steps[0].gradients["up"]
    ranks[0].steps[1].gradients["frozen"] = torch.zeros(3)
    assert failures(compare(ranks, logged, reference)) == {
        ("gradient", 0, "up", "on no rank"),
        ("gradient", 1, "frozen", "not in the model"),
    }


def test_a_tied_gradient_is_there_under_any_of_its_names():
    ranks, logged, reference = job()
    del ranks[0].steps[0].gradients["embed"]
    assert compare(ranks, logged, reference).ok
    del ranks[1].steps[0].gradients["head"]
    assert failures(compare(ranks, logged, reference)) == {("gradient", 0, "embed", "on no rank")}


def test_each_name_of_a_tied_tensor_is_compared():
    for rank, name in ((0, "embed"), (1, "head")):
        ranks, logged, reference = job()
        ranks[rank].steps[0].state[name] += 1
        assert failures(compare(ranks, logged, reference)) == {("parameter", 0, name, "")}


def test_a_tensor_that_no_rank_holds_is_seen_but_a_mask_may_be_left_out():
    for name, expected in (("mask", set()), ("up", {"up"}), ("mean", {"mean"})):
        ranks, logged, reference = job()
        for rank in ranks:
            for held in (rank.initial, *(step.state for step in rank.steps)):
                held.pop(name, None)
        found = failures(compare(ranks, logged, reference))
        assert {name for kind, _, name, _ in found if kind != "gradient"} == expected


def test_a_tensor_that_the_model_has_not_is_seen():
    ranks, logged, reference = job()
    ranks[0].steps[0].state["other"] = torch.zeros(1)
    found = failures(compare(ranks, logged, reference))
    assert found == {("parameter", 0, "other", "not in the model")}


def test_nan_on_one_side_only_is_a_fault():
    ranks, logged, reference = job()
    ranks[1].steps[0].gradients["up"][0] = float("nan")
    expected = {("gradient", 0, "up", "not finite on one side")}
    assert failures(compare(ranks, logged, reference)) == expected
    reference.steps[0].gradients["up"][0] = float("nan")
    assert compare(ranks, logged, reference).ok
    reference.steps[0].gradients["up"][0] = 0.0
    ranks[1].steps[0].gradients["up"][0] = float("inf")
    assert failures(compare(ranks, logged, reference)) == expected


@pytest.mark.parametrize(
    ("changed", "note"),
    [
        (torch.zeros(2, 3), "float32[2, 3], the model's is float32[3]"),
        (torch.zeros(3, dtype=torch.float64), "float64[3], the model's is float32[3]"),
    ],
)
def test_another_shape_or_dtype_is_a_fault(changed, note):
    ranks, logged, reference = job()
    ranks[1].steps[0].state["up"] = changed
    assert failures(compare(ranks, logged, reference)) == {("parameter", 0, "up", note)}


def test_a_rank_without_an_optimizer_is_compared_at_the_end():
    ranks, logged, reference = job()
    frozen = {"frozen": reference.initial["frozen"].clone()}
    for step in ranks[0].steps:
        del step.state["frozen"]
    for step in reference.steps:
        step.state["frozen"].copy_(frozen["frozen"])
    ranks.append(Recording(2, frozen, (), copy.deepcopy(frozen)))
    assert compare(ranks, logged, reference).ok
    ranks[2].final["frozen"] += 1
    assert failures(compare(ranks, logged, reference)) == {("parameter", 1, "frozen", "")}


def test_a_missing_step_is_seen():
    ranks, logged, reference = job()
    ranks[1] = replace(ranks[1], steps=ranks[1].steps[:1])
    found = failures(compare(ranks, logged, reference))
    assert ("gradient", 1, "up", "on no rank") in found
    assert ("parameter", 1, "up", "on no rank") in found


def test_prints_as_a_table_and_as_json():
    ranks, logged, reference = job()
    ranks[1].steps[1].gradients["up"] *= 1.01
    del logged[1]
    comparison = compare(ranks, logged, reference)
    lines = str(comparison).splitlines()
    assert lines[0].split() == ["step", "difference", "limit", "failed", "worst"]
    assert lines[-1] == "NOT EQUAL"
    assert "gradient   2     4.0e-03               7e-06  1 of 3  up" in lines
    assert "loss       2     not in metrics.jsonl  1e-05  1 of 1  loss" in lines
    plain = json.loads(json.dumps(asdict(comparison), allow_nan=False))
    assert plain["rows"][0]["kind"] == "initial"
    assert str(compare(*job())).endswith("equal")


def replicated():
    """Both ranks twice: rank r is replica r % 2. The mean of replica 1 is its own."""
    ranks, logged, reference = job()
    buffers = tuple((own, {n: t + 1 for n, t in own.items()}) for (own,) in reference.buffers)
    again = [replace(copy.deepcopy(ranks[i // 2]), rank=i) for i in range(4)]
    for step in (step for rank in again[1::2] for step in rank.steps):
        for name in step.state.keys() & {"mean", "mask"}:
            step.state[name] += 1
    return again, logged, replace(reference, buffers=buffers)


def test_equal_replicas_are_equal():
    comparison = compare(*replicated(), replicas=2)
    assert failures(comparison) == set()
    found = {(row.kind, row.step): row.compared for row in comparison.rows}
    assert found["gradient", 0] == 6
    assert found["replica", 0] == 4  # parameters of replica 1, no buffers
    assert found["buffer", 0] == 4


def test_parameters_of_replicas_are_equal_bit_by_bit():
    ranks, logged, reference = replicated()
    up = ranks[3].steps[1].state["up"]
    up[0] = torch.nextafter(up[0], torch.tensor(99.0))
    found = failures(compare(ranks, logged, reference, replicas=2))
    assert found == {("replica", 1, "up", "")}


def test_buffers_are_compared_replica_by_replica():
    ranks, logged, reference = replicated()
    ranks[3].steps[0].state["mean"] -= 1  # as replica 0 has it
    found = failures(compare(ranks, logged, reference, replicas=2))
    assert found == {("buffer", 0, "mean", "")}


@pytest.mark.parametrize("rank", range(4))
def test_gradients_of_every_replica_are_compared(rank):
    ranks, logged, reference = replicated()
    name = ("embed", "up")[rank // 2]
    ranks[rank].steps[0].gradients[name] *= 1.01
    found = failures(compare(ranks, logged, reference, replicas=2))
    assert found == {("gradient", 0, name, "")}
