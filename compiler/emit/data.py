"""How a rank reads its fields of the data: the lines of the section `data`.

Every rank draws the same order of samples and reads only the fields that its stage uses, so no data
is sent. Readers need torch alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..ir.graph import TensorMeta
from ..ir.plan import Plan
from ..ir.spec import Arrays, Data, Dataset, Factory, Random, RandomField, Spec, Text, Value
from ..ir.unit import Unit
from .expression import number, plain, quote
from .layout import wrap
from .scope import clean_outside


@dataclass(frozen=True, slots=True)
class DataView:
    """What the templates show of the data."""

    reader: tuple[str, ...]
    """What opens the data, or draws a sample."""
    reads: Literal["safetensors", "npy", ""]
    """A kind of file that the script has to read by itself."""
    batch: tuple[str, ...]
    """Body of get_batch; () on a rank that reads no field."""
    sizes: bool
    """Whether microbatches differ in size, so that every rank asks for a step's samples."""
    batch_doc: str
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
    data = spec.data
    if isinstance(data, Text):
        parts = view_text(data, unit, paths)
    elif isinstance(data, Random):
        parts = view_random(data, unit)
    elif isinstance(data, Arrays):
        parts = view_arrays(data, unit, paths)
    else:
        parts = view_dataset(data, unit, paths, even=plan.even)
    drop = data.last_batch == "drop"
    fields = [clean_outside(i.name) for i in unit.inputs]
    whose = fields[0].capitalize() if len(fields) == 1 else listed(fields)
    return DataView(
        reader=reader_lines(parts, spec),
        reads=read_kind(data),
        batch=batch_lines(parts, fields, plan.replicas) if unit.inputs else (),
        sizes=not plan.even,
        batch_doc=f"{whose} of each microbatch.",
        steps_per_epoch=steps_per_epoch(data),
        steps_comment="  # a short last batch is dropped" if drop else "",
        fact=parts.fact,
        modules=parts.modules,
        constants=parts.constants,
        described=parts.described,
    )


@dataclass(frozen=True, slots=True)
class Parts:
    """What differs by source."""

    opened: tuple[str, ...]
    """Statements that open it and count its samples; () if the spec has told their number."""
    ready: tuple[str, ...]
    """What follows once there are enough of them."""
    read: tuple[str, ...]
    """Statements that read the samples into the fields' names."""
    fact: str
    modules: tuple[str, ...]
    """Imports of the user's own."""
    constants: tuple[str, ...]
    described: str


def read_kind(data: Data) -> Literal["safetensors", "npy", ""]:
    if not isinstance(data, Arrays):
        return ""
    return "safetensors" if isinstance(data.files, str) else "npy"


def steps_per_epoch(data: Data) -> str:
    return "SAMPLES // GLOBAL_BATCH" if data.last_batch == "drop" else "-(-SAMPLES // GLOBAL_BATCH)"


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


def batch_lines(parts: Parts, fields: Sequence[str], replicas: int) -> tuple[str, ...]:
    """Read, move to the device, split into microbatches."""
    split = "tensor_split(MICROBATCHES)"
    if replicas > 1:
        split = "tensor_split(MICROBATCHES * REPLICAS)[REPLICA::REPLICAS]"
    lines = list(parts.read)
    if len(fields) == 1:
        head = f"{fields[0]} = "
        chained = f"return {lines[-1].removeprefix(head)}.to(device).{split}"
        if lines[-1].startswith(head) and len(chained) <= 96:
            lines[-1] = chained
        else:
            lines.append(f"return {fields[0]}.to(device).{split}")
    else:
        lines.append(f"fields = {', '.join(fields)}")
        lines.append(f"return list(zip(*(field.to(device).{split} for field in fields)))")
    return tuple(wrapped for line in lines for wrapped in wrap(line, 4))


def view_text(data: Text, unit: Unit, paths: Sequence[str]) -> Parts:
    size = data.sequence
    root = "" if all(map(is_absolute, paths)) else ", root_dir=FOLDER"
    root += ", recursive=True" if any("**" in path for path in paths) else ""
    if len(paths) == 1:
        find = [*wrap(f"files = sorted(glob.glob({place(paths[0])}{root}))", 0)]
    else:
        find = [*wrap(f"patterns = [{', '.join(map(place, paths))}]", 0)]
        find.append(f"found = (sorted(glob.glob(p{root})) for p in patterns)")
        find.append("files = [file for files in found for file in files]")
    read = [f"windows = samples[:, None] * {size} + torch.arange({size})  # bytes of each sample"]
    read += [
        f"{clean_outside(i.name)} = text[windows{' + 1' if i.field == 'labels' else ''}].long()"
        for i in unit.inputs
    ]
    file = "(FOLDER / file)" if "root_dir" in root else "Path(file)"
    return Parts(
        opened=(
            *find,
            f'raw = b"".join({file}.read_bytes() for file in files if {file}.is_file())',
            f"SAMPLES = (len(raw) - 1) // {size}  # sample i: {size} bytes from byte {size} * i on",
        ),
        ready=("text = torch.frombuffer(bytearray(raw), dtype=torch.uint8)  # a token a byte",),
        read=tuple(read),
        fact="zlib.crc32(raw)",
        modules=(),
        constants=(),
        described=f"the bytes of {', '.join(data.files)}, {size} tokens a sample",
    )


