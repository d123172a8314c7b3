"""A rank's program, unit and settings -> the flat values that the templates lay out.

Arithmetic, naming and joining happen here; a template shows what it gets.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from ..errors import visible
from ..ir.graph import Graph, TensorMeta
from ..ir.norms import counting_norms
from ..ir.program import Log, Loop, Program
from ..ir.spec import Spec
from ..ir.unit import Unit
from .checkpoint import checkpoint_constants, view_checkpoint
from .classes import Class
from .constants import training_constants
from .data import DataView, view_data
from .describe import describe_rank, paragraph
from .functions import view_functions
from .job import Job, dtypes
from .layout import wrap
from .leaves import import_lines
from .lift import Lifted, lift
from .loop import loop_lines, view_log
from .mean import weigh_lines
from .messages import goes_by_thread, is_general
from .norms import view_norms, with_synced
from .optimizer import view_clip, view_course
from .recompute import view_recompute
from .reducer import view_reducer, view_replica
from .start import edge_lines, finish_lines, meeting_lines, ready_lines, stage_lines
from .steps import StepWriter, indented
from .weights import spell_weights


@dataclass(frozen=True, slots=True)
class StageView:
    """What the scripts of a stage's replicas share."""

    data: DataView | None
    values: Mapping[str, object]
    """For rank.py.j2."""
    before: tuple[str, ...]
    """Statements that start the job, before the edges"""
    after: tuple[str, ...]
    """and after them."""


def view_stage(job: Job, program: Program, unit: Unit) -> StageView:
    """Lift a stage. `program`, `unit`: those of its first rank."""
    spec, plan = job.spec, job.plan
    lifted = lift_stage(job, unit)
    data = view_data(spec, plan, unit, job.paths)
    again = view_again(job, program, unit)
    steps = StepWriter(
        plan, program, job.longer[program.rank], unit, job.boundary, lifted.results,
        seeds=bool(unit.seeds), norms=bool(again["norms"]) and program.rerun,
        weight=spec.model.weight, autocast=spec.train.precision == "bf16",
    )  # fmt: skip
    values = {
        "world_size": plan.world_size,
        "microbatches": plan.microbatches,
        "training_constants": training_constants(spec, data, even=plan.even),
        "default_dtype": default_dtype(spec),
        **view_functions(job.graph, unit),
        "classes": [view_class(c, job, unit) for c in (*lifted.classes, lifted.stage)],
        "seeds": bool(unit.seeds),
        "compiled": spec.train.compile,
        **view_init(job, unit),
        "data": data and asdict(data),
        "registering": registering(job.graph, unit) + import_lines(job.graph, unit),
        "general": is_general(program),
        "uneven": not plan.even,
        "edges": bool(program.edges),
        "comm": view_comm(job, program) if program.edges else None,
        "reducer": view_reducer(job, program, unit),
        **again,
        **view_weight(job, unit),
        "steps": asdict(steps.write()),
    }
    before, after = stage_lines(job, unit), meeting_lines(job, program, unit, data)
    return StageView(data, values, tuple(before), tuple(after))


def view_rank(job: Job, program: Program, unit: Unit, stage: StageView) -> dict[str, object]:
    """The values for rank.py.j2, all but the imports and the compilation's name."""
    title, manual = describe_rank(job, program, unit, stage.data)
    start = (*stage.before, *edge_lines(job, program), *stage.after)
    return {
        **stage.values,
        "title": title,
        "manual": manual,
        "rank": program.rank,
        **view_replica(job, program, unit),
        **view_update(job, program, unit),
        "checkpoint": view_checkpoint(job, program, unit),
        "checkpoint_constants": list(checkpoint_constants(job, program, unit)),
        "start": [*start, *ready_lines(job, program, unit)],
        "finish": list(finish_lines(program, distributed=job.plan.world_size > 1)),
    }


def registering(graph: Graph, unit: Unit) -> list[str]:
    """Imports of the user's modules that register operations of this stage."""
    found: dict[str, list[str]] = {}
    wanted = graph.registered.keys() - graph.functions.keys()
    for target in sorted({op.target for op in unit.ops} & wanted):
        found.setdefault(graph.registered[target], []).append(target.rpartition(".")[0])
    return [
        f"import {module}  # noqa: F401  # registers torch.ops.{', torch.ops.'.join(operations)}"
        for module, operations in sorted(found.items())
    ]


def lift_stage(job: Job, unit: Unit) -> Lifted:
    """The stage in text."""
    graph = with_synced(job.graph, unit)
    return lift(graph, unit, job.hints, job.boundary, dtypes[job.spec.train.precision])


def view_again(job: Job, program: Program, unit: Unit) -> dict[str, object]:
    """What runs again in the backward, and batch norms, which must not count twice then."""
    again = view_recompute(job, program, unit)
    return again | {
        "sync": view_norms(
            job.graph,
            program,
            unit,
            again=bool(again["norms"]),
            autocast=job.graph.autocast is not None or reads_bfloat16(job.graph, unit),
        )
    }


def reads_bfloat16(graph: Graph, unit: Unit) -> bool:
    """Whether a batch norm of a stage normalises such numbers."""
    norms = (op for op in counting_norms(graph) if op in unit.ops)
    return any(graph.values[str(op.args[0])].dtype == "bfloat16" for op in norms)


