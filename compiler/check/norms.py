"""check_norms: batch norms that a training could not run.

A mean over one value is that value, so torch refuses to train on it, when it comes to such a
microbatch: perhaps at the end of an epoch. Replicas that normalise together wait for each other in
every norm, so that all must come there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import CaptureError, Complaints, PlanError, PpcError
from ..frontend.capture.user import location
from ..frontend.samples import read_samples, steps_per_epoch, total_steps
from ..ir.graph import Graph, Op
from ..ir.norms import counting_norms, is_synced, is_torchs_own, values_per_channel
from ..ir.plan import Plan
from ..ir.spec import Spec, Text


@dataclass(frozen=True, slots=True)
class Batch:
    """A number of samples that a step can have."""

    samples: int
    last: bool
    """Only at the end of an epoch."""
    certain: bool = True
    """False: on some machine."""

    def __str__(self) -> str:
        if not self.last:
            return f"the global batch of {self.samples}"
        return (
            f"a last batch of {self.samples}{'' if self.certain else ', which {stdlib} may leave,'}"
        )


def check_norms(spec: Spec, graph: Graph, plan: Plan) -> None:
    """Raises CaptureError for norms that cannot be computed together, PlanError for microbatches in
    which a norm would have one value for each channel or would wait for ever; all at once."""
    if not counting_norms(graph):
        return
    complaints: list[PpcError] = [*alone(spec, graph, plan), *without_backward(spec, graph, plan)]
    if (
        plan.sync_norms
        and spec.train.compile
        and any(is_synced(graph, op) for op in counting_norms(graph))
    ):
        message = "torch.compile does not see the sums over replicas in a batch norm"
        hint = "compile: false, or sync_batch_norm: false"
        complaints.append(PlanError(message, spec.at("train.compile"), hint))
    batches = possible_batches(spec)
    complaints += [*one_value(spec, graph, plan, batches), *waiting(spec, graph, plan, batches)]
    if len(complaints) > 1:
        raise Complaints(complaints)
    if complaints:
        raise complaints[0]


def possible_batches(spec: Spec) -> list[Batch]:
    """As the data lies here; how much text {stdlib} has differs from machine to machine."""
    size, data = spec.train.global_batch, spec.data
    full = Batch(size, last=False)
    if data.last_batch == "drop":
        return [full]
    if isinstance(data, Text) and any("{stdlib}" in pattern for pattern in data.files):
        shorter = (Batch(samples, last=True, certain=False) for samples in range(1, size))
        return [full, *shorter]
    count = read_samples(spec).count
    last = Batch(count % size, last=True)
    ends = total_steps(spec, count) >= steps_per_epoch(spec, count)
    return [full] * (count >= size) + [last] * (last.samples > 0 and ends)


def one_value(
    spec: Spec, graph: Graph, plan: Plan, batches: Sequence[Batch]
) -> Iterator[PlanError]:
    """Norms with one value for each channel: of all batches of a kind the first."""
    for last in (False, True):
        for batch in (b for b in batches if b.last == last):
            found = [op for op in counting_norms(graph) if has_one(graph, plan, op, batch.samples)]
            if found:
                yield complain(spec, graph, plan, found, batch)
                break


def has_one(graph: Graph, plan: Plan, op: Op, samples: int) -> bool:
    return values_per_channel(graph, op, smallest(graph, plan, op, samples)) == 1


def smallest(graph: Graph, plan: Plan, op: Op, samples: int) -> int:
    """The fewest samples that the norm looks at together."""
    parts = by_number(plan, samples)
    if plan.sync_norms and is_synced(graph, op):
        return min(sum(part) for part in parts if any(part))
    return min(size for part in parts for size in part if size)


def by_number(plan: Plan, samples: int) -> list[tuple[int, ...]]:
    """The sizes of microbatch 0 of all replicas, of microbatch 1, and so on."""
    sizes = plan.sizes(samples)
    return [sizes[i : i + plan.replicas] for i in range(0, len(sizes), plan.replicas)]


def seen_together(plan: Plan) -> tuple[int, ...]:
    """What a batch is divided into: microbatches, or those of one number of all replicas."""
    parts = by_number(plan, plan.global_batch)
    return tuple(map(sum, parts)) if plan.sync_norms else plan.sizes(plan.global_batch)


def complain(spec: Spec, graph: Graph, plan: Plan, norms: Sequence[Op], batch: Batch) -> PlanError:
    """The complaint about norms with one value for each channel in a batch."""
    more = f" and {len(norms) - 1} more" if len(norms) > 1 else ""
    least = smallest(graph, plan, norms[0], batch.samples)
    together = " of all replicas together" if plan.sync_norms else ""
    message = (
        f"{call_of(norms[0])}{more} would have one value for each channel: {batch} makes "
        f"{division(plan)} of {least} sample{'s' * (least > 1)}{together}"
    )
    if batch.last:
        return PlanError(message, spec.at("data.last_batch"), "last_batch: drop")
    remedies = [
        f"microbatches: {count}"
        for count in range(plan.microbatches - 1, 0, -1)
        if not any(
            has_one(graph, replace(plan, microbatches=count), op, batch.samples) for op in norms
        )
    ][:1]
    if spec.parallel.data > 1 and not plan.sync_norms:
        synced = replace(plan, sync_norms=True)
        if not any(has_one(graph, synced, op, batch.samples) for op in norms):
            remedies.append("sync_batch_norm: true")
    hint = " or ".join(remedies) or "a larger global_batch"
    return PlanError(message, spec.at("parallel.microbatches"), hint)


def call_of(op: Op) -> str:
    """`norm (net.py:12)`"""
    return f"the batch norm {op.call[0] or 'of the model'}{f' ({op.where})' * bool(op.where)}"


def division(plan: Plan) -> str:
    """`microbatches, 2 for each of 2 replicas,`"""
    if plan.replicas == 1:
        return f"{plan.microbatches} microbatches, some"
    return f"{plan.microbatches} microbatches for each of {plan.replicas} replicas, some"


def waiting(spec: Spec, graph: Graph, plan: Plan, batches: Sequence[Batch]) -> Iterator[PlanError]:
    """Batches whose microbatch k some replicas have and others lack."""
    synced = [op for op in counting_norms(graph) if is_synced(graph, op)] if plan.sync_norms else []
    for batch in batches:
        parts = by_number(plan, batch.samples)
        torn = next((k for k, part in enumerate(parts) if any(part) and not all(part)), None)
        if synced and torn is not None:
            empty = sum(not size for size in parts[torn])
            yield PlanError(
                f"{call_of(synced[0])} would wait for ever: {batch} leaves {empty} of "
                f"{plan.replicas} replicas without samples in microbatch {torn}, "
                "and replicas normalise together",
                spec.at("data.last_batch"),
                "last_batch: drop",
            )
            return


def alone(spec: Spec, graph: Graph, plan: Plan) -> Iterator[CaptureError]:
    """Norms that replicas cannot compute together."""
    for op in counting_norms(graph) if plan.sync_norms else ():
        if not is_torchs_own(graph, op):
            path, cls = op.call[0] or "the model", graph.modules[op.call[0]].cls
            yield CaptureError(
                f"the batch norm in {path}, of class {cls}, cannot be computed by "
                "all replicas together: it is no call of torch's own nn.BatchNorm1d, 2d or 3d",
                location(op.where, spec.folder),
                "such a module, or sync_batch_norm: false",
            )


def without_backward(spec: Spec, graph: Graph, plan: Plan) -> Iterator[PlanError]:
    """Norms on the stage of the loss, where a microbatch in which nothing counts does not go back;
    the other replicas would wait for it."""
    if not plan.sync_norms or spec.model.weight.kind == "samples":
        return
    last = {name for layer in plan.stages[-1].layers for name in graph.layers[layer].ops}
    for op in counting_norms(graph):
        if op.name in last and is_synced(graph, op):
            yield PlanError(
                f"{call_of(op)} is on the last stage, where a microbatch in which nothing counts, "
                f"by weight: {spec.model.weight.kind}, does not go back; but replicas normalise "
                "together",
                spec.at("model.weight"),
                "weight: samples, sync_batch_norm: false, or cuts behind the norm",
            )
            return