def view_random(data: Random, unit: Unit) -> Parts:
    reader = '''def draw_field(samples, field, fill, *args, **kwargs):
    """A field of a sample follows from the seed, the field's name and the sample's number alone."""
    seeds = [zlib.crc32(f"{SEED} {field} {i}".encode()) for i in samples.tolist()]
    draws = (torch.Generator().manual_seed(seed) for seed in seeds)
    return torch.stack([fill(*args, **kwargs, generator=generator) for generator in draws])
'''
    read = [
        line
        for i in unit.inputs
        for line in draw_lines(clean_outside(i.name), i.field, data.fields[i.field])
    ]
    return Parts(
        opened=(),
        ready=tuple(reader.rstrip().splitlines()) if unit.inputs else (),
        read=tuple(read),
        fact="SAMPLES",
        modules=(),
        constants=(f"SAMPLES = {data.samples}",),
        described=f"{data.samples} random samples",
    )


def draw_lines(name: str, field: str, form: RandomField) -> list[str]:
    """One field of a batch."""
    shape = f"({', '.join(map(str, form.shape))}{',' if len(form.shape) == 1 else ''})"
    if form.high is not None:
        fill = f"torch.randint, {form.low}, {form.high}, {shape}, dtype=torch.{form.dtype}"
        return [f"{name} = draw_field(samples, {quote(field)}, {fill})"]
    fill = f"torch.randn, {shape}, dtype=torch.float32"
    cast = f"{name} = {name}.to(torch.get_default_dtype())"
    return [f"{name} = draw_field(samples, {quote(field)}, {fill})", cast]


def view_arrays(data: Arrays, unit: Unit, paths: Sequence[str]) -> Parts:
    fields = [i.field for i in unit.inputs]
    if isinstance(data.files, str):
        start = [*wrap(f"arrays = read_safetensors(FOLDER / {quote(paths[0])})", 0)]
        first = f"arrays[{quote(fields[0])}]" if fields else "next(iter(arrays.values()))"
    else:
        files = dict(zip(data.files, paths, strict=True))
        used = fields or list(files)[:1]  # without a field, just to count the samples
        start = ["arrays = {}"]
        for field in used:
            start += wrap(f"arrays[{quote(field)}] = read_npy(FOLDER / {quote(files[field])})", 0)
        first = f"arrays[{quote(used[0])}]"
    read = []
    for i in unit.inputs:
        cast = ".to(torch.get_default_dtype())" if i.meta.dtype.startswith("float") else ""
        read.append(f"{clean_outside(i.name)} = arrays[{quote(i.field)}][samples]{cast}")
    return Parts(
        opened=(*start, f"SAMPLES = len({first})"),
        ready=(),
        read=tuple(read),
        fact="SAMPLES",
        modules=(),
        constants=(),
        described=f"the arrays of {', '.join(paths)}",
    )


sample_reader = '''def read_sample(epoch, i):
    """Sample i; what the dataset draws at random is the same on every rank."""
    seed = zlib.crc32(f"{SEED} epoch {epoch} sample {i}".encode())
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    return dataset[i]
'''


def view_dataset(data: Dataset, unit: Unit, paths: Sequence[str], *, even: bool) -> Parts:
    place, _, name = data.source.partition(":")
    module = paths[0].removesuffix(".py") if place.endswith(".py") else place
    arguments = ", ".join(f"{key}={spell_value(value)}" for key, value in data.args.items())
    read = [] if even else [f"epoch = step // ({steps_per_epoch(data)})"]
    read += ["rows = [read_sample(epoch, i) for i in samples.tolist()]"]
    for i in unit.inputs:
        row = (
            "row" if i.key is None else f"row[{quote(i.key) if isinstance(i.key, str) else i.key}]"
        )
        stacked = f"torch.stack([torch.as_tensor({row}) for row in rows])"
        read.append(f"{clean_outside(i.name)} = {stacked}.to({dtype_text(i.meta)})")
    return Parts(
        opened=(*wrap(f"dataset = make_dataset({arguments})", 0), "SAMPLES = len(dataset)"),
        ready=tuple(sample_reader.splitlines()) if unit.inputs else (),
        read=tuple(read),
        fact="SAMPLES",
        modules=(f"from {module} import {name} as make_dataset",),
        constants=(),
        described=f"{data.source}, a Dataset",
    )


def dtype_text(meta: TensorMeta) -> str:
    return "torch.get_default_dtype()" if meta.dtype.startswith("float") else f"torch.{meta.dtype}"


def place(path: str) -> str:
    """A glob, with `{stdlib}` found when the script runs; others are relative to the script."""
    if path.startswith("{stdlib}"):
        rest = quote(path.removeprefix("{stdlib}"))
        return f'glob.escape(sysconfig.get_path("stdlib")) + {rest}'
    return quote(path)


def is_absolute(path: str) -> bool:
    return path.startswith(("{stdlib}", "/"))


def spell_value(value: Value) -> str:
    """A value of the spec as Python."""
    if isinstance(value, Factory):
        raise TypeError("a dataset's argument cannot be a factory")
    if isinstance(value, tuple):
        return f"[{', '.join(map(spell_value, value))}]"
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{quote(key)}: {spell_value(item)}" for key, item in value.items())
            + "}"
        )
    if value is None or isinstance(value, bool):
        return repr(value)
    return quote(value) if isinstance(value, str) else plain(number(value).text)
