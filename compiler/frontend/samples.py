"""The samples that a spec names, and which of them each step takes.

What the emitted scripts read is read here again, from the language's definition and by code of
its own: text by bytes, files of tokens by runs, arrays by their first dimension, random samples by
a seed each, a user's Dataset by index. Floats have the spec's precision. The order of an epoch
hangs on seed and epoch alone; each step takes the next `global_batch` samples of it, the last one
of an epoch what is left.
"""

import bisect
import glob
import random
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import RunError
from ..ir.spec import Arrays, Dataset, Random, RandomField, Spec, Text, Tokens
from .capture.build import dtypes
from .capture.fields import make_dataset
from .capture.padding import fill_up
from .capture.undivided import read_attributes
from .capture.user import users_errors
from .data_sense import token_files
from .files import is_file

Sample = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Samples:
    """Every sample of the data, read when asked for."""

    count: int
    read: Callable[[int, int], Sample]
    """Sample number, epoch -> its fields."""
    whole: Sample = field(default_factory=dict)
    """Fields that are no samples'."""

    def batch(
        self, numbers: Iterable[int], fields: Iterable[str], epoch: int
    ) -> tuple[Tensor, ...]:
        """These samples' fields, stacked along a new first dimension; those that are no samples' as
        they are."""
        samples = [self.read(number, epoch) for number in numbers]
        return tuple(
            self.whole[name] if name in self.whole else torch.stack([s[name] for s in samples])
            for name in fields
        )


def read_samples(spec: Spec) -> Samples:
    """Open the data. Raises RunError where it makes no batch."""
    if isinstance(spec.data, Text):
        samples = text_samples(spec.data, spec.folder)
    elif isinstance(spec.data, Tokens):
        samples = token_samples(spec.data, spec)
    elif isinstance(spec.data, Arrays):
        samples = array_samples(spec.data, spec.folder)
    elif isinstance(spec.data, Random):
        samples = random_samples(spec.data, spec.train.seed)
    else:
        samples = dataset_samples(spec.data, spec)
    precision = dtypes[spec.train.precision]

    def cast(sample: Sample) -> Sample:
        return {n: t.to(precision) if t.is_floating_point() else t for n, t in sample.items()}

    def read(number: int, epoch: int) -> Sample:
        return cast(samples.read(number, epoch))

    if samples.count == 0 and isinstance(spec.data, Text | Tokens):
        length, files = spec.data.sequence + 1, " ".join(spec.data.files)
        message = f"the files of {files} hold no run of {length}, a sample and what follows it"
        raise RunError(message, spec.at("data.files"), "name files that are there, and long enough")
    if steps_per_epoch(spec, samples.count) == 0:
        message = f"{samples.count} samples make no batch of {spec.train.global_batch}"
        raise RunError(message, spec.at("data"), "last_batch: keep, or a smaller global_batch")
    return Samples(samples.count, read, cast(samples.whole))


def text_samples(data: Text, folder: Path) -> Samples:
    """Runs of `sequence` bytes as `tokens`; `labels` are one byte further on. int64[sequence]."""
    stdlib = glob.escape(sysconfig.get_path("stdlib"))
    text = bytearray()
    for pattern in (written.replace("{stdlib}", stdlib) for written in data.files):
        # glob's own rules, as in the scripts: Path.glob takes no absolute pattern
        for name in sorted(glob.glob(pattern, root_dir=folder, recursive=True)):  # noqa: PTH207
            if is_file(folder / name):
                text += (folder / name).read_bytes()
    count = max(0, (len(text) - 1) // data.sequence)
    numbers = torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0)

    def read(number: int, _: int) -> Sample:
        start = number * data.sequence
        run = numbers[start : start + data.sequence + 1].long()
        return {"tokens": run[:-1], "labels": run[1:]}

    return Samples(count, read)


