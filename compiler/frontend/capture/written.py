"""Forward must not write to what is trained."""

from collections.abc import Mapping, Sequence

from ...errors import CaptureError
from ...ir.graph import Op, Parameter
from ...ir.spec import Spec
from .canonical import storages
from .user import location


def refuse_written_parameters(
    spec: Spec, ops: Sequence[Op], canonical: Mapping[str, str], parameters: Mapping[str, Parameter]
) -> None:
    """Raises CaptureError where forward writes to one that is trained: microbatches under way need
    it as it was. The gradient of an embedding does not, so `max_norm` may, but not on replicas,
    each of which would scale the rows that it meets."""
    memory = storages(ops)
    for op in ops:
        written = {base for name in op.mutates for base in memory.get(name, {name})}
        for name in sorted(written & canonical.keys()):
            trained = parameters[canonical[name]].meta.requires_grad
            scales = op.target == "aten.embedding_renorm_.default"
            if trained and scales and spec.parallel.data > 1:
                raise CaptureError(
                    f"max_norm scales the rows of {name} that a replica meets, and the others keep "
                    "theirs: replicas would drift apart",
                    location(op.where),
                    "data: 1, or scale what is looked up: rows * (limit / rows.norm(dim=-1, "
                    "keepdim=True)).clamp(max=1)",
                )
            if trained and not scales:
                raise CaptureError(
                    f"forward writes to the parameter {name}, which other microbatches still need",
                    location(op.where),
                    "compute a changed copy: weight = self.weight.clamp(-1, 1)",
                )
