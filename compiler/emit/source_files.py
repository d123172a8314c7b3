"""Data that lies in files: bytes of text, tokens, arrays. Readers need torch alone."""

from collections.abc import Iterator, Sequence

from ..ir.graph import Input
from ..ir.spec import Arrays, Text, Tokens
from ..ir.unit import Unit
from .expression import quote
from .layout import wrap
from .scope import clean_outside
from .source import Parts, dtype_text, is_absolute, of_samples, place, shape_text, whole_inputs


def find_lines(paths: Sequence[str]) -> tuple[list[str], str]:
    """Statements that set `files` to those that the patterns match; how a script names one."""
    root = "" if all(map(is_absolute, paths)) else ", root_dir=FOLDER"
    file = "(FOLDER / file)" if root else "Path(file)"
    root += ", recursive=True" if any("**" in path for path in paths) else ""
    if len(paths) == 1:
        return [*wrap(f"files = sorted(glob.glob({place(paths[0])}{root}))", 0)], file
    find = [*wrap(f"patterns = [{', '.join(map(place, paths))}]", 0)]
    find.append(f"found = (sorted(glob.glob(p{root})) for p in patterns)")
    find.append("files = [file for files in found for file in files]")
    return find, file


def view_text(data: Text, unit: Unit, paths: Sequence[str]) -> Parts:
    size = data.sequence
    find, file = find_lines(paths)
    read = [f"windows = samples[:, None] * {size} + torch.arange({size})  # bytes of each sample"]
    read += [
        f"{clean_outside(i.name)} = text[windows{' + 1' if i.field == 'labels' else ''}].long()"
        for i in unit.inputs
    ]
    return Parts(
        opened=(
            *find,
            f'raw = b"".join({file}.read_bytes() for file in files if {file}.is_file())',
            f"SAMPLES = (len(raw) - 1) // {size}  # sample i: {size} bytes from byte {size} * i on",
        ),
        ready=("text = torch.frombuffer(bytearray(raw), dtype=torch.uint8)  # a token a byte",),
        read=tuple(read),
        fact="zlib.crc32(raw)",
        described=f"the bytes of {', '.join(data.files)}, {size} tokens a sample",
    )


map_tokens = '''def map_tokens(path):
    """The tokens of a file, {width} bytes each, mapped into memory."""
    size = os.path.getsize(path)
    if size % {width} or size < {width} * {needed}:
        raise SystemExit(f"{{path}} has {{size}} bytes, not {needed} or more tokens of {width}")
    return torch.from_file(str(path), shared=False, size=size // {width}, dtype=torch.int{bits})
'''
fingerprint = '''def fingerprint(path):
    """Size, and a checksum of both ends: quick to take however large a file is."""
    with open(path, "rb") as file:
        ends = file.read(2**20)
        file.seek(max(0, os.path.getsize(path) - 2**20))
        return os.path.getsize(path), zlib.crc32(ends + file.read())
'''
read_run = '''def read_run(i):
    """The tokens of sample i, and of its file the one after them."""
    shard = bisect.bisect_right(starts, i) - 1
    start = (i - starts[shard]) * {size}
    return shards[shard][start : start + {needed}]
'''


