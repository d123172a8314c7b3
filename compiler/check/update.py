"""check_update: the optimizer and the clipping can take the parameters that the graph trains.

Torch would refuse them when the scripts start or at their first step, some classes by a division
by zero.
"""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

from ..errors import Complaints, PlanError
from ..frontend.capture.user import resolve, users_errors
from ..ir.graph import Graph, Op, Parameter, Ref, State
from ..ir.plan import Plan
from ..ir.spec import Group, Optimizer, Spec

sparse_takers = frozenset(("SGD", "Adagrad", "SparseAdam"))
real_only = frozenset(("Adafactor", "Muon", "SparseAdam"))

Found = Iterator[tuple[str, str, str]]  # (path, message, hint)


@dataclass(frozen=True, slots=True)
class Trained:
    """What the update meets."""

    parameters: Mapping[str, Parameter]
    """Trainable, by the name that the model has first for them."""
    dense: tuple[str, ...]
    """Of those: whose gradient has all elements,"""
    sparse: tuple[str, ...]
    """or only the rows that were looked up. The others have none."""
    shared: frozenset[str]
    """Of those: whose gradients are summed over ranks."""

    def shown(self, names: Sequence[str]) -> str:
        """`a.bias [8], b.bias [1] and 3 more`"""
        first = [f"{name} {list(self.parameters[name].meta.shape)}" for name in names[:3]]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(first) + more


def check_update(spec: Spec, graph: Graph, plan: Plan) -> None:
    """Raises PlanError, or Complaints where there are several, at the spec's own line."""
    trained = find_trained(graph, plan)
    checks = (check_groups(spec, graph, trained), check_shapes(spec, trained))
    more = (check_sparse(spec, trained), check_clip(spec, trained), check_course(spec))
    errors = [
        PlanError(message, spec.at(path), hint)
        for check in (*checks, *more)
        for path, message, hint in check
    ]
    if errors:
        raise errors[0] if len(errors) == 1 else Complaints(errors)


def find_trained(graph: Graph, plan: Plan) -> Trained:
    parameters = {
        fqn: p for fqn, p in graph.parameters.items() if p.meta.requires_grad and not p.buffer
    }
    kinds: dict[str, set[bool]] = {}
    for op in ops_with_gradient(graph):
        for ref in op.operands:
            if isinstance(ref, State) and graph.canonical[ref.fqn] in parameters:
                kinds.setdefault(graph.canonical[ref.fqn], set()).add(is_sparse(op, ref))
    held = {fqn: len(stages) * plan.replicas for fqn, stages in plan.placements.items()}
    return Trained(
        parameters=parameters,
        dense=tuple(name for name in parameters if False in kinds.get(name, ())),
        sparse=tuple(name for name in parameters if kinds.get(name) == {True}),
        shared=frozenset(name for name in parameters if held.get(name, 1) > 1),
    )


def ops_with_gradient(graph: Graph) -> Iterator[Op]:
    """The operations through which the loss goes back, the last first."""
    needed = {graph.outputs[0][1]}
    for op in reversed(graph.ops):
        if op.grad and not needed.isdisjoint((*op.outputs, *op.mutates)):
            yield op
            needed |= {
                ref.name
                for ref in op.operands
                if isinstance(ref, Ref) and graph.values[ref.name].requires_grad
            }


def is_sparse(op: Op, parameter: State) -> bool:
    """Whether an op looks rows up in a parameter, whose gradient has these rows alone."""
    given = dict(zip(op.arg_names, op.args, strict=False)) | dict(op.kwargs)
    looked_up = "embedding" in op.target and op.args[0] == parameter
    return looked_up and given.get("sparse") is True


def check_groups(spec: Spec, graph: Graph, trained: Trained) -> Found:
    """Each pattern names something, and no group is left empty by those before it."""
    form = spec.train.optimizer
    for index, group in enumerate(form.groups):
        place, names = f"train.optimizer.groups[{index}].params", list(trained.parameters)
        listed = f"{place}[0]" in spec.locations
        lost = False
        for number, pattern in enumerate(group.params):
            if not any(Group(params=(pattern,)).matches(name) for name in names):
                path = f"{place}[{number}]" if listed else place
                message = f"{pattern!r} matches no trainable parameter"
                yield path, message, other_names(pattern, graph, names)
                lost = True
        if not lost and all(form.group_of(name) != index for name in names):
            message = "all that this group's params match is in groups before it"
            yield place, message, "put this group before them"


