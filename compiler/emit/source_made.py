"""Data that code makes: random samples, and a Dataset of the user's."""

from collections.abc import Mapping, Sequence

from ..ir.graph import Input
from ..ir.spec import Dataset, Factory, Random, RandomField, Value
from ..ir.unit import Unit
from .expression import number, plain, quote
from .layout import wrap
from .scope import clean_outside
from .source import Parts, dtype_text, of_samples, shape_text, steps_per_epoch, whole_inputs

field_reader = '''def draw_field(samples, field, fill, *args, **kwargs):
    """A field of a sample follows from the seed, the field's name and the sample's number alone."""
    seeds = [zlib.crc32(f"{SEED} {field} {i}".encode()) for i in samples.tolist()]
    draws = (torch.Generator().manual_seed(seed) for seed in seeds)
    return torch.stack([fill(*args, **kwargs, generator=generator) for generator in draws])
'''


def view_random(data: Random, unit: Unit) -> Parts:
    read, whole = (
        [line for i in fields for line in draw_lines(i, data.fields[i.field])]
        for fields in (of_samples(unit), whole_inputs(unit))
    )
    return Parts(
        opened=(),
        ready=tuple(field_reader.splitlines()) if unit.inputs else (),
        read=tuple(read),
        whole=tuple(whole),
        fact="SAMPLES",
        described=f"{data.samples} random sample{'s' * (data.samples > 1)}",
        constants=(f"SAMPLES = {data.samples}",),
        needs_samples=True,
    )


def draw_lines(taken: Input, form: RandomField) -> list[str]:
    """One field of a batch, or one that is whole."""
    name, shape = clean_outside(taken.name), shape_text(form.shape)
    fill = f"torch.randn, {shape}, dtype=torch.float32"
    if form.high is not None:
        fill = f"torch.randint, {form.low}, {form.high}, {shape}, dtype=torch.{form.dtype}"
    draw = f"{name} = draw_field(samples, {quote(taken.field)}, {fill})"
    if taken.whole:
        draw = f"({name},) = draw_field(torch.tensor([0]), {quote(taken.field)}, {fill})"
    cast = f"{name} = {name}.to(torch.get_default_dtype())"
    return [draw] if form.high is not None else [draw, cast]


as_field = '''def as_field(name, value, shape, dtype):
    """A field of a sample, which has the shape and dtype that the model was compiled for."""
    tensor = torch.as_tensor(value)
    if tensor.shape != shape:
        raise ValueError(f"{name} has the shape {[*tensor.shape]}, not {[*shape]}")
    floats = tensor.is_floating_point() and dtype.is_floating_point  # one for another will do
    if not floats and torch.promote_types(tensor.dtype, dtype) != dtype:
        raise ValueError(f"{name} has the dtype {tensor.dtype}, not {dtype}")
    return tensor.to(dtype)
'''
fill_up = '''def fill_up(name, value, filler):
    """A field of a sample, with what it lacks of {length} after its end."""
    tensor = torch.as_tensor(value)
    if len(tensor) > {length}:
        raise ValueError(f"{{name}} has length {{len(tensor)}}; at most {length} is declared")
    lacking = tensor.new_full(({length} - len(tensor), *tensor.shape[1:]), filler)
    return torch.cat([tensor, lacking])
'''
read_sample = '''def read_sample(step, i):
    """Sample i; what the dataset draws at random is the same on every rank."""
    epoch = step // {per_epoch}
    seed = zlib.crc32(f"{{SEED}} epoch {{epoch}} sample {{i}}".encode())
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    try:
        row = dataset[i]
{fields}
    except Exception as error:
        what = f"sample {{i}} cannot be read: {{type(error).__name__}}: {{error}}"
        raise RuntimeError(f"{{HERE}}, step {{step + 1}}: {{what}}") from error
'''


def view_dataset(data: Dataset, unit: Unit, paths: Sequence[str]) -> Parts:
    place, _, name = data.source.partition(":")
    module = paths[0].removesuffix(".py") if place.endswith(".py") else place
    arguments = ", ".join(f"{key}={spell_value(value)}" for key, value in data.args.items())
    names = [clean_outside(i.name) for i in of_samples(unit)]
    if len(names) == 1:
        read = [f"{names[0]} = torch.stack([read_sample(step, i) for i in samples.tolist()])"]
    else:
        read = ["rows = [read_sample(step, i) for i in samples.tolist()]"]
        read += [f"{', '.join(names)} = (torch.stack(field) for field in zip(*rows))"]
    ahead = f", read ahead by {data.workers} of its processes" if data.workers else ""
    return Parts(
        opened=(*wrap(f"dataset = make_dataset({arguments})", 0), "SAMPLES = len(dataset)"),
        ready=tuple(reader_lines(data, unit)) if unit.inputs else (),
        read=tuple(read),
        whole=tuple(whole_line(i) for i in whole_inputs(unit)),
        fact="SAMPLES",
        described=f"{data.source}, a Dataset{ahead}",
        modules=(f"from {module} import {name} as make_dataset",),
        workers=data.workers,
        needs_samples=True,
    )


def reader_lines(data: Dataset, unit: Unit) -> list[str]:
    """The functions that read a sample."""
    fields = of_samples(unit)
    if not fields:
        return as_field.splitlines()
    lines = []
    for i in fields:
        key = quote(i.key) if isinstance(i.key, str) else i.key
        lines += field_lines(data, i, "row" if i.key is None else f"row[{key}]")
    names = ", ".join(clean_outside(i.name) for i in fields)
    if len(fields) == 1:
        lines[-1] = f"return {lines[-1].removeprefix(f'{names} = ')}"
    else:
        lines.append(f"return {names}")
    wrapped = [text for line in lines for text in wrap(line, 8)]
    steps = steps_per_epoch(data)
    per_epoch = f"({steps})" if data.last_batch == "drop" else steps
    reader = read_sample.format(per_epoch=per_epoch, fields="\n".join(wrapped))
    padded = any(i.field in data.pad for i in fields)
    helpers = [as_field, *([fill_up.format(length=data.length)] if padded else [])]
    return "\n\n".join([*helpers, reader]).splitlines()


def whole_line(taken: Input) -> str:
    """A field that the dataset itself has."""
    shape, dtype = shape_text(taken.meta.shape), dtype_text(taken.meta)
    value = f"dataset.{taken.field}"
    return (
        f"{clean_outside(taken.name)} = as_field({quote(taken.field)}, {value}, {shape}, {dtype})"
    )


def field_lines(data: Dataset, taken: Input, value: str) -> list[str]:
    """A field out of `row`."""
    name, shown = clean_outside(taken.name), quote(taken.field)
    shape, dtype = shape_text(taken.meta.shape[1:]), dtype_text(taken.meta)
    if taken.field not in data.pad:
        return [f"{name} = as_field({shown}, {value}, {shape}, {dtype})"]
    filler = plain(number(data.pad[taken.field]).text)
    return [
        f"{name} = fill_up({shown}, {value}, {filler})",
        f"{name} = as_field({shown}, {name}, {shape}, {dtype})",
    ]


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