def view_tokens(data: Tokens, unit: Unit, paths: Sequence[str], *, alone: bool) -> Parts:
    """`alone`: on one rank, which has nobody to agree with on the files."""
    size, width = data.sequence, data.token_bytes
    reader = map_tokens.format(width=width, needed=size + 1, bits=8 * width)
    helpers = reader if alone else f"{reader}\n\n{fingerprint}"
    described = f"the {data.dtype} tokens of {', '.join(data.files)}, {size} a sample"
    whole = f".long() & 0x{'FF' * width}"  # torch has few operations for unsigned integers
    shifts = [(clean_outside(i.name), i.field == "labels") for i in unit.inputs]
    if data.one_file:
        file = f"FOLDER / {quote(paths[0])}"
        count = f"SAMPLES = (len(stream) - 1) // {size}"
        opened = [*wrap(f"stream = map_tokens({file})", 0)]
        opened += [f"{count}  # sample i: {size} tokens from token {size} * i on"]
        ready = ""
        read = [f"windows = samples[:, None] * {size} + torch.arange({size})  # places of tokens"]
        read += [f"{name} = stream[windows{' + 1' * late}]{whole}" for name, late in shifts]
        fact = f"fingerprint({file})"
    else:
        find, file = find_lines(paths)
        opened = [*find, f"files = [file for file in files if {file}.is_file()]"]
        file = "file" if file == "Path(file)" else "FOLDER / file"
        opened += [f"shards = [map_tokens({file}) for file in files]"]
        opened += [f"counts = [(len(shard) - 1) // {size} for shard in shards]"]
        opened += ["starts = [0, *itertools.accumulate(counts)]  # of each shard, its first sample"]
        opened += ["SAMPLES = starts[-1]"]
        ready = read_run.format(size=size, needed=size + 1)
        read = ["runs = [read_run(i) for i in samples.tolist()]"]
        read += [
            f"{name} = torch.stack([run[{'1:' if late else ':-1'}] for run in runs]){whole}"
            for name, late in shifts
        ]
        fact = f"tuple(fingerprint({file}) for file in files)"
    return Parts(
        opened=(*helpers.splitlines(), "", "", *opened),
        ready=tuple(ready.splitlines()) if unit.inputs else (),
        read=tuple(read),
        fact=fact,
        described=described,
        needs_samples=not data.one_file,
    )


def view_arrays(data: Arrays, unit: Unit, paths: Sequence[str]) -> Parts:
    fields = [i.field for i in of_samples(unit)]
    if isinstance(data.files, str):
        start = [*wrap(f"arrays = read_safetensors(FOLDER / {quote(paths[0])})", 0)]
        counted = fields[:1]
        count = count_any(data.whole)
    else:
        files = dict(zip(data.files, paths, strict=True))
        # without a field, just to count the samples
        counted = fields[:1] or [name for name in files if name not in data.whole][:1]
        start = ["arrays = {}"]
        for field in dict.fromkeys([*(i.field for i in unit.inputs), *counted]):
            start += wrap(f"arrays[{quote(field)}] = read_npy(FOLDER / {quote(files[field])})", 0)
        count = "1  # no array has a batch dimension"
    if counted:
        count = f"len(arrays[{quote(counted[0])}])"
    return Parts(
        opened=(*start, *fit_lines(unit), *wrap(f"SAMPLES = {count}", 0)),
        ready=(),
        read=tuple(take(i, "[samples]") for i in of_samples(unit)),
        whole=tuple(take(i) for i in whole_inputs(unit)),
        fact="SAMPLES",
        described=f"the arrays of {', '.join(paths)}",
        reads="safetensors" if isinstance(data.files, str) else "npy",
    )


def take(taken: Input, samples: str = "") -> str:
    """A field of some samples, or all of the array."""
    cast = ".to(torch.get_default_dtype())" if taken.meta.dtype.startswith("float") else ""
    return f"{clean_outside(taken.name)} = arrays[{quote(taken.field)}]{samples}{cast}"


def count_any(whole: Sequence[str]) -> str:
    """The samples that any array counts."""
    if not whole:
        return "len(next(iter(arrays.values())))"
    names = f"({', '.join(map(quote, whole))}{',' * (len(whole) == 1)})"
    return f"next((len(a) for name, a in arrays.items() if name not in {names}), 1)"


fit = """for field, found, shape, dtype in compiled_for:
    array = arrays[field]
    kind = torch.get_default_dtype() if array.is_floating_point() else array.dtype
    if (found, kind) != (shape, dtype):
        found = f"{array.dtype}{[*found]}, not {dtype}{[*shape]}"
        raise SystemExit(f"{HERE}: {field} of a sample is {found}, which this was compiled for")
"""


def fit_lines(unit: Unit) -> Iterator[str]:
    """Whether the arrays have the shapes and dtypes that they had when they were compiled for."""
    if not unit.inputs:
        return
    fields = []
    for i in unit.inputs:
        field, own = quote(i.field), slice(None) if i.whole else slice(1, None)
        found = f"arrays[{field}].shape" + "[1:]" * (not i.whole)
        fields.append(f"({field}, {found}, {shape_text(i.meta.shape[own])}, {dtype_text(i.meta)})")
    yield from wrap(f"compiled_for = [{', '.join(fields)}]", 0)
    yield from fit.splitlines()