def default_dtype(spec: Spec) -> list[str]:
    """The line that makes float64 torch's default; float32 is."""
    exact = spec.train.precision == "fp64"
    return ["", "torch.set_default_dtype(torch.float64)"] if exact else []


def view_init(job: Job, unit: Unit) -> dict[str, object]:
    """The first values of the stage's weights."""
    weights = spell_weights(job.graph, unit)
    seeded = "; seeded by name, it is the same however the model is cut" if weights.draws else ""
    return {
        "draws": weights.draws,
        "saved": weights.saved,
        "init": weights.lines,
        "init_doc": f"The model's own initialisation{seeded}.",
    }


def view_class(form: Class, job: Job, unit: Unit) -> dict[str, object]:
    """A class, its lines indented and wrapped."""
    is_stage = form.name == "Stage"
    comment = f"  # {visible(form.where)}" if form.where else ""
    if is_stage:
        comment = f"  # the part of {job.graph.model} on this rank; names as in the whole model"
    return {
        "name": form.name,
        "base": form.base,
        "given": form.given,
        "comment": comment if len(f"class {form.name}({form.base}):{comment}") <= 100 else "",
        "init_head": list(wrap(f"def __init__({', '.join(['self', *form.parameters])}):", 4)),
        "init": [line for text in form.init for line in wrap(text, 8)],
        "forward_head": list(forward_head(job, unit, form)),
        "forward": [line for item in form.forward for line in wrap(item.text, 8 + item.indent)],
    }


def forward_head(job: Job, unit: Unit, form: Class) -> Iterator[str]:
    """`def forward(self, x):`, the stage's with its shapes if they fit."""
    *lines, last = wrap(f"def forward({', '.join(['self', *form.arguments])}):", 4)
    shapes = stage_shapes(job, unit) if form.name == "Stage" else ""
    yield from lines
    yield last + shapes if not lines and len(last + shapes) <= 100 else last


def stage_shapes(job: Job, unit: Unit) -> str:
    """`  # int64[batch, 128] -> float32[batch, 128, 128]`"""
    taken = [t.meta for t in unit.receives] + [i.meta for i in unit.inputs]
    given = list(dict.fromkeys(t.value for t in unit.sends))
    results = ["loss"] * bool(unit.outputs) + [
        show_meta(job.graph.values[value]) for value in given
    ]
    return f"  # {', '.join(map(show_meta, taken))} -> {', '.join(results)}"


def show_meta(meta: TensorMeta) -> str:
    return f"{meta.dtype}[{', '.join(map(str, meta.shape))}]"


def view_weight(job: Job, unit: Unit) -> dict[str, object]:
    """The function that weighs microbatches, on the rank of the loss, and what it imports."""
    weight, inputs = job.spec.model.weight, job.graph.weight
    if weight.kind == "samples" or not unit.outputs:
        return {"weigh": [], "weigh_doc": "", "modules": []}
    what = "what weight_of says"
    if weight.kind == "tokens":
        what = f"tokens of {' and '.join(inputs)} that are not {weight.ignore_index}"
    module, name = job.weight_module, weight.kind.rpartition(":")[2]
    return {
        "weigh": list(indented(weigh_lines(job.plan, unit, weight, inputs))),
        "weigh_doc": f"Shares of the microbatches in the mean: {what}.",
        "modules": [] if weight.kind == "tokens" else [f"from {module} import {name} as weight_of"],
    }


def view_comm(job: Job, program: Program) -> dict[str, object]:
    """What the class Edge does on this rank."""
    ahead = [edge.ahead for edge in program.edges if edge.target == program.rank]
    windows = [edge.window for edge in program.edges if edge.source == program.rank]
    words = []
    if ahead:
        words.append(f"{'one receive' if max(ahead) == 1 else f'{max(ahead)} receives'} ahead")
    if windows:
        sends = "one send" if max(windows) == 1 else f"{max(windows)} sends"
        words.append(f"at most {sends} under way")
    doc = f"Messages from rank to rank, in order; {', '.join(words)}."
    by_thread = goes_by_thread(job)
    if by_thread:
        doc += " Broadcasts in groups of two: gloo's isend copies before it returns."
    return {
        "doc": paragraph(doc, 89),
        "by_thread": by_thread,
        "dtype": f"torch.{dtypes[job.spec.train.precision]}",
        "receives": bool(ahead),
        "sends": bool(windows),
        "ahead": max(ahead, default=1),
        "left": max(windows, default=1) - 1,
        "size": "MICROBATCH_SIZE" if job.plan.even else "sizes[mb]",
    }


def view_update(job: Job, program: Program, unit: Unit) -> dict[str, object]:
    """Learning rate, clipping, log and the lines of the training loop."""
    trains = any(held.trainable for held in unit.state)
    loop = next(item for item in program.actions if isinstance(item, Loop))
    after = job.spec.train.after_step
    name = after.partition(":")[2] if after else ""
    return {
        "after_modules": [f"from {job.after_module} import {name} as after_step"] if name else [],
        **view_course(job, unit, needed=trains or Log() in loop.body),
        "clip": view_clip(job, program, unit) if job.spec.train.clip_norm is not None else None,
        "log": view_log(job, unit) if Log() in loop.body else None,
        "loop": list(loop_lines(job, program, unit, loop.body)),
    }