def token_samples(data: Tokens, spec: Spec) -> Samples:
    """Runs of `sequence` tokens as `tokens`; `labels` are one token further on. int64[sequence].
    The samples of one file follow those of the one before."""
    names = [name for name, _ in token_files(data, spec.folder)]
    dtype = f"<u{data.token_bytes}"
    files = [np.memmap(spec.folder / name, dtype, "r") for name in names]
    ends = list(accumulate((len(file) - 1) // data.sequence for file in files))

    def read(number: int, _: int) -> Sample:
        index = bisect.bisect_right(ends, number)
        start = (number - (ends[index - 1] if index else 0)) * data.sequence
        run = torch.from_numpy(files[index][start : start + data.sequence + 1].astype(np.int64))
        return {"tokens": run[:-1], "labels": run[1:]}

    return Samples(ends[-1] if ends else 0, read)


def array_samples(data: Arrays, folder: Path) -> Samples:
    """Element i of each array's first dimension."""
    if isinstance(data.files, str):
        from safetensors.torch import load_file

        arrays = load_file(folder / data.files)
    else:
        arrays = {
            field: torch.from_numpy(np.load(folder / path, mmap_mode="c"))
            for field, path in data.files.items()
        }
    whole = {name: arrays.pop(name) for name in data.whole}
    count = min((len(array) for array in arrays.values()), default=1)
    return Samples(count, lambda number, _: {name: a[number] for name, a in arrays.items()}, whole)


def random_samples(data: Random, seed: int) -> Samples:
    """Each field of each sample has a generator of its own; a whole one is sample 0's."""

    def draw(name: str, field: RandomField, number: int) -> Tensor:
        key = f"{seed} {name} {number}"
        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        if field.high is None:
            return torch.randn(field.shape, generator=generator, dtype=torch.float32)
        dtype = getattr(torch, field.dtype)
        return torch.randint(field.low, field.high, field.shape, generator=generator, dtype=dtype)

    def read(number: int, _: int) -> Sample:
        fields = {n: f for n, f in data.fields.items() if n not in data.whole}
        return {name: draw(name, field, number) for name, field in fields.items()}

    whole = {name: draw(name, data.fields[name], 0) for name in data.whole}
    return Samples(data.samples, read, whole)


def dataset_samples(data: Dataset, spec: Spec) -> Samples:
    """What the user's dataset gives, numbers and arrays as tensors, filled up where the spec says
    so; what it draws at random follows from seed, epoch and sample number."""
    dataset = make_dataset(data, spec)

    def take(number: int, epoch: int) -> Sample:
        key = f"{spec.train.seed} epoch {epoch} sample {number}"
        seed = zlib.crc32(key.encode())
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002  # the generator that datasets use
        with users_errors(spec.at("data.source"), f"{data.source}: reading sample {number} failed"):
            sample = dataset[number]  # type: ignore[index]  # a Dataset of the user's
        if not isinstance(sample, Mapping):
            values = sample if isinstance(sample, tuple | list) else (sample,)
            sample = dict(zip(data.fields, values, strict=True))
        fields = {name: torch.as_tensor(value) for name, value in sample.items()}
        return {name: fill(spec, data, name, tensor, number) for name, tensor in fields.items()}

    @cache
    def first() -> Sample:
        return take(0, 0)

    def read(number: int, epoch: int) -> Sample:
        sample, shapes = take(number, epoch), {n: tuple(t.shape) for n, t in first().items()}
        for name, tensor in sample.items():
            if tuple(tensor.shape) != shapes.get(name, tensor.shape):
                there = f"{[*tensor.shape]}, that of sample 0 {[*shapes[name]]}"
                message = f"{name} of sample {number} has the shape {there}"
                hint = f"data.pad and data.length where only lengths differ: pad: {{{name}: 0}}"
                raise RunError(message, spec.at("data.source"), hint)
        return sample

    whole = read_attributes(spec, data, dataset)
    return Samples(len(dataset), read, whole)  # type: ignore[arg-type]


def fill(spec: Spec, data: Dataset, name: str, tensor: Tensor, number: int) -> Tensor:
    """A field of a sample, filled up where the spec says so."""
    if name not in data.pad:
        return tensor
    try:
        return fill_up(tensor, data.pad[name], data.length or 0)
    except ValueError as error:
        message = f"{name} of sample {number} {error}"
        raise RunError(message, spec.at("data.length"), "a longer data.length") from error


def steps_per_epoch(spec: Spec, samples: int) -> int:
    batch = spec.train.global_batch
    return samples // batch if spec.data.last_batch == "drop" else -(-samples // batch)


def total_steps(spec: Spec, samples: int) -> int:
    """Length of the training."""
    if spec.train.steps is not None:
        return spec.train.steps
    return (spec.train.epochs or 0) * steps_per_epoch(spec, samples)


def epoch_of_step(spec: Spec, samples: int, step: int) -> tuple[int, int]:
    """The epoch of a step, and the step's number in it."""
    return divmod(step, steps_per_epoch(spec, samples))


def samples_of_step(spec: Spec, samples: int, step: int) -> list[int]:
    """Numbers of the samples that a step takes, in order."""
    epoch, index = epoch_of_step(spec, samples, step)
    key = f"{spec.train.seed} epoch {epoch}"
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    order = torch.randperm(samples, generator=generator)
    batch = spec.train.global_batch
    return order[index * batch : (index + 1) * batch].tolist()


def microbatches(numbers: Sequence[int], count: int) -> list[list[int]]:
    """Runs that differ in length by at most one, the longer first; none without a sample."""
    runs = torch.tensor(numbers).tensor_split(count)  # splits in just this way
    return [run.tolist() for run in runs if len(run)]
