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
from .source import Parts, Reader, of_samples, steps_per_epoch, whole_inputs
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
    whole: tuple[str, ...]
    """Body of whole_fields; () on a rank that reads none such."""
    whole_doc: str
    ordered: bool
    """Whether the rank asks for the order of the samples."""
    divided: bool
    """Whether it reads samples."""
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
    names = [clean_outside(i.name) for i in unit.inputs]
    fields = [clean_outside(i.name) for i in of_samples(unit)]
    whole = [clean_outside(i.name) for i in whole_inputs(unit)]
    move = "to_device" if spec.cluster.device.kind == "cuda" else ""
    ahead = parts.workers if fields else 0
    hand = Hand(names, fields, whole, move)
    return DataView(
        reader=reader_lines(parts, spec),
        reads=parts.reads,
        batch=tuple(wrap_all(batch_lines(parts, plan, hand), 8 if ahead else 4)),
        whole=tuple(wrap_all(whole_lines(parts, whole), 4)) if whole else (),
        whole_doc=f"What each microbatch takes whole: {listed(whole)}" if whole else "",
        ordered=bool(fields) or not plan.even,
        divided=bool(fields),
        sizes=not plan.even,
        batch_doc=f"Each microbatch's {listed(names)}"
        if fields
        else "The whole fields, for each microbatch",
        workers=tuple(wrap_all(worker_lines(parts.workers, hand), 4)) if ahead else (),
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


@dataclass(frozen=True, slots=True)
class Hand:
    """What get_batch hands out."""

    names: Sequence[str]
    """Of all fields, in the order of Stage.forward."""
    fields: Sequence[str]
    """Those of them that are divided."""
    whole: Sequence[str]
    move: str
    """What takes a field to a GPU."""

    def split(self, value: str) -> str:
        """A field on the device, by microbatches."""
        moved = f"{self.move}({value})" if self.move else f"{value}.to(device)"
        return f"{moved}.tensor_split(MICROBATCHES)"

    def beside_whole(self, source: str) -> Iterator[str]:
        """Where some fields are not divided. `source`: what the others come from."""
        yield f"{', '.join(self.whole)} = whole_fields()"
        if len(self.fields) == 1:
            yield f"{self.fields[0]} = {self.split(self.fields[0])}"
        else:
            split = self.split("field")
            yield f"{', '.join(self.fields)} = ({split} for field in {source})"
        each = (f"[{name}] * MICROBATCHES" if name in self.whole else name for name in self.names)
        yield f"return list(zip({', '.join(each)}))"


def whole_lines(parts: Parts, names: Sequence[str]) -> Iterator[str]:
    """Read what goes whole to every microbatch."""
    yield from parts.whole
    yield f"return {', '.join(f'{name}.to(device)' for name in names)}"


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


def batch_lines(parts: Parts, plan: Plan, hand: Hand) -> Iterator[str]:
    """Choose this replica's samples, read them, and in a rank's own process hand them out."""
    fields = hand.fields
    if not fields:
        if hand.whole:
            yield "return [whole_fields()] * MICROBATCHES"
        return
    if plan.replicas > 1:
        yield "parts = samples.tensor_split(MICROBATCHES * REPLICAS)[REPLICA::REPLICAS]"
        yield "samples = torch.cat(parts)  # this replica's"
    if plan.replicas > 1 and not plan.even and parts.needs_samples:
        count = len(hand.names)
        none = "None" if count == 1 else f"({', '.join(['None'] * count)})"
        nothing = f"{none}] * MICROBATCHES"
        if parts.workers:
            nothing = f"torch.empty(0)] * {len(fields)}"
        yield "if not len(samples):  # a short batch may have none for it"
        yield f"    return [{nothing}"
    if parts.workers:
        yield from parts.read
        yield f"return [{', '.join(fields)}]"
    else:
        yield from hand_out(parts.read, hand)


def hand_out(read: Sequence[str], hand: Hand) -> Iterator[str]:
    """Read, move to the device, split into microbatches."""
    fields = hand.fields
    if hand.whole:
        yield from read
        yield from hand.beside_whole(f"({', '.join(fields)})")
        return
    *lines, last = read
    head = f"{fields[0]} = "
    chained = f"return {hand.split(last.removeprefix(head))}"
    if len(fields) > 1:
        yield from read
        yield f"fields = {', '.join(fields)}"
        yield f"return list(zip(*({hand.split('field')} for field in fields)))"
    elif last.startswith(head) and " & " not in last and len(chained) <= 96:
        yield from lines
        yield chained
    else:
        yield from read
        yield f"return {hand.split(fields[0])}"


def worker_lines(count: int, hand: Hand) -> Iterator[str]:
    """Start the workers at the first step, take what they have read."""
    options = ["Batches()", "batch_size=None", "sampler=range(step, STEPS)", f"num_workers={count}"]
    options += ['multiprocessing_context="fork"', *(["pin_memory=cuda"] if hand.move else [])]
    yield "global ahead"
    yield "if ahead is None:  # the first step: the workers start, for all steps"
    yield f"    loader = torch.utils.data.DataLoader({', '.join(options)})"
    yield "    ahead = iter(loader)"
    if len(hand.fields) == 1:
        yield f"({hand.fields[0]},) = next(ahead)"
    if hand.whole:
        yield from hand.beside_whole("next(ahead)")
    elif len(hand.fields) == 1:
        yield f"return {hand.split(hand.fields[0])}"
    else:
        yield f"return list(zip(*({hand.split('field')} for field in next(ahead))))"


def wrap_all(lines: Iterator[str], indent: int) -> Iterator[str]:
    """Lines of a function, wrapped where they are too long."""
    for line in lines:
        text = line.lstrip()
        yield from wrap(text, indent + len(line) - len(text))
