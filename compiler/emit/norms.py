"""Batch norms that replicas compute together: what stands for torch's own in a script."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..ir.graph import Constructor, Graph
from ..ir.program import Program
from ..ir.unit import Unit
from .groups import member_lines, spell_ranks, written_out
from .layout import wrap


def synced_paths(unit: Unit) -> frozenset[str]:
    """The modules that sum statistics."""
    summing = {collective.op for collective in unit.collectives}
    return frozenset(op.call[0] for op in unit.ops if op.name in summing)


def with_synced(graph: Graph, unit: Unit) -> Graph:
    """The graph with `SyncBatchNorm2d(64)` for `nn.BatchNorm2d(64)`."""
    modules = dict(graph.modules)
    for path in synced_paths(unit):
        module = modules[path]
        built = module.constructor
        if built is not None:
            cls = built.cls.replace("nn.", "Sync")
            modules[path] = replace(module, constructor=replace(built, cls=cls))
    return replace(graph, modules=modules)


def view_norms(
    graph: Graph, program: Program, unit: Unit, *, again: bool, autocast: bool
) -> dict[str, object] | None:
    """What the classes hang on; None for a stage without such norms. `again`: whether some run
    again in the backward, and must not count twice."""
    found = [graph.modules[path].constructor for path in sorted(synced_paths(unit))]
    norms = [constructor for constructor in found if constructor is not None]
    if not norms:
        return None
    (ranks,) = (group for group in program.norm_groups if program.rank in group)
    apply = f"return NormalizeTogether.apply(x, {affine_arguments(norms)}, self)"
    tracked = {option(norm, "track_running_stats") for norm in norms}
    return {
        "classes": sorted({norm.cls.removeprefix("nn.") for norm in norms}),
        "wide": "x.float()" if autocast else "x",  # means of bf16 numbers, in float32
        "widen": autocast,
        "group": f"norm_groups[{ranks}]",
        "apply": list(wrap(apply, 8)),
        "counting": list(update_lines(tracked, again=again)),
    }


def affine_arguments(norms: Sequence[Constructor]) -> str:
    """Weight and bias, or what leaves a value as it is."""
    weighted = {option(norm, "affine") for norm in norms}
    biased = {option(norm, "affine") and option(norm, "bias") for norm in norms}
    weight = either("self.weight", weighted, "torch.ones(x.shape[1], device=x.device)")
    bias = either("self.bias", biased, "torch.zeros(x.shape[1], device=x.device)")
    return f"{weight}, {bias}"


def either(name: str, there: set[bool], other: str) -> str:
    """A name that is there in all norms, in some or in none."""
    if False not in there:
        return name
    return f"{name} if {name} is not None else {other}" if True in there else other


def update_lines(tracked: set[bool], *, again: bool) -> Iterator[str]:
    """The running statistics, for those that keep them."""
    if True not in tracked:
        return
    indent = ""
    if again or False in tracked:
        why = "  # None while it runs again" if again else ""
        yield f"if norm.num_batches_tracked is not None:{why}"
        indent = "    "
    yield f"{indent}norm.num_batches_tracked += 1"
    yield f"{indent}norm.running_mean.lerp_(mean, norm.momentum)"
    yield f"{indent}norm.running_var.lerp_(var * count / (count - 1), norm.momentum)"


def option(norm: Constructor, name: str) -> bool:
    """An option of a batch norm that is on by default."""
    return dict(norm.kwargs).get(name, True) is not False


def norm_group_lines(program: Program) -> Iterator[str]:
    """A group for each stage with such norms."""
    if program.norm_groups:
        yield "# a group for batch norms alone: their sums wait for no gradients"
        made = "dist.new_group(ranks, timeout=TIMEOUT)"
        if len(program.norm_groups) > written_out:
            yield from member_lines(program.norm_groups, "members")
            yield f"norm_groups = {{ranks: {made} for ranks in members}}"
            return
        groups = ", ".join(map(spell_ranks, program.norm_groups))
        yield from wrap(f"norm_groups = {{ranks: {made} for ranks in [{groups}]}}", 0)
