"""How a rank reads its fields of the data: the lines of the section `data`.

Every rank draws the same order of samples and reads only the fields that its stage uses, and of a
batch only the parts of its own replica, so no data is sent.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..ir.plan import Plan
from ..ir.spec import Arrays, Random, Spec, Text, Tokens
from ..ir.unit import Unit
from .layout import wrap
from .scope import clean_outside
from .source import Parts, Reader, steps_per_epoch
from .source_files import view_arrays, view_text, view_tokens
from .source_made import view_dataset, view_random


@dataclass(frozen=True, slots=True)
class DataView:
    """What the templates show of the data."""

    reader: tuple[str, ...]
    """What opens the data, or draws a sample."""
    reads: Reader
    batch: tuple[str, ...]
    """Statements that make of `samples` what get_batch returns, or with workers what one of them
    reads; () on a rank that reads no field."""
    sizes: bool
    """Whether microbatches differ in size, so that every rank asks for a step's samples."""
    batch_doc: str
    workers: tuple[str, ...]
    """Body of get_batch where worker processes read; () where it reads by itself."""
    pins: bool
    """Whether fields go to a GPU, if there is one."""
    steps_per_epoch: str
    steps_comment: str
    fact: str
    """What ranks must agree on, as an expression."""
    modules: tuple[str, ...]
    """Imports of the user's own."""
    constants: tuple[str, ...]
    described: str
    """For the docstring."""


def view_data(spec: Spec, plan: Plan, unit: Unit, paths: Sequence[str]) -> DataView | None:
    """None for a rank that needs neither samples nor their number. `paths`: the data's files as the
    script finds them, relative to its folder."""
    needs_count = not plan.even or spec.train.epochs is not None
    if not unit.inputs and not needs_count:
        return None
    parts = view_source(spec, plan, unit, paths)
    fields = [clean_outside(i.name) for i in unit.inputs]
    whose = fields[0].capitalize() if len(fields) == 1 else listed(fields)
    move = "to_device" if spec.cluster.device.kind == "cuda" else ""
    ahead = parts.workers if fields else 0
    return DataView(
        reader=reader_lines(parts, spec),
        reads=parts.reads,
        batch=tuple(wrap_all(batch_lines(parts, plan, fields, move), 8 if ahead else 4)),
        sizes=not plan.even,
        batch_doc=f"{whose} of each microbatch",
        workers=tuple(wrap_all(worker_lines(parts.workers, fields, move), 4)) if ahead else (),
        pins=bool(move and fields),
        steps_per_epoch=steps_per_epoch(spec.data),
        steps_comment="  # a short last batch is dropped" if spec.data.last_batch == "drop" else "",
        fact=parts.fact,
        modules=parts.modules,
        constants=parts.constants,
        described=parts.described,
    )


def view_source(spec: Spec, plan: Plan, unit: Unit, paths: Sequence[str]) -> Parts:
    data = spec.data
    if isinstance(data, Text):
        return view_text(data, unit, paths)
    if isinstance(data, Tokens):
        return view_tokens(data, unit, paths, alone=plan.world_size == 1)
    if isinstance(data, Random):
        return view_random(data, unit)
    if isinstance(data, Arrays):
        return view_arrays(data, unit, paths)
    return view_dataset(data, unit, paths)


def listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def reader_lines(parts: Parts, spec: Spec) -> tuple[str, ...]:
    """What opens the data, and what follows from the number of samples."""
    drop = spec.data.last_batch == "drop"
    lines = list(parts.opened)
    if parts.opened:  # data may have changed since the compilation counted it
        lines.append(f"if SAMPLES < {'GLOBAL_BATCH' if drop else '1'}:")
        message = 'f"{SAMPLES} samples make no batch of {GLOBAL_BATCH}"'
        lines.append(f"    raise SystemExit({message})")
    if spec.train.epochs is not None:
        per_epoch = steps_per_epoch(spec.data)
        lines.append(f"STEPS = EPOCHS * {f'({per_epoch})' if drop else per_epoch}")
    if lines and parts.ready and parts.ready[0].startswith("def "):
        lines += ["", ""]
    lines += parts.ready
    return (*lines, "", "") if lines else ()


def batch_lines(parts: Parts, plan: Plan, fields: Sequence[str], move: str) -> Iterator[str]:
    """Choose this replica's samples, read them, and in a rank's own process hand them out."""
    if not fields:
        return
    if plan.replicas > 1:
        yield "parts = samples.tensor_split(MICROBATCHES * REPLICAS)[REPLICA::REPLICAS]"
        yield "samples = torch.cat(parts)  # this replica's"
    if plan.replicas > 1 and not plan.even and parts.needs_samples:
        none = "None" if len(fields) == 1 else f"({', '.join(['None'] * len(fields))})"
        nothing = f"{none}] * MICROBATCHES"
        if parts.workers:
            nothing = f"torch.empty(0)] * {len(fields)}"
        yield "if not len(samples):  # a short batch may have none for it"
        yield f"    return [{nothing}"
    if parts.workers:
        yield from parts.read
        yield f"return [{', '.join(fields)}]"
    else:
        yield from hand_out(parts.read, fields, move)


def hand_out(read: Sequence[str], fields: Sequence[str], move: str) -> Iterator[str]:
    """Read, move to the device, split into microbatches."""
    *lines, last = read
    head = f"{fields[0]} = "
    chained = f"return {split(last.removeprefix(head), move)}"
    if len(fields) > 1:
        yield from read
        yield f"fields = {', '.join(fields)}"
        yield f"return list(zip(*({split('field', move)} for field in fields)))"
    elif last.startswith(head) and " & " not in last and len(chained) <= 96:
        yield from lines
        yield chained
    else:
        yield from read
        yield f"return {split(fields[0], move)}"


def split(value: str, move: str) -> str:
    """A field on the device, by microbatches."""
    moved = f"{move}({value})" if move else f"{value}.to(device)"
    return f"{moved}.tensor_split(MICROBATCHES)"


def worker_lines(count: int, fields: Sequence[str], move: str) -> Iterator[str]:
    """Start the workers at the first step, take what they have read."""
    options = ["Batches()", "batch_size=None", "sampler=range(step, STEPS)", f"num_workers={count}"]
    options += ['multiprocessing_context="fork"', *(["pin_memory=cuda"] if move else [])]
    yield "global ahead"
    yield "if ahead is None:  # the first step: the workers start, for all steps"
    yield f"    loader = torch.utils.data.DataLoader({', '.join(options)})"
    yield "    ahead = iter(loader)"
    if len(fields) == 1:
        yield f"({fields[0]},) = next(ahead)"
        yield f"return {split(fields[0], move)}"
    else:
        yield f"return list(zip(*({split('field', move)} for field in next(ahead))))"


def wrap_all(lines: Iterator[str], indent: int) -> Iterator[str]:
    """Lines of a function, wrapped where they are too long."""
    for line in lines:
        text = line.lstrip()
        yield from wrap(text, indent + len(line) - len(text))
