"""What a spec says of its data that no schema can refuse, beyond whether files are there."""

import difflib
import glob
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ..ir.spec import Arrays, Dataset, Random, RandomField, Spec, Tokens, whole_fields
from .callables import factories
from .files import is_file

Found = Iterator[tuple[str, str, str]]  # (path, message, hint)


def check_tokens(spec: Spec) -> Found:
    """Each file holds whole tokens, and enough of them for a sample and the token after it; all of
    them enough for a batch."""
    if not isinstance(spec.data, Tokens):
        return
    data, width, batch = spec.data, spec.data.token_bytes, spec.train.global_batch
    files = tuple(token_files(data, spec.folder))
    samples = sum((size // width - 1) // data.sequence for _, size in files)
    if data.last_batch == "drop" and 0 < samples < batch:
        message = f"{samples} samples make no batch of {batch}, and last_batch drops them"
        yield "data.files", message, f"global_batch: {samples} or last_batch: keep"
    for name, size in files:
        if size % width:
            message = f"{name} has {size} bytes, no whole number of {data.dtype} tokens"
            hint = f"a file of {data.dtype} and nothing else, as numpy's tofile writes it"
            yield "data.files", message, hint
        elif size < width * (data.sequence + 1):
            message = f"{name} has {size // width} tokens; a sample and its labels need"
            hint = f"sequence: {size // width - 1} or less" if size > width else "leave it out"
            yield "data.files", f"{message} {data.sequence + 1}", hint


def token_files(data: Tokens, folder: Path) -> Iterator[tuple[str, int]]:
    """Every file and its size in bytes, in the order of their samples."""
    stdlib = glob.escape(sysconfig.get_path("stdlib"))
    for pattern in data.files:
        if data.one_file:
            found = [pattern]
        else:  # glob's own rules, as in the scripts
            spelled = pattern.replace("{stdlib}", stdlib)
            found = sorted(glob.glob(spelled, root_dir=folder, recursive=True))  # noqa: PTH207
        for name in found:
            if is_file(folder / name):
                yield name, (folder / name).stat().st_size


def check_whole(spec: Spec) -> Found:
    """What goes whole to every microbatch is a field, and no sample's."""
    data = spec.data
    if not whole_fields(data):
        return
    fields: tuple[str, ...] = ()
    if isinstance(data, Random):
        fields = tuple(data.fields)
    elif isinstance(data, Arrays) and not isinstance(data.files, str):
        fields = tuple(data.files)
    for index, name in enumerate(whole_fields(data)):
        if fields and name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {close[0]}?" if close else f"its fields are {', '.join(fields)}"
            yield f"data.whole[{index}]", f"the data has no field {name!r}", hint
        if isinstance(data, Dataset) and name in (*data.fields, *data.pad):
            message = f"{name} is a field of the samples, and whole fields are the dataset's own"
            hint = f"self.{name} in the dataset, or leave it out of whole"
            yield f"data.whole[{index}]", message, hint
        for argument, feed in spec.model.inputs:
            if feed.field == name and feed.shape is not None:
                message = f"{name} is whole, and its shape here has a batch dimension"
                yield f"data.whole[{index}]", message, f"inputs: {{{argument}: {name}}}"


def check_arguments(spec: Spec) -> Found:
    """Scripts spell out what a Dataset is made with."""
    if isinstance(spec.data, Dataset):
        for path, target in factories(spec.data.args, "data.args"):
            message = f"what {target} makes cannot be written into a script"
            hint = "plain values; the Dataset's own file can call it"
            yield path, message, hint


def check_pad(spec: Spec) -> Found:
    """`pad` and `length` go together, and what is padded is a field."""
    if not isinstance(spec.data, Dataset):
        return
    pad, length, fields = spec.data.pad, spec.data.length, spec.data.fields
    if pad and length is None:
        yield "data.pad", "data.pad needs data.length, what to fill up to", "length: 128"
    elif length is not None and not pad:
        message = "data.length is that of padded fields; data.pad names none"
        yield "data.length", message, f"pad: {{{fields[0] if fields else 'tokens'}: 0}}"
    for name in pad:
        if fields and name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {close[0]}?" if close else f"its fields are {', '.join(fields)}"
            yield f"data.pad.{name}", f"the data has no field {name!r}", hint


def check_random(spec: Spec) -> Found:
    if not isinstance(spec.data, Random):
        return
    if not spec.data.fields:
        hint = "fields: {x: {shape: [16]}, y: {dtype: int64, high: 10}}"
        yield "data", "random data needs fields", hint
    for name, field in spec.data.fields.items():
        place = f"data.fields.{name}"
        yield from random_field(name, field, place, spec)
    samples, batch = spec.data.samples, spec.train.global_batch
    if spec.data.last_batch == "drop" and samples < batch:
        message = f"{count(samples, 'sample')} make no batch of {batch}, and last_batch drops them"
        yield "data.samples", message, f"samples: {batch} or last_batch: keep"


def random_field(name: str, field: RandomField, place: str, spec: Spec) -> Found:
    if field.dtype == "bool":
        yield place, f"field {name}: random data cannot be bool", "dtype: int64"
    elif field.dtype.startswith("float"):
        for bound in ("low", "high"):
            if f"{place}.{bound}" in spec.locations:
                message = f"{bound} is for integers; {name} is {field.dtype}, normally distributed"
                yield f"{place}.{bound}", message, "leave it out, or dtype: int64"
    elif field.high is None:
        under = f"under data: fields: {{{name}: {{dtype: {field.dtype}, high: 256}}}}"
        hint = "high: 256" if place in spec.locations else under
        yield place, f"field {name}: random integers need high, one above the largest", hint
    elif field.low >= field.high:
        message = f"field {name}: low {field.low} is not below high {field.high}"
        yield place, message, f"high: {field.low + 1} or more"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
