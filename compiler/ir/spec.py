"""Spec: what the user asks for. Fields bear the names of the YAML's keys.

`frontend.load` fills every default, so nothing after it asks what a missing key means; only
`cuts: auto` is left open. schemas/spec.schema.json defines the language, and a test holds the two
together. Sizes are in bytes, times in seconds, rates in bytes or FLOP per second.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..errors import Location, nearest
from .cluster import Cluster
from .train import Group, LrSchedule, Optimizer, Option, Train

__all__ = [
    "Arrays",
    "Checkpoint",
    "Cluster",
    "Data",
    "Dataset",
    "Factory",
    "Group",
    "InputSpec",
    "LrSchedule",
    "Model",
    "Optimizer",
    "Option",
    "Parallel",
    "Random",
    "RandomField",
    "Spec",
    "Text",
    "Tokens",
    "Train",
    "Value",
    "Weight",
    "whole_fields",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Factory:
    """A callable of the user's and the keyword arguments it is called with."""

    target: str
    """`models/gpt.py:build`, the file beside the spec, or `package.module:callable`."""
    args: Mapping[str, "Value"] = field(default_factory=dict)
    """A tuple stands for a YAML list: the callable is given a list."""


Value = None | bool | int | float | str | tuple["Value", ...] | Mapping[str, "Value"] | Factory


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """What feeds one argument of the model."""

    field: str
    """A field of the data; the argument's own name where the spec gives none."""
    shape: tuple[int | Literal["batch"], ...] | None = None
    """`batch` first; None where the data tells."""
    dtype: str | None = None
    """torch's name; None where the data tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """What the mean of the loss and of the metrics is over."""

    kind: str = "samples"
    """`samples`; `tokens`: the elements of a field that are not ignore_index; or a function of the
    data's fields, by the names of its arguments: `file.py:callable`, `package.module:callable`."""
    field: str | None = None
    """Of tokens; None for the one field that the loss takes."""
    ignore_index: int = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    factory: Factory
    inputs: tuple[tuple[str | None, InputSpec], ...] = ()
    """(argument name, None for one by position; what feeds it). Empty: the fields that bear the
    names of the model's arguments."""
    loss: str = "output"
    """`output`: the model returns it. Otherwise a function of the model's output and of the data's
    fields that feed no input: a name in torch.nn.functional, `file.py:callable` or
    `package.module:callable`; a module, or its class, is one too."""
    weight: Weight = Weight()
    leaf: tuple[str, ...] = ()
    """Paths of modules that are kept whole, or names of their classes."""
    coupled: Literal["refuse", "accept"] = "refuse"
    """What becomes of a model that looks at several samples at once: `accept` has each microbatch
    be a batch of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The bytes of files, end to end. Sample i is `sequence` bytes from i x sequence on, as the
    field `tokens`; `labels` are the same, one byte further on. Both are int64[sequence]."""

    source: Literal["text"] = "text"
    files: tuple[str, ...]
    """Globs relative to the spec's folder; `{stdlib}` stands for the standard library's folder."""
    sequence: int
    last_batch: Literal["keep", "drop"] = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Files of tokens, mapped into memory. Sample i of a file is `sequence` tokens from
    i x sequence on, as the field `tokens`; `labels` are the same, one token further on. Both are
    int64[sequence]. The samples of one file follow those of the one before; what is left of a file
    after its last sample is not read."""

    source: Literal["tokens"] = "tokens"
    files: tuple[str, ...]
    """Globs relative to the spec's folder, as those of Text."""
    dtype: Literal["uint16", "uint32"]
    """Of a token in the files, little-endian."""
    sequence: int
    last_batch: Literal["keep", "drop"] = "keep"

    @property
    def token_bytes(self) -> int:
        return 2 if self.dtype == "uint16" else 4

    @property
    def one_file(self) -> bool:
        """Whether the spec names one file, not a pattern."""
        return len(self.files) == 1 and not set(self.files[0]) & set("*?[{")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """Arrays whose first dimension counts the samples; each is a field."""

    source: Literal["arrays"] = "arrays"
    files: str | Mapping[str, str]
    """A safetensors file, or field -> npy file; relative to the spec's folder."""
    whole: tuple[str, ...] = ()
    """Fields without a batch dimension: each microbatch takes all of the array."""
    last_batch: Literal["keep", "drop"] = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomField:
    """Integers uniform in [low, high), or floats of the standard normal distribution."""

    shape: tuple[int, ...] = ()
    """Of one sample."""
    dtype: str = "float32"
    low: int = 0
    high: int | None = None
    """None for floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Random:
    """Made-up samples, a function of the seed and of the sample's number."""

    source: Literal["random"] = "random"
    samples: int
    fields: Mapping[str, RandomField]
    """Those given under model.inputs included."""
    whole: tuple[str, ...] = ()
    """Fields without a batch dimension, drawn once."""
    last_batch: Literal["keep", "drop"] = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A torch Dataset of the user's."""

    source: str
    """`file.py:callable` or `package.module:callable`."""
    args: Mapping[str, Value] = field(default_factory=dict)
    fields: tuple[str, ...] = ()
    """Names of the elements of a sample; empty for a dataset of dicts, which names them itself."""
    workers: int = 0
    """Processes of each rank that read ahead."""
    pad: Mapping[str, float] = field(default_factory=dict)
    """Field -> what fills each sample up to `length`, along its first dimension."""
    length: int | None = None
    """None where no field is padded."""
    whole: tuple[str, ...] = ()
    """Fields without a batch dimension: attributes of the Dataset."""
    last_batch: Literal["keep", "drop"] = "keep"


Data = Text | Tokens | Arrays | Random | Dataset


def whole_fields(data: Data) -> tuple[str, ...]:
    """Fields that go whole to every microbatch."""
    return () if isinstance(data, Text | Tokens) else data.whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    pipeline: int
    """Number of stages; `auto` is one for each device, or for each entry of cuts and one."""
    data: int = 1
    """Replicas."""
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    microbatches: int
    """Of each replica; `auto` is 4 for each stage, at most one for each sample."""
    cuts: tuple[str, ...] | Literal["auto"] = "auto"
    """Paths of the modules where stages 1, 2, ... begin."""
    recompute: tuple[str, ...] | Literal["none", "stage"] = "none"
    """What the backward computes again: nothing, each stage from what it receives (GPipe, Huang et
    al. 2019, section 2.3), or the modules at these paths from their inputs."""
    sync_batch_norm: bool = False
    """Batch norms look at all replicas' samples of a microbatch number together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Where and how often a run saves what it needs to go on."""

    dir: str
    """A folder, relative to the spec's."""
    every: int = 1000
    """Steps."""
    keep: int = 2
    """Checkpoints; older ones go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    version: int = 1
    name: str
    """The spec file's own name where it gives none; the output folder is called so."""
    model: Model
    data: Data
    train: Train = Train()  # noqa: RUF009  # frozen
    cluster: Cluster
    parallel: Parallel
    checkpoint: Checkpoint | None = None
    path: Path
    """The spec file, as the user named it."""
    locations: Mapping[str, Location] = field(default_factory=dict, compare=False, repr=False)
    """Dotted path (`model.factory`, `parallel.cuts[1]`) -> place of the key or list item."""

    @property
    def folder(self) -> Path:
        """The folder that files named in the spec are relative to."""
        return self.path.parent

    def at(self, path: str) -> Location:
        """The place of a key, or of the nearest key above it that the file has."""
        return nearest(self.locations, path) or Location(str(self.path))
