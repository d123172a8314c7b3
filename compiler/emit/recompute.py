"""What runs again in a rank's backward: the stage, or modules of it."""

from collections.abc import Iterator

from ..ir.program import Program
from ..ir.unit import Unit
from .expression import quote
from .job import Job
from .layout import wrap


def view_recompute(job: Job, program: Program, unit: Unit) -> dict[str, object]:
    """What the functions for it hang on; `recompute` and `norms` are empty where not needed."""
    paths = recomputed(job, unit)
    inside = [op for op in unit.ops if program.rerun or covered(op.call[0], paths)]
    norms = {cls for op in inside if op.mutates and (cls := norm_class(job, op.call[0]))}
    classes = ", ".join(sorted(norms))
    options = ["use_reentrant=False"]
    if not any(op.random for op in inside):
        options.append("preserve_rng_state=False")
    if norms:
        options.append("context_fn=lambda: (contextlib.nullcontext(), statistics_kept(module))")
    call = f"torch.utils.checkpoint.checkpoint, module.forward, {', '.join(options)}"
    return {
        "norms": f"({classes})" if len(norms) > 1 else classes,
        "recompute": list(wrap(f"module.forward = functools.partial({call})", 4)) if paths else [],
    }


def recomputed(job: Job, unit: Unit) -> list[str]:
    """The modules of a stage that run again."""
    calls = {op.call[0] for op in unit.ops}
    return [path for path in job.plan.recompute if any(covered(call, [path]) for call in calls)]


def covered(path: str, modules: list[str]) -> bool:
    """Whether a module is one of these, or inside one."""
    return any(path == module or path.startswith(f"{module}.") for module in modules)


def norm_class(job: Job, path: str) -> str:
    """The class of a batch norm of torch's, "" for any other module."""
    module = job.graph.modules.get(path)
    cls = module.constructor.cls if module and module.constructor else ""
    return cls if cls.startswith("nn.BatchNorm") else ""


def recompute_lines(job: Job, unit: Unit) -> Iterator[str]:
    """Make the modules run again."""
    paths = recomputed(job, unit)
    if len(paths) == 1:
        yield from wrap(f"recompute(stage.get_submodule({quote(paths[0])}))", 0)
    elif paths:
        yield from wrap(f"for path in [{', '.join(map(quote, paths))}]:", 0)
        yield "    recompute(stage.get_submodule(path))"
