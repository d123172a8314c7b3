"""Which modules run again in the backward, and what is kept then.

    parallel: {recompute: [blocks]}    each of blocks.0, blocks.1, ... keeps only what it is given

A path stands for the module's calls, where they lie within layers, or else for those of its
children. What the user's own torch.utils.checkpoint calls is added.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches

from ...errors import CaptureError, Complaints, PlanError
from ...ir.graph import Amount, CallId, Graph, Layer, Op, Ref, references
from ...ir.spec import Spec
from .batch import batch_sizes
from .build import numerics
from .canonical import storages
from .fields import read_fields
from .measure import measure_again
from .user import location


def recompute(spec: Spec, graph: Graph) -> Graph:
    """Before: a graph with layers. After: `Graph.recompute` names the modules, and bytes count so.

    Raises PlanError for a path that names no module, CaptureError for a forward that would not be
    the same the second time.
    """
    if spec.parallel.recompute == "stage":
        refuse_writes(spec, graph, graph.ops)
    users = (path for module in graph.recompute for path in called(graph, module))
    paths = outermost(dict.fromkeys([*users, *listed(spec, graph)]))
    if not paths:
        return replace(graph, recompute=())
    again = {call for call in graph.calls if call[0] in paths}
    around = {
        op.name: next(filter(again.__contains__, chain(graph, op.call)), None) for op in graph.ops
    }
    inside = [op for op in graph.ops if around[op.name]]
    refuse_writes(spec, graph, inside)
    refuse_written_arguments(spec, graph, around)
    sizes = batch_sizes(read_fields(spec))
    with numerics(spec):
        inner = {name: call for name, call in around.items() if call}
        ops, own = measure_again(graph, inner, given(graph, again), sizes)
    layers = tuple(
        recount(layer, {op.name: op for op in ops}, around, own) for layer in graph.layers
    )
    return replace(graph, recompute=paths, ops=ops, layers=layers)


def outermost(paths: Mapping[str, None]) -> tuple[str, ...]:
    """Without those inside others: their calls run again with them."""
    return tuple(p for p in paths if not any(p.startswith(f"{other}.") for other in paths))


def listed(spec: Spec, graph: Graph) -> tuple[str, ...]:
    """The modules that the spec's paths stand for."""
    if isinstance(spec.parallel.recompute, str):
        return ()
    found: dict[str, None] = {}
    complaints = []
    for number, path in enumerate(spec.parallel.recompute):
        where = spec.at(f"parallel.recompute[{number}]")
        modules = tuple(called(graph, path)) if path in graph.modules else ()
        found.update(dict.fromkeys(modules))
        if path not in graph.modules:
            near = get_close_matches(path, graph.modules, n=3, cutoff=0.5)
            hint = " or ".join(near) or f"one of {', '.join(layer_paths(graph)[:8])}"
            complaints.append(PlanError(f"the model has no module {path}", where, hint))
        elif not modules:
            hint = f"a module that forward calls, such as {', '.join(layer_paths(graph)[:4])}"
            complaints.append(
                PlanError(f"no call of {path} could run again by itself", where, hint)
            )
    if len(complaints) > 1:
        raise Complaints(complaints)
    if complaints:
        raise complaints[0]
    return tuple(found)


def called(graph: Graph, path: str) -> Iterator[str]:
    """The module, if its calls lie within layers, or those of its children that do."""
    within = {
        call for layer in graph.layers if layer.call for call in descendants(graph, layer.call)
    }
    calls = [call for call in graph.calls if call[0] == path]
    if calls and within.issuperset(calls):
        yield path
        return
    module = graph.modules[path]
    for child in module.children:
        yield from called(graph, f"{path}.{child}".lstrip("."))


def descendants(graph: Graph, call: CallId) -> set[CallId]:
    """A call and those made in it."""
    return {other for other in graph.calls if call in chain(graph, other)}


def chain(graph: Graph, call: CallId) -> Iterator[CallId]:
    """A call and those around it, the outermost last."""
    at: CallId | None = call
    while at is not None:
        yield at
        at = graph.calls[at].parent if at in graph.calls else None


def layer_paths(graph: Graph) -> list[str]:
    return [layer.path for layer in graph.layers if layer.call and layer.path]


def given(graph: Graph, calls: set[CallId]) -> dict[CallId, tuple[str, ...]]:
    """The values that each call is given."""
    return {
        call: tuple(
            ref.name
            for _, value in graph.calls[call].arguments
            for ref in references(value)
            if isinstance(ref, Ref)
        )
        for call in calls
    }


def recount(
    layer: Layer,
    ops: Mapping[str, Op],
    around: Mapping[str, CallId | None],
    own: Mapping[CallId, Amount],
) -> Layer:
    """The layer with what is kept of it, and what runs again."""
    inside = [ops[name] for name in layer.ops]
    again = [op for op in inside if around[op.name]]
    freed: dict[CallId, Amount] = {}
    for at, op in enumerate(inside):  # the last of a call stands
        if call := around[op.name]:
            freed[call] = sum((later.saved_bytes for later in inside[at + 1 :]), Amount())
    largest = max(freed, key=lambda call: own[call].at(1) - freed[call].at(1), default=None)
    return replace(
        layer,
        activation_bytes=sum((op.saved_bytes for op in inside), Amount()),
        again_bytes=own[largest] if largest else Amount(),
        freed_bytes=freed[largest] if largest else Amount(),
        again_flops=sum((op.flops for op in again), Amount()),
    )


def refuse_writes(spec: Spec, graph: Graph, ops: Iterable[Op]) -> None:
    """Raises CaptureError where an op writes state that it would write again: only the running
    statistics of torch's batch norms can be kept from that."""
    for op in ops:
        module = graph.modules.get(op.call[0])
        norm = module and module.constructor and module.constructor.cls.startswith("nn.BatchNorm")
        written = [name for name in op.mutates if name in graph.canonical]
        if written and not norm:
            raise CaptureError(
                f"forward writes {written[0]}, and would write it again when it runs again",
                location(op.where, spec.folder),
                "recompute: none, or the paths of other modules",
            )


def refuse_written_arguments(spec: Spec, graph: Graph, around: Mapping[str, CallId | None]) -> None:
    """Raises CaptureError where a module writes over what it is given: it would be given that."""
    memory = storages(graph.ops)
    arguments = given(graph, {call for call in around.values() if call})
    for op in graph.ops:
        call = around[op.name]
        kept = (
            {base for name in arguments.get(call, ()) for base in memory.get(name, {name})}
            if call
            else set()
        )
        if call and any(kept & memory.get(name, {name}) for name in op.mutates):
            raise CaptureError(
                f"{call[0]} writes over what it is given, and would be given that the second time",
                location(op.where, spec.folder),
                "recompute the module around it, or write a new tensor",
            )
