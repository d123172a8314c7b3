"""Checkpoints: what a script saves of its run, and how it goes on from there."""

from collections.abc import Iterator

from ..ir.program import Checkpoint, Loop, Program
from ..ir.unit import Unit
from .expression import quote
from .groups import spell_ranks
from .job import Job
from .layout import wrap


def group_of(program: Program) -> tuple[int, ...]:
    """The ranks that write checkpoints together; none where nobody does."""
    loop = next(item for item in program.actions if isinstance(item, Loop))
    return next((item.group for item in loop.body if isinstance(item, Checkpoint)), ())


def view_checkpoint(job: Job, program: Program, unit: Unit) -> dict[str, object] | None:
    """What the functions hang on."""
    ranks = group_of(program)
    if not ranks:
        return None
    alone, first = len(ranks) == 1, not program.coords.get("data", 0)
    own = [] if first else statistics(job, unit)
    names = "WHOLE.get(name, name)" if other_names(unit) else "name"
    return {
        "first": first,
        "mine": "progress()" if first or own else "{}",
        "name": f"{{{names}}}",
        "trains": any(held.trainable for held in unit.state),
        "buffers": bool(own),
        "ranks": "no_dist=True" if alone else f"process_group=groups[{spell_ranks(ranks)}]",
        "leads": program.rank == ranks[0],
        "share": "sorted(files)" if alone else "sorted(files)[RANK::WORLD_SIZE]",
        "damage_doc": "What is wrong with a checkpoint, or nothing."
        if alone
        else "What is wrong with a checkpoint, or nothing; each rank reads a share of the files.",
        "numbers": f"{{{names}: i for i, name in enumerate(names)}}",
        "counts": job.spec.train.optimizer.name == "SparseAdam",
    }


def statistics(job: Job, unit: Unit) -> list[str]:
    """The buffers that forward writes, of which each replica has values of its own."""
    written = {name for op in unit.ops for name in op.mutates}
    return [
        held.fqn
        for held in unit.state
        if job.graph.parameters[held.canonical].buffer and written & {held.fqn, *held.aliases}
    ]


def other_names(unit: Unit) -> dict[str, str]:
    """Names of parameters here that are others in the whole model, by which checkpoints go."""
    found = {held.fqn: held.canonical for held in unit.state}
    found |= {alias: held.canonical for held in unit.state for alias in held.aliases}
    return {name: canonical for name, canonical in found.items() if name != canonical}


def checkpoint_constants(job: Job, program: Program, unit: Unit) -> Iterator[str]:
    """Where they lie, how many, and what a run must have in common with one."""
    form = job.spec.checkpoint
    if form is None or not group_of(program):
        return
    yield from wrap(f"CHECKPOINTS = FOLDER / {quote(job.checkpoints)}", 0)
    yield f"SAVE_STEPS, KEPT = {form.every}, {form.keep}  # from one to the next; of them"
    count = "MICROBATCHES" if job.plan.replicas == 1 else "MICROBATCHES * REPLICAS"
    batch = f'"global_batch": GLOBAL_BATCH, "seed": SEED, "microbatches": {count}'
    yield from wrap(f"BATCH = {{{batch}}}", 0)
    if program.coords.get("data", 0) and (names := statistics(job, unit)):
        yield from wrap(f"STATISTICS = [{', '.join(map(quote, names))}]", 0)
    if others := other_names(unit):
        pairs = ", ".join(f"{quote(name)}: {quote(whole)}" for name, whole in others.items())
        yield from wrap(f"WHOLE = {{{pairs}}}", 0)


def resume_lines(job: Job, program: Program) -> Iterator[str]:
    """Right before the loop."""
    if ranks := group_of(program):
        if job.spec.cluster.device.kind == "cuda" and len(ranks) > 1:
            yield "if cuda:  # what ranks tell each other of checkpoints goes over the current GPU"
            yield "    torch.cuda.set_device(device)"
        yield "stopped = []  # by SIGTERM, which comes before a machine is taken away"
        yield "signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))"
        yield "first = resume()"


def save_lines(program: Program) -> Iterator[str]:
    """The end of a step."""
    ranks = group_of(program)
    if not ranks:
        return
    yield f"    stop = {'stops_after(step)' if len(ranks) > 1 else 'bool(stopped)'}"
    yield "    if stop or (step + 1) % SAVE_STEPS == 0:"
    yield "        save_checkpoint(step + 1)"
    yield "    if stop:"
    yield '        raise SystemExit(f"{HERE}: SIGTERM: step {step + 1} is saved, and the last")'
