"""What a spec says that no schema can refuse: numbers that do not go together, files not there.

Each check names the keys that it reads. Where the schema complained about one of them the check is
left out, so that one mistake gives one complaint. No user code runs and torch is not imported.
"""

import difflib
import glob
import keyword
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from ..errors import SpecError
from ..ir.spec import Arrays, Data, Dataset, Random, Spec, Text, Tokens
from .callables import check_callables, check_loss
from .data_sense import check_arguments, check_pad, check_random, check_tokens, check_whole, count
from .document import Complaint
from .files import is_file
from .limits import check_limits
from .optimizers import check_optimizer
from .schema import alternatives, flow, schema

Found = Iterator[tuple[str, str, str]]  # (path, message, hint)


def check_sense(spec: Spec, bad: Iterable[str]) -> Iterator[Complaint]:
    """Complaints about a spec, the paths in `bad` being known to be wrong already."""
    wrong = tuple(bad)
    for reads, check in checks:
        if not any(touches(path, other) for path in reads for other in wrong):
            for path, message, hint in check(spec):
                yield Complaint(path, SpecError(message, spec.at(path), hint))


def touches(path: str, other: str) -> bool:
    """One is the other, or lies within it."""
    shorter, longer = sorted((path, other), key=len)
    return longer == shorter or longer.startswith((f"{shorter}.", f"{shorter}["))


def check_name(spec: Spec) -> Found:
    pattern = schema()["properties"]["name"]["pattern"]
    if not re.fullmatch(pattern, spec.name):
        message = f"the file's name, {spec.name!r}, cannot name the output folder"
        yield "name", message, "add a line such as name: quickstart"


def check_devices(spec: Spec) -> Found:
    parallel, devices = spec.parallel, spec.cluster.num_devices
    pipeline, data, nodes = parallel.pipeline, parallel.data, spec.cluster.nodes
    needed = pipeline * data
    if needed == devices:
        return
    path = "parallel.pipeline" if "parallel.pipeline" in spec.locations else "parallel.cuts"
    remedies = [f"pipeline: {devices // data}"] if devices % data == 0 else []
    remedies += [f"devices_per_node: {needed // nodes}"] if needed % nodes == 0 else []
    message = f"pipeline {pipeline} x data {data} needs {count(needed, 'device')}"
    yield path, f"{message}; the cluster has {devices}", alternatives(remedies)


def check_cuts(spec: Spec) -> Found:
    cuts, pipeline = spec.parallel.cuts, spec.parallel.pipeline
    if cuts != "auto" and len(cuts) != pipeline - 1:
        message = f"parallel.cuts lists {count(len(cuts), 'module')}; pipeline {pipeline} needs"
        hint = f"pipeline: {len(cuts) + 1} or cuts: auto"
        yield "parallel.cuts", f"{message} {pipeline - 1}, where stages 1, 2, ... begin", hint


def check_microbatches(spec: Spec) -> Found:
    samples, microbatches = spec.train.global_batch, spec.parallel.microbatches
    share = samples // spec.parallel.data
    if microbatches > share:
        each = f" for each of {spec.parallel.data} replicas" if spec.parallel.data > 1 else ""
        what = count(microbatches, "microbatch").replace("microbatchs", "microbatches")
        need = "need" if microbatches > 1 else "needs"
        message = f"{what}{each} {need} as many samples; global_batch is {samples}"
        remedies = [f"microbatches: {share}"] if share else []
        remedies += [f"global_batch: {microbatches * spec.parallel.data}"]
        yield "parallel.microbatches", message, alternatives(remedies)


def check_lr_schedule(spec: Spec) -> Found:
    course, steps, place = spec.train.lr_schedule, spec.train.steps, "train.lr_schedule"
    if steps is not None and course.warmup > steps:
        message = (
            f"warmup {course.warmup} is longer than the {count(steps, 'step')} of the training"
        )
        yield f"{place}.warmup", message, f"warmup: {max(1, steps // 10)}"
    for key, kinds in meanings.items():
        if course.name not in kinds and f"{place}.{key}" in spec.locations:
            kind = "callable" if ":" in course.name else course.name
            message = f"{key} has no meaning for a {kind} lr_schedule"
            yield f"{place}.{key}", message, " or ".join(f"name: {name}" for name in kinds)
    if course.name == "one_cycle" and f"{place}.warmup" in spec.locations:
        message = "one_cycle has a warm-up of its own: pct_start, a share of the steps"
        yield f"{place}.warmup", message, "pct_start: 0.1"
    if course.name == "step" and course.every is None:
        message = "the lr_schedule step needs every, the steps from one fall to the next"
        yield place, message, "lr_schedule: {name: step, every: 30}"


meanings: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "final": ("linear", "cosine"),
        "pct_start": ("one_cycle",),
        "div_factor": ("one_cycle",),
        "final_div_factor": ("one_cycle",),
        "every": ("step",),
        "gamma": ("step",),
    }
)
"""Key of an lr_schedule -> the courses that take it."""


def check_timeout(spec: Spec) -> Found:
    if spec.train.timeout <= 0:
        yield "train.timeout", "train.timeout is 0; it must be above 0", "timeout: 10min"


