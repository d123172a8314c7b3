"""How a rank writes its messages: the edges' names, and the shapes that go over them."""

from collections.abc import Sequence

from ..ir.graph import Dim, TensorMeta
from ..ir.program import Edge, Program
from .job import Job

LARGE = 2**20
"""Bytes of a message that take longer to copy than a thread to start."""
REDUCIBLE = {
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool",
}  # fmt: skip
"""What gloo's collectives take."""


def variable(edge: Edge, rank: int) -> str:
    """`activations_from_0`, `gradients_to_1`: the number is the other stage's."""
    source, target = edge.stages
    return f"{edge.kind}_to_{target}" if edge.source == rank else f"{edge.kind}_from_{source}"


def label(edge: Edge) -> str:
    """What ranks call an edge to people, `activations 0->1`: the numbers are the ranks'."""
    return f"{edge.kind} {edge.source}->{edge.target}"


def incoming(program: Program, kind: str) -> list[Edge]:
    """The edges of a kind that end at a rank."""
    return [e for e in program.edges if e.kind == kind and e.target == program.rank]


def outgoing(program: Program, kind: str) -> list[Edge]:
    """The edges of a kind that start at a rank."""
    return [e for e in program.edges if e.kind == kind and e.source == program.rank]


def unpack(names: Sequence[str], *, multi: bool) -> str:
    """The left side that takes a message apart."""
    return f"({names[0]},)" if multi and len(names) == 1 else ", ".join(names)


def is_general(program: Program) -> bool:
    """Whether a message of this rank is more than one tensor, or its samples are not its first
    dimension."""
    return any(
        len(edge.values) > 1 or message_shape(edge, edge.values[0][1])[:1] != (Dim(1),)
        for edge in program.edges
    )


def in_memory_order(name: str, meta: TensorMeta) -> str:
    """A value as it is sent: with its memory's outermost dimension first."""
    return f"{name}.permute({', '.join(map(str, meta.order))})" if meta.order else name


def message_shape(edge: Edge, meta: TensorMeta) -> tuple[int | Dim, ...]:
    """The shape in which a value goes over an edge; gradients go as they are."""
    if edge.kind == "gradients" or not meta.order:
        return meta.shape
    return tuple(meta.shape[dim] for dim in meta.order)


def goes_by_thread(job: Job) -> bool:
    """Whether messages go as broadcasts in groups of two ranks.

    Gloo's isend copies the message in the thread that calls it, and a rank with a large one stands
    still meanwhile; collectives copy in gloo's own threads.
    """
    if job.spec.cluster.device.kind != "cpu":
        return False
    ranks = job.plan.pipelines()[0]  # replicas send the same
    messages = [edge.values for rank in ranks for edge in job.programs[rank].edges]
    largest = max(
        sum(meta.bytes.at(job.plan.microbatch_size) for _, meta in values) for values in messages
    )
    kinds = {meta.dtype for values in messages for _, meta in values}
    return largest >= LARGE and kinds <= REDUCIBLE
