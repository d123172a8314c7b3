"""check_ranges: numbers that the data may hold are not beyond what is looked up by them."""

from collections.abc import Iterator

from ..errors import CaptureError, Complaints
from ..frontend.capture.canonical import storages
from ..frontend.capture.user import location
from ..ir.graph import Graph, Op
from ..ir.spec import Random, Spec, Text

lookups = {
    "aten.embedding": (0, "rows of the embedding"),
    "aten.cross_entropy_loss": (1, "classes"),
    "aten.nll_loss_nd": (1, "classes"),
}
"""Operations whose second operand looks up in a dimension of the first, and what lies there."""


def check_ranges(spec: Spec, graph: Graph) -> None:
    """Raises CaptureError, or Complaints of several, at the user's lines: the samples that are
    tried may all be within the range, and those of a later step beyond it."""
    complaints = list(beyond(spec, graph))
    if len(complaints) > 1:
        raise Complaints(complaints)
    if complaints:
        raise complaints[0]


def beyond(spec: Spec, graph: Graph) -> Iterator[CaptureError]:
    """Fields that hold larger numbers, each once."""
    memory = storages(graph.ops)
    fields = {i.name: i.field for i in graph.inputs}
    shapes = {fqn: parameter.meta.shape for fqn, parameter in graph.parameters.items()}
    shapes |= {name: meta.shape for name, meta in graph.values.items()}
    told = set()
    for op in graph.ops:
        dim, things = lookups.get(op.target.rpartition(".")[0], (0, ""))
        if not things or len(op.operands) < 2:
            continue
        table, index = map(str, op.operands[:2])
        shape = shapes.get(graph.canonical.get(table, table))
        size = shape[min(dim, len(shape) - 1)] if shape else None
        field = next((fields[b] for b in memory.get(index, {index}) if b in fields), "")
        high = highest(spec, field)
        if isinstance(size, int) and high > size and field not in told:
            told.add(field)
            yield refusal(spec, op, field, high, size, things)


def highest(spec: Spec, field: str) -> int:
    """One above the largest number that the spec lets a field hold; 0 if it does not say."""
    if isinstance(spec.data, Random) and field in spec.data.fields:
        return spec.data.fields[field].high or 0
    return 256 if isinstance(spec.data, Text) and field in ("tokens", "labels") else 0


def refusal(spec: Spec, op: Op, field: str, high: int, size: int, things: str) -> CaptureError:
    random, own = isinstance(spec.data, Random), location(op.where, spec.folder)
    place = spec.at(f"data.fields.{field}.high" if random else "data")
    found = f"the field {field} ({place})" if own else f"the field {field}"
    return CaptureError(
        f"{found} holds numbers below {high}, and there are {size} {things}",
        own or place,
        f"high: {size}, or {high} {things}" if random else f"{high} {things}",
    )