def check_inputs(spec: Spec) -> Found:
    """Every input is fed by a field that the data has."""
    fields = known_fields(spec.data)
    for index, (name, feed) in enumerate(spec.model.inputs):
        path = f"model.inputs[{index}]" if name is None else f"model.inputs.{name}"
        if fields and feed.field not in fields:
            close = difflib.get_close_matches(feed.field, fields, n=1)
            hint = f"did you mean {close[0]}?" if close else f"its fields are {', '.join(fields)}"
            yield path, f"the data has no field {feed.field!r}", hint
        field = spec.data.fields.get(feed.field) if isinstance(spec.data, Random) else None
        if field is not None and feed.shape is not None and feed.shape[1:] != field.shape:
            shape, wanted = flow([*feed.shape]), flow(["batch", *field.shape])
            message = f"shape {shape} is not {wanted}, that of the field {feed.field}"
            yield path, message, "give the shape once"


def known_fields(data: Data) -> tuple[str, ...]:
    """Names of the fields, as far as the spec tells them."""
    if isinstance(data, Text | Tokens):
        return ("tokens", "labels")
    if isinstance(data, Arrays):
        return tuple(data.files) if isinstance(data.files, Mapping) else ()
    if isinstance(data, Dataset):
        return (*data.fields, *data.whole) if data.fields else ()
    return tuple(data.fields)


def check_files(spec: Spec) -> Found:
    """Files named in the spec are there. A glob with an absolute path is left to the run."""
    if isinstance(spec.data, Arrays):
        files = spec.data.files
        named = (
            {"data.files": files}
            if isinstance(files, str)
            else {f"data.files.{field}": file for field, file in files.items()}
        )
        for path, file in named.items():
            if not is_file(spec.folder / file):
                yield path, f"no file {file} in the spec's folder", "files are relative to the spec"
    elif isinstance(spec.data, Text | Tokens):
        for index, pattern in enumerate(spec.data.files):
            for message, hint in glob_faults(pattern, spec.folder):
                yield f"data.files[{index}]", message, hint


def glob_faults(pattern: str, folder: Path) -> Iterator[tuple[str, str]]:
    strange = [word for word in re.findall(r"\{[^{}]*\}", pattern) if word != "{stdlib}"]
    if strange:
        yield f"{strange[0]} in {pattern!r} stands for nothing", "only {stdlib} does"
    elif not Path(pattern).is_absolute():
        path = pattern.replace("{stdlib}", glob.escape(sysconfig.get_path("stdlib")))
        found = glob.iglob(path, root_dir=folder, recursive=True)  # noqa: PTH207  # as scripts do
        if (first := next(found, None)) is None:
            yield f"no file matches {pattern!r}", "patterns are relative to the spec's folder"
        elif (folder / first).is_dir() and not any(is_file(folder / name) for name in found):
            yield f"{pattern!r} is a folder", f"files: {Path(pattern) / '*'}"


def check_keywords(spec: Spec) -> Found:
    """Names that Python keeps for itself name no argument and no field."""
    names = {f"model.inputs.{name}": name for name, _ in spec.model.inputs if name}
    names |= {f"model.args.{name}": name for name in spec.model.factory.args}
    if isinstance(spec.data, Dataset):
        names |= {f"data.args.{name}": name for name in spec.data.args}
    for path, name in names.items():
        if keyword.iskeyword(name):
            message = f"{name!r} is a word of Python, no argument's name"
            yield path, message, "write the name that the code has for it"


checks: tuple[tuple[tuple[str, ...], Callable[[Spec], Found]], ...] = (
    (("name",), check_name),
    (("model", "data.source", "data.args"), check_keywords),
    (
        (
            "model.factory",
            "model.args",
            "model.loss",
            "model.weight",
            "data.source",
            "data.args",
            "train.lr_schedule",
        ),
        check_callables,
    ),
    (("model.inputs", "data.source", "data.fields", "data.files"), check_inputs),
    (
        ("model.inputs", "data.source", "data.samples", "data.fields", "train.global_batch"),
        check_random,
    ),
    (("model.loss",), check_loss),
    (("data.source", "data.files"), check_files),
    (
        ("data.source", "data.files", "data.dtype", "data.sequence", "train.global_batch"),
        check_tokens,
    ),
    (("data.source", "data.args"), check_arguments),
    (("data.source", "data.fields", "data.pad", "data.length"), check_pad),
    (("model.inputs", "data.source", "data.fields", "data.files", "data.whole"), check_whole),
    (
        (
            *(
                f"train.optimizer.{key}"
                for key in (
                    "name",
                    "momentum",
                    "dampening",
                    "nesterov",
                    "foreach",
                    "fused",
                    "params",
                    "groups",
                )
            ),
            "cluster.device",
        ),
        check_optimizer,
    ),
    (
        (
            "train.lr_schedule.name",
            "train.lr_schedule.warmup",
            "train.lr_schedule.every",
            "train.steps",
            "train.epochs",
        ),
        check_lr_schedule,
    ),
    (("train.timeout",), check_timeout),
    (("parallel", "cluster", "train.global_batch", "train.timeout"), check_limits),
    (
        (
            "parallel.pipeline",
            "parallel.data",
            "parallel.cuts",
            "cluster.nodes",
            "cluster.devices_per_node",
        ),
        check_devices,
    ),
    (("parallel.pipeline", "parallel.cuts", "cluster"), check_cuts),
    (
        ("parallel.microbatches", "parallel.data", "train.global_batch", "parallel.pipeline"),
        check_microbatches,
    ),
)
