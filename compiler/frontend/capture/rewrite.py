"""What comes before the canonical form: operands that give only a shape become sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...ir.graph import Op, TensorMeta

by_shape = {
    "aten.expand_as.default": ("aten.expand.default", "size"),
    "aten.view_as.default": ("aten.view.default", "size"),
    "aten.reshape_as.default": ("aten.reshape.default", "shape"),
}
"""Operations that read a tensor for its shape -> the same with sizes."""


def with_sizes(ops: Sequence[Op], metas: Mapping[str, TensorMeta]) -> list[Op]:
    """`x.expand_as(y)` as `x.expand(...)`: no stage needs y, and none waits for its gradient."""
    return [with_size(op, metas) if op.target in by_shape else op for op in ops]


def with_size(op: Op, metas: Mapping[str, TensorMeta]) -> Op:
    target, name = by_shape[op.target]
    sizes = metas[str(op.args[1])].shape
    return replace(op, target=target, args=(op.args[0], sizes), arg_names=(op.arg_names[0], name))
