"""Batch norms that count: operations that normalise by the samples of the microbatch."""

from collections.abc import Iterable

from .graph import Graph, Op, Ref
from .plan import Plan
from .unit import Collective


def counting_norms(graph: Graph) -> tuple[Op, ...]:
    """Those in training mode, and those without running statistics, in order."""
    return tuple(op for op in graph.ops if op.target == "aten.batch_norm.default" and counts(op))


def counts(op: Op) -> bool:
    return dict(zip(op.arg_names, op.args, strict=True)).get("training") is True


def values_per_channel(graph: Graph, op: Op, samples: int) -> int:
    """How many numbers each mean of the norm is over, in a microbatch of so many samples."""
    source = op.args[0]
    if not isinstance(source, Ref):
        raise TypeError(f"{op.name} normalises {source}")
    count = 1
    for dim, size in enumerate(graph.values[source.name].shape):
        if dim != 1:
            count *= size if isinstance(size, int) else size.coefficient * samples
    return count


def is_torchs_own(graph: Graph, op: Op) -> bool:
    """Whether the operation is all of a nn.BatchNorm1d, 2d or 3d."""
    module = graph.modules.get(op.call[0])
    cls = module.constructor.cls if module and module.constructor else ""
    return cls in ("nn.BatchNorm1d", "nn.BatchNorm2d", "nn.BatchNorm3d")


def is_synced(graph: Graph, op: Op) -> bool:
    """Whether replicas normalise together, where the spec asks for it: as torch's SyncBatchNorm, a
    norm in evaluation mode does not, though it may have no running statistics."""
    return is_torchs_own(graph, op) and graph.modules[op.call[0]].training


def norm_sums(graph: Graph, plan: Plan, ops: Iterable[Op]) -> tuple[Collective, ...]:
    """What the replicas of a stage with these ops sum in its batch norms."""
    names = {op.name for op in ops} if plan.sync_norms else frozenset[str]()
    return tuple(
        Collective("all_reduce", f"statistics of {op.call[0]}", "data", "all_reduce", op.name)
        for op in counting_norms(graph)
        if op.name in names and is_synced(graph, op)
    )
