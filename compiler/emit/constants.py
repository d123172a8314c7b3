"""What the spec says of the training, as constants at the head of a script."""

from collections.abc import Mapping

from ..ir.spec import Spec
from .data import DataView
from .expression import number, plain


def training_constants(spec: Spec, data: DataView | None, *, even: bool) -> list[str]:
    """A line for those that belong together."""
    lengths, rates = group(spec)
    parts = "MICROBATCHES" if spec.parallel.data == 1 else "(MICROBATCHES * REPLICAS)"
    size = [f"MICROBATCH_SIZE = GLOBAL_BATCH // {parts}"] if even else []
    timeout = f"datetime.timedelta(seconds={spec.train.timeout:g})"
    return [
        together(lengths),
        *size,
        together(rates),
        f"TIMEOUT = {timeout}  # of any wait on another rank",
        *(data.constants if data else ()),
    ]


def compared_constants(spec: Spec) -> list[str]:
    """Names of those on which all ranks must agree."""
    lengths, rates = group(spec)
    return ["MICROBATCHES", *lengths, *rates]


def group(spec: Spec) -> tuple[dict[str, str], dict[str, str]]:
    """How long and how fast: names and values."""
    train = spec.train
    name, count = ("STEPS", train.steps) if train.steps is not None else ("EPOCHS", train.epochs)
    lengths = {name: str(count), "GLOBAL_BATCH": str(train.global_batch), "SEED": str(train.seed)}
    rates = {"LR": literal(train.optimizer.lr)}
    if train.lr_schedule.warmup:
        rates["WARMUP_STEPS"] = str(train.lr_schedule.warmup)
    if train.lr_schedule.name != "constant" and train.lr_schedule.final:
        rates["FINAL"] = literal(train.lr_schedule.final)
    if train.clip_norm is not None:
        rates["MAX_NORM"] = literal(train.clip_norm)
    return lengths, rates


def together(values: Mapping[str, str]) -> str:
    return f"{', '.join(values)} = {', '.join(values.values())}"


def literal(value: float) -> str:
    return plain(number(value).text)
