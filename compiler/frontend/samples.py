"""The samples that a spec names, and which of them each step takes.

What the emitted scripts read is read here again, from the language's definition and by code of
its own: text by bytes, arrays by their first dimension, random samples by a seed each, a user's
Dataset by index. Floats have the spec's precision. The order of an epoch hangs on seed and epoch
alone; each step takes the next `global_batch` samples of it, the last one of an epoch what is left.
"""

import glob
import random
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import RunError
from ..ir.spec import Arrays, Dataset, Random, RandomField, Spec, Text
from .capture.build import dtypes
from .capture.fields import make_dataset

Sample = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Samples:
    """Every sample of the data, read when asked for."""

    count: int
    read: Callable[[int, int], Sample]
    """Sample number, epoch -> its fields."""

    def batch(
        self, numbers: Iterable[int], fields: Iterable[str], epoch: int
    ) -> tuple[Tensor, ...]:
        """These samples' fields, stacked along a new first dimension."""
        samples = [self.read(number, epoch) for number in numbers]
        return tuple(torch.stack([sample[field] for sample in samples]) for field in fields)


def read_samples(spec: Spec) -> Samples:
    """Open the data. Raises RunError where it makes no batch."""
    if isinstance(spec.data, Text):
        samples = text_samples(spec.data, spec.folder)
    elif isinstance(spec.data, Arrays):
        samples = array_samples(spec.data, spec.folder)
    elif isinstance(spec.data, Random):
        samples = random_samples(spec.data, spec.train.seed)
    else:
        samples = dataset_samples(spec.data, spec)
    precision = dtypes[spec.train.precision]

    def read(number: int, epoch: int) -> Sample:
        sample = samples.read(number, epoch)
        return {n: t.to(precision) if t.is_floating_point() else t for n, t in sample.items()}

    if steps_per_epoch(spec, samples.count) == 0:
        message = f"{samples.count} samples make no batch of {spec.train.global_batch}"
        raise RunError(message, spec.at("data"), "last_batch: keep, or a smaller global_batch")
    return Samples(samples.count, read)


def text_samples(data: Text, folder: Path) -> Samples:
    """Runs of `sequence` bytes as `tokens`; `labels` are one byte further on. int64[sequence]."""
    stdlib = glob.escape(sysconfig.get_path("stdlib"))
    text = bytearray()
    for pattern in (written.replace("{stdlib}", stdlib) for written in data.files):
        # glob's own rules, as in the scripts: Path.glob takes no absolute pattern
        for name in sorted(glob.glob(pattern, root_dir=folder, recursive=True)):  # noqa: PTH207
            if (folder / name).is_file():
                text += (folder / name).read_bytes()
    count = max(0, (len(text) - 1) // data.sequence)
    numbers = torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0)

    def read(number: int, _: int) -> Sample:
        start = number * data.sequence
        run = numbers[start : start + data.sequence + 1].long()
        return {"tokens": run[:-1], "labels": run[1:]}

    return Samples(count, read)


def array_samples(data: Arrays, folder: Path) -> Samples:
    """Element i of each array's first dimension."""
    if isinstance(data.files, str):
        from safetensors.torch import load_file

        arrays = load_file(folder / data.files)
    else:
        arrays = {
            field: torch.from_numpy(np.load(folder / path)) for field, path in data.files.items()
        }
    count = min(len(array) for array in arrays.values())
    return Samples(count, lambda number, _: {name: a[number] for name, a in arrays.items()})


def random_samples(data: Random, seed: int) -> Samples:
    """Each field of each sample has a generator of its own."""

    def draw(name: str, field: RandomField, number: int) -> Tensor:
        key = f"{seed} {name} {number}"
        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        if field.high is None:
            return torch.randn(field.shape, generator=generator, dtype=torch.float32)
        dtype = getattr(torch, field.dtype)
        return torch.randint(field.low, field.high, field.shape, generator=generator, dtype=dtype)

    def read(number: int, _: int) -> Sample:
        return {name: draw(name, field, number) for name, field in data.fields.items()}

    return Samples(data.samples, read)


def dataset_samples(data: Dataset, spec: Spec) -> Samples:
    """What the user's dataset gives, numbers and arrays as tensors; what it draws at random follows
    from seed, epoch and sample number."""
    dataset = make_dataset(data, spec)

    def read(number: int, epoch: int) -> Sample:
        key = f"{spec.train.seed} epoch {epoch} sample {number}"
        seed = zlib.crc32(key.encode())
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002  # the generator that datasets use
        sample = dataset[number]  # type: ignore[index]  # a Dataset of the user's
        if not isinstance(sample, Mapping):
            values = sample if isinstance(sample, tuple | list) else (sample,)
            sample = dict(zip(data.fields, values, strict=True))
        return {name: torch.as_tensor(value) for name, value in sample.items()}

    return Samples(len(dataset), read)  # type: ignore[arg-type]


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
