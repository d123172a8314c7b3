"""The cuts that the spec names -> the layers where stages begin."""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from ...errors import Complaints, PlanError
from ...ir.graph import Graph
from ...ir.spec import Spec


def resolve_cuts(graph: Graph, spec: Spec) -> tuple[int, ...]:
    """First layers of the stages: 0, then one for each of the spec's cuts.

    A cut names a layer, or a module of several, at the first of which it begins. Raises PlanError,
    or Complaints of several, for names that begin no layer, wrong order and a wrong number of cuts.
    """
    begins = beginnings(graph)
    complaints = list(check_cuts(graph, spec, begins))
    if len(complaints) > 1:
        raise Complaints(complaints)
    if complaints:
        raise complaints[0]
    return (0, *(begins[path] for path in spec.parallel.cuts))


def beginnings(graph: Graph) -> dict[str, int]:
    """Every path that a cut may name -> the layer where it begins, in the model's order."""
    begins: dict[str, int] = {}
    for index, layer in enumerate(graph.layers):
        module = re.split("[@#]", layer.path)[0]  # without the number of the call or run
        parts = module.split(".")
        for path in (*(".".join(parts[: i + 1]) for i in range(len(parts))), layer.path):
            if path:
                begins.setdefault(path, index)
    return begins


def check_cuts(graph: Graph, spec: Spec, begins: Mapping[str, int]) -> Iterator[PlanError]:
    """Everything that is wrong with the spec's cuts, in their order."""
    cuts, pipeline = spec.parallel.cuts, spec.parallel.pipeline
    if len(cuts) != pipeline - 1:
        yield PlanError(
            f"pipeline {pipeline} needs {pipeline - 1} cuts; the spec lists {len(cuts)}",
            spec.at("parallel.cuts"),
            f"pipeline: {len(cuts) + 1}",
        )
    before, name = 0, "the model"
    for number, path in enumerate(cuts):
        where = spec.at(f"parallel.cuts[{number}]")
        if path not in begins:
            message, hint = unknown(graph, path, begins)
            yield PlanError(message, where, hint)
            continue
        layer = begins[path]
        if layer <= before:
            what = "where" if layer == before else "before"
            yield PlanError(
                f"{path} begins {what} {name} begins: the stage between them has no layer",
                where,
                "list the cuts in the model's order, each once",
            )
        before, name = layer, path


def unknown(graph: Graph, path: str, begins: Mapping[str, int]) -> tuple[str, str]:
    """Message and hint for a path that begins no layer."""
    around = [layer.path for layer in graph.layers if path.startswith(f"{layer.path}.")]
    if around and path in graph.modules:
        after = [other for other, index in begins.items() if index == begins[around[0]] + 1][-1:]
        return (
            f"{path} lies inside {around[0]}, which is one layer and is not cut",
            " or ".join([around[0], *after]),
        )
    near = get_close_matches(path, begins, n=3, cutoff=0.5)
    what = "no layer begins at" if path in graph.modules else "the model has no module"
    return f"{what} {path}", " or ".join(near) or f"one of {', '.join(list(begins)[:8])}"
