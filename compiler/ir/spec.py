"""Spec: what the user asks for. Fields bear the names of the YAML's keys.

`frontend.load` fills every default, so nothing after it asks what a missing key means; only
`cuts: auto` is left open. schemas/spec.schema.json defines the language, and a test holds the two
together. Sizes are in bytes, times in seconds, rates in bytes or FLOP per second.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from ..errors import Location, nearest
from .cluster import Cluster


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
    `package.module:callable`."""
    weight: Weight = Weight()


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
    last_batch: Literal["keep", "drop"] = "keep"


Data = Text | Tokens | Arrays | Random | Dataset


Option = None | bool | int | float | str | tuple["Option", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parameters that the optimizer treats apart."""

    params: tuple[str, ...]
    """Patterns, as of files, for the names in the user's model; a tied parameter has its first."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """Arguments, `lr` among them, where they differ from the optimizer's."""

    def matches(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """A class of torch.optim and its arguments."""

    name: str = "AdamW"
    """As torch writes it."""
    lr: float = 1e-3
    options: Mapping[str, Option] = field(default_factory=dict)
    """Arguments by torch's names, where they differ from torch's defaults."""
    groups: tuple[Group, ...] = ()
    """A parameter is in the first that matches it; the rest have the options above."""

    def group_of(self, name: str) -> int:
        """The number of a parameter's group; that of the rest is the number of groups."""
        found = (i for i, group in enumerate(self.groups) if group.matches(name))
        return next(found, len(self.groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class LrSchedule:
    """The learning rate by step: linear warm-up to lr, then the named course.

    With i the step, counted from 0, and n the steps of the training:
      constant      lr
      linear        down to final x lr at step n
      cosine        the same along half a cosine
      one_cycle     from lr / div_factor up to lr at step pct_start x n - 1, then down to the first
                    rate / final_div_factor at the last step, both along half a cosine, as
                    torch.optim.lr_scheduler.OneCycleLR
      step          x gamma after each `every` steps, counted from the end of the warm-up
      inverse_sqrt  lr x sqrt(warmup / (i + 1)), or lr / sqrt(i + 1) without a warm-up
      a callable    lr x the factor that it makes of i, during the warm-up as well
    """

    name: str = "constant"
    """Or `file.py:callable`, `package.module:callable`."""
    warmup: int = 0
    """Steps; step i of them runs at lr x (i + 1) / warmup."""
    final: float = 0.0
    """A fraction of lr."""
    pct_start: float = 0.3
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    every: int | None = None
    gamma: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    global_batch: int = 32
    """Samples in a step."""
    steps: int | None = 100
    """None where epochs is set."""
    epochs: int | None = None
    optimizer: Optimizer = Optimizer()
    lr_schedule: LrSchedule = LrSchedule()
    clip_norm: float | None = None
    """Greatest norm of the whole model's gradient; None: not clipped."""
    clip_value: float | None = None
    """Greatest element of it, up and down; None: not clipped."""
    precision: Literal["fp32", "fp64", "bf16"] = "fp32"
    """bf16: weights, gradients and the optimizer in fp32, forward under torch.autocast."""
    compile: bool = False
    """Whether each stage's forward goes through torch.compile."""
    seed: int = 0
    timeout: float = 600.0
    """Seconds of any wait on another rank."""


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
class Spec:
    version: int = 1
    name: str
    """The spec file's own name where it gives none; the output folder is called so."""
    model: Model
    data: Data
    train: Train = Train()
    cluster: Cluster
    parallel: Parallel
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
