"""What the spec says of the training, as constants at the head of a script."""

from collections.abc import Mapping

from ..ir.spec import LrSchedule, Optimizer, Spec
from .data import DataView
from .expression import number, plain
from .layout import width, wrap


def training_constants(spec: Spec, data: DataView | None, *, even: bool) -> list[str]:
    """A line for those that belong together."""
    lengths, rates = group(spec)
    parts = "MICROBATCHES" if spec.parallel.data == 1 else "(MICROBATCHES * REPLICAS)"
    size = [f"MICROBATCH_SIZE = GLOBAL_BATCH // {parts}"] if even else []
    timeout = f"datetime.timedelta(seconds={spec.train.timeout:g})"
    return [
        together(lengths),
        *size,
        *in_lines(rates, course_constants(spec.train.lr_schedule)),
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
    own = [literal(rate) for rate in own_rates(train.optimizer).values()]
    if own:
        rates["GROUP_LRS"] = f"({', '.join(own)}{',' * (len(own) == 1)})"
    rates |= course_constants(train.lr_schedule)
    if train.clip_norm is not None:
        rates["MAX_NORM"] = literal(train.clip_norm)
    if train.clip_value is not None:
        rates["MAX_VALUE"] = literal(train.clip_value)
    return lengths, rates


def own_rates(optimizer: Optimizer) -> dict[int, float]:
    """Learning rates of the parameter groups that have their own, by the group's number."""
    groups = enumerate(optimizer.groups)
    return {i: rate for i, g in groups if isinstance(rate := g.options.get("lr"), int | float)}


def course_constants(course: LrSchedule) -> dict[str, str]:
    """What the course of the learning rate is computed with."""
    found = {"WARMUP_STEPS": str(course.warmup)} if course.warmup else {}
    if course.name in ("linear", "cosine") and course.final:
        found["FINAL"] = literal(course.final)
    if course.name == "one_cycle":
        names = ("pct_start", "div_factor", "final_div_factor")
        found |= {name.upper(): literal(getattr(course, name)) for name in names}
    if course.name == "step":
        found |= {"EVERY": str(course.every), "GAMMA": literal(course.gamma)}
    return found


def in_lines(values: Mapping[str, str], apart: Mapping[str, str]) -> list[str]:
    """All in one line if it fits, else some in one of their own."""
    if len(together(values)) <= width or not apart:
        return ["\n".join(wrap(together(values), 0))]
    rest = {name: value for name, value in values.items() if name not in apart}
    return ["\n".join(wrap(together(rest), 0)), together(apart)]


def together(values: Mapping[str, str]) -> str:
    return f"{', '.join(values)} = {', '.join(values.values())}"


def literal(value: float) -> str:
    return plain(number(value).text)
