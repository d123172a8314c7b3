"""Names of values in one function: the user's own where free, never one that is still read."""

import builtins
import keyword
import unicodedata
from collections.abc import Mapping

reserved = frozenset(
    (
        *keyword.kwlist,
        "self",
        "torch",
        "nn",
        "F",
        "math",
        "device",
        "batch",
        "key",
        "seed_layer",
        "range",
        "str",
        "enumerate",
        "i",
    )
)
"""What forward's text means by these names is no value."""
outside = frozenset(
    ("mb", "step", "stage", "live", "losses", "loss", "sizes", "sum", "samples", "samples_of",
     "epoch", "order", "windows", "text", "arrays", "dataset", "rows", "row", "fields", "field",
     "draw_field", "list", "zip", "divmod", "SEED", "MICROBATCHES", "MICROBATCH_SIZE", "SAMPLES",
     "GLOBAL_BATCH", "STEPS",
     "shares", "weights", "total", "means", "results", "batch_size",
     "stream", "runs", "run", "read_run", "parts", "ahead", "next", "iter",
     "len", "cuda", "to_device", "read_sample", "as_field", "fill_up", "Batches",
     "whole_fields")
)  # fmt: skip
"""The same for the functions that read data and run a step."""
script = frozenset(
    (*dir(builtins), *outside, "Stage", "Edge", "Path", "F", "nn", "torch", "dist", "ast",
     "collections", "datetime", "functools", "glob", "json", "math", "os", "struct", "sysconfig",
     "time", "zlib", "RANK", "WORLD_SIZE", "HERE", "COMPILATION", "EPOCHS", "LR", "WARMUP_STEPS",
     "FINAL", "MAX_NORM", "TIMEOUT", "FOLDER", "device", "cuda", "backend", "device_id", "groups",
     "pairs", "edge", "fact", "facts", "ranks", "found", "begin", "norm", "args", "optimizer",
     "raw", "files", "patterns", "draw", "guard", "init_weights", "get_batch", "forward",
     "backward", "run_microbatches", "lr_at", "clip_gradients", "log", "seed_layer", "read_npy",
     "read_safetensors", "read_sample", "random", "sys", "make_dataset", "rank", "store", "told",
     "theirs", "seed", "longer", "PCT_START", "DIV_FACTOR", "FINAL_DIV_FACTOR", "EVERY", "GAMMA",
     "GROUP_LRS", "MAX_VALUE", "group", "rest", "parameter", "name", "lr", "lr_factor", "bisect",
     "itertools", "map_tokens", "fingerprint", "shards", "starts", "counts", "contextlib",
     "Reducer", "reducer", "REPLICA", "REPLICAS", "BUCKET_BYTES", "members", "weigh", "weight_of",
     "statistics_kept", "recompute", "path", "after_step",
     "NormalizeTogether", "SyncBatchNorm1d", "SyncBatchNorm2d", "SyncBatchNorm3d", "sum_replicas",
     "norm_groups", "compiled_for", "array", "kind", "shape", "dtype", "dcp", "shutil", "signal",
     "importlib", "first", "stop", "stopped", "metrics", "lines", "CHECKPOINTS", "SAVE_STEPS",
     "KEPT", "BATCH", "STATISTICS", "WHOLE", "progress", "checksum", "save_checkpoint",
     "find_checkpoints", "find_damage", "resume", "load_checkpoint", "stops_after")
)  # fmt: skip
"""What a script means otherwise than a class of the user's."""


class Scope:
    """Binds values to names while a function is written from top to bottom."""

    def __init__(self, last_use: Mapping[str, float]) -> None:
        self.last_use = dict(last_use)
        """Value -> position of its last reader."""
        self.names: dict[str, str] = {}
        self.bound: dict[str, str] = {}
        """Name -> the value that it holds now."""

    def bind(self, value: str, wanted: str, position: float) -> str:
        """Name a value from `position` on: as wanted, unless a value of that name is read later."""
        name = self.unused(clean(wanted), position)
        self.names[value], self.bound[name] = name, value
        return name

    def unused(self, wanted: str, position: float) -> str:
        """The wanted name, or it with the lowest number with which no value is lost."""
        name, count = wanted, 1
        while self.holds_other(name, position):
            count += 1
            name = f"{wanted}_{count}"
        return name

    def holds_other(self, name: str, position: float) -> bool:
        held = self.bound.get(name)
        return held is not None and self.last_use.get(held, -1.0) > position

    def __getitem__(self, value: str) -> str:
        return self.names[value]

    def __contains__(self, value: str) -> bool:
        return value in self.names


def clean_outside(name: str) -> str:
    """A name for a value that goes from stage to stage, or comes from the data."""
    name = clean(name)
    return f"{name}_" if name in outside else name


def clean(name: str) -> str:
    """A name that Python takes and that means nothing else in a forward."""
    name = unicodedata.normalize("NFKC", name)  # as Python reads names
    name = "".join(char if f"a{char}".isidentifier() else "_" for char in name) or "value"
    name = name if name.isidentifier() else f"_{name}"
    return f"{name}_" if name in reserved else name
