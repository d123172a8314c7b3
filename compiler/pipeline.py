"""The compiler on one page: every phase, in order.

Forms go from pass to pass, and each is verified right where it comes from, always.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from .analysis.cost import Costs, price
from .analysis.invariants.graph import verify_graph
from .analysis.invariants.plan import verify_plan
from .analysis.invariants.program import verify_programs
from .analysis.invariants.schedule import verify_schedule
from .analysis.invariants.unit import verify_units
from .analysis.predict import predict, step_s
from .check.after import check_after_step
from .check.capture import check_capture, microbatch_sizes
from .check.mean import check_mean
from .check.norms import check_norms, seen_together
from .check.ranges import check_ranges
from .check.size import check_size
from .check.text import check_text
from .check.update import check_update
from .emit.boundary import name_boundary
from .emit.hints import name_values
from .emit.job import Job
from .emit.plan_text import PlanPage, make_plan_page
from .emit.render import render
from .errors import PlanError, PpcError
from .frontend.capture.capture import capture
from .frontend.capture.recompute import recompute
from .frontend.origin import Origin, find_origin
from .frontend.sources import copied_modules, data_paths, relative, script_module, source_name
from .ir.graph import Graph
from .ir.plan import Plan
from .ir.program import Program
from .ir.report import File, Report
from .ir.show import show_form
from .ir.spec import Spec
from .ir.unit import Unit
from .passes.communicate import communicate
from .passes.localize import localize
from .passes.order import order
from .passes.place import place, rivals
from .passes.roll import roll
from .passes.segment import segment
from .version import __version__

Form = TypeVar("Form")
Observer = Callable[[str, object], None]
"""Is told the name of each pass and the form that it made."""

passes = ("capture", "segment", "recompute", "place", "localize", "order", "communicate", "roll")


def compile(
    spec: Spec, folder: Path | None = None, observe: Observer = lambda *_: None
) -> tuple[File, ...]:
    """A spec -> every file of its output. `folder`: where they will lie, generated/NAME by default.

    Raises CaptureError and PlanError for what the user can mend; nothing is written.
    """
    job = lower(spec, folder or Path("generated") / spec.name, observe)
    own = dict.fromkeys((*job.graph.registered.values(), *job.graph.leaves.values()))
    files = render(job, job.graph.saved, copied_modules(spec, own))
    first = job.plan.pipelines()[0]  # replicas run the same stages
    scripts = [str(files[rank].text) for rank in first]
    units = tuple(unit for unit in job.units if unit.rank in first)
    check_text(spec, job.graph, units, scripts, *microbatch_sizes(spec, job.plan, job.graph))
    check_after_step(spec, job.graph, units, scripts)
    return files


def lower(spec: Spec, folder: Path, observe: Observer = lambda *_: None) -> Job:
    """A spec -> the forms from which the scripts are rendered."""

    def checked(name: str, form: Form, verify: Callable[[Form], None]) -> Form:
        verify(form)
        observe(name, form)
        return form

    origin = find_origin(spec)
    graph = checked("capture", capture(spec), verify_graph)  # the batch stays symbolic
    graph = checked("segment", segment(graph), verify_graph)
    graph = checked("recompute", recompute(spec, graph), verify_graph)
    costs = price(graph, spec)
    plan = checked("place", place(graph, costs, spec), lambda p: verify_plan(p, graph, spec))
    check_norms(spec, graph, plan)
    check_update(spec, graph, plan)
    check_ranges(spec, graph)
    check_capture(spec, graph, plan)
    told = check_mean(spec, graph, seen_together(plan)) + check_size(graph)
    graph = replace(graph, messages=graph.messages + told)
    observe("check", graph)
    units = checked(
        "localize", localized(spec, graph, plan), lambda u: verify_units(u, graph, plan)
    )
    schedule = checked(
        "order", order(plan, spec.parallel.schedule), lambda s: verify_schedule(s, plan)
    )
    wanted = {"clip": spec.train.clip_norm is not None, "checkpoint": spec.checkpoint is not None}
    programs = checked(
        "communicate",
        communicate(plan, units, schedule, **wanted),
        lambda p: verify_programs(p, plan, units),
    )
    programs = checked("roll", roll(programs), lambda p: verify_programs(p, plan, units))
    more = replace(plan, microbatches=plan.microbatches + len(plan.stages))
    longer = communicate(more, units, order(more, spec.parallel.schedule), **wanted)
    report = predict(
        graph, plan, schedule, programs, costs, spec, runners_up(graph, costs, plan, spec)
    )
    return make_job(spec, folder, origin, graph, plan, units, programs, roll(longer), report)


def localized(spec: Spec, graph: Graph, plan: Plan) -> tuple[Unit, ...]:
    """The units; a plan that gives none is the spec's fault, so it gets a place there."""
    try:
        return localize(graph, plan)
    except PlanError as error:
        raise PlanError(error.message, spec.at("parallel.cuts"), error.hint) from error


def runners_up(
    graph: Graph, costs: Costs, plan: Plan, spec: Spec
) -> tuple[tuple[str, float, str], ...]:
    """(plan, seconds of a step, why it lost) of the plans one would try, the fastest first."""
    found = []
    for name, rival, why in rivals(graph, costs, plan, spec):
        with suppress(PlanError):  # of a stage that makes nothing
            units, schedule = localize(graph, rival), order(rival, spec.parallel.schedule)
            programs = communicate(rival, units, schedule, clip=spec.train.clip_norm is not None)
            found.append((name, step_s(graph, rival, programs, costs, spec), why))
    return tuple(sorted(found, key=lambda rival: rival[1]))


def make_job(
    spec: Spec, folder: Path, origin: Origin, graph: Graph, plan: Plan, units: tuple[Unit, ...],
    programs: tuple[Program, ...], longer: tuple[Program, ...], report: Report,
) -> Job:  # fmt: skip
    """The forms with what the text says beside them: names of values, sources, digests."""
    hints = name_values(graph)
    return Job(
        version=__version__,
        source=source_name(spec),
        spec_digest=origin.spec,
        sources=origin.sources,
        versions=origin.versions,
        spec=spec,
        graph=graph,
        plan=plan,
        units=units,
        programs=programs,
        longer=longer,
        report=report,
        hints=hints,
        boundary=name_boundary(units, hints),
        paths=data_paths(spec, folder),
        checkpoints=relative(spec.checkpoint.dir, spec, folder) if spec.checkpoint else "",
        weight_module=script_module(spec.model.weight.kind),
        course_module=script_module(spec.train.lr_schedule.name),
        after_module=script_module(spec.train.after_step or ""),
    )


def show(spec: Spec, after: str) -> str:
    """The printed form after a pass. Raises PpcError for a name that is none."""
    if after not in passes:
        raise PpcError(f"there is no pass {after!r}", hint=f"the passes are {', '.join(passes)}")
    found: dict[str, object] = {}
    job = lower(spec, Path("generated") / spec.name, found.__setitem__)
    return show_form(found[after], job.plan)


def plan(spec: Spec) -> PlanPage:
    """The plan, its cost and memory by rank, and the plans it beat. Writes nothing."""
    return make_plan_page(lower(spec, Path("generated") / spec.name))