def other_names(pattern: str, graph: Graph, names: Sequence[str]) -> str:
    """What may have been meant."""
    alone = Group(params=(pattern,))
    for fqn, parameter in graph.parameters.items():
        if any(map(alone.matches, parameter.aliases)) and fqn in names:
            return f"a tied parameter has its first name: {fqn}"
        if alone.matches(fqn) and not parameter.meta.requires_grad:
            return f"{fqn} is {'a buffer' if parameter.buffer else 'frozen'}"
    close = difflib.get_close_matches(pattern, names, n=1)
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"did you mean {close[0]}?" if close else f"the names are {shown}"


def check_shapes(spec: Spec, trained: Trained) -> Found:
    name, place = spec.train.optimizer.name, "train.optimizer.name"
    shapes = {fqn: p.meta.shape for fqn, p in trained.parameters.items()}
    other = "another class, or requires_grad_(False) for them"
    if name == "Muon":
        flat = [fqn for fqn, shape in shapes.items() if len(shape) != 2]
        if flat:
            yield place, f"Muon takes matrices alone, not {trained.shown(flat)}", other
    empty = {
        "Adafactor": [fqn for fqn, shape in shapes.items() if 0 in shape],
        "Muon": [fqn for fqn, shape in shapes.items() if shape[1:] == (0,)],
    }.get(name)
    if empty:
        yield place, f"{name} takes no parameter without elements, as {trained.shown(empty)}", other
    complex_ones = [f for f, p in trained.parameters.items() if p.meta.dtype.startswith("complex")]
    if complex_ones and name in real_only:
        yield place, f"{name} takes real numbers alone, not {trained.shown(complex_ones)}", other
    if complex_ones and is_used(spec.train.optimizer, "fused"):
        message = f"a fused update takes real numbers alone, not {trained.shown(complex_ones)}"
        yield "train.optimizer.fused", message, "leave fused out"
    if complex_ones and spec.train.clip_value is not None:
        message = f"complex numbers have no order to clip by: {trained.shown(complex_ones)}"
        yield "train.clip_value", message, "clip_norm: 1.0"


def is_used(form: Optimizer, option: str) -> bool:
    """Whether an argument is set to more than 0 for any of the parameters."""
    return any(bool(o.get(option)) for o in (form.options, *(g.options for g in form.groups)))


def check_sparse(spec: Spec, trained: Trained) -> Found:
    form, place = spec.train.optimizer, "train.optimizer.name"
    sparse, shown = trained.sparse, trained.shown(trained.sparse)
    if form.name == "SparseAdam" and trained.dense:
        message = "SparseAdam takes sparse gradients alone; dense are those of"
        hint = "name: adam, or nn.Embedding(sparse=True) for all that is trained"
        yield place, f"{message} {trained.shown(trained.dense)}", hint
    if not sparse:
        return
    if form.name not in sparse_takers:
        message = f"{form.name} takes no sparse gradients, as {shown} has"
        yield place, message, "sparse=False in the embedding, or name: sgd or sparseadam"
    for option in ("weight_decay", "fused"):
        if form.name in sparse_takers and is_used(form, option):
            message = f"{option} takes no sparse gradients, as {shown} has"
            hint = f"leave {option} out, or sparse=False in the embedding"
            yield f"train.optimizer.{option}", message, hint
    shared = [name for name in sparse if name in trained.shared]
    if shared:
        message = "a sparse gradient cannot be summed over ranks, as that of"
        alone = "cuts that keep its uses on one stage" if spec.parallel.data == 1 else "data: 1"
        hint = f"sparse=False in the embedding, or {alone}"
        yield "parallel", f"{message} {trained.shown(shared)}", hint


def check_clip(spec: Spec, trained: Trained) -> Found:
    for key in ("clip_norm", "clip_value"):
        if trained.sparse and getattr(spec.train, key) is not None:
            message = f"torch clips no sparse gradients, as {trained.shown(trained.sparse)} has"
            yield f"train.{key}", message, f"leave {key} out, or sparse=False in the embedding"


def check_course(spec: Spec) -> Found:
    """A callable of the user's makes a number of a step."""
    name = spec.train.lr_schedule.name
    if ":" not in name:
        return
    path = "train.lr_schedule.name"
    where = spec.at(path)
    course = resolve(name, spec.folder, where)
    if not callable(course):
        yield path, f"{name} is not callable", "name a function of the step"
        return
    with users_errors(where, f"{name} failed for step 0"):
        factor = course(0)
    if not isinstance(factor, Real) or not math.isfinite(factor):
        message = f"{name} gives {factor!r} for step 0, not a number"
        yield path, message, "return the factor on lr, such as 1.0"
