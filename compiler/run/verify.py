"""Proves emitted scripts: they run unmodified, the user's own model runs, and all is compared.

In float64 the two trainings run freely, side by side; in float32 the user's model takes each step
from the scripts' own weights (`reference` says why). A spec is compiled anew, for as many steps as
are asked for, and its scripts run to their end. A folder's scripts run as they are, in a copy;
after those steps they are stopped, and then there are no saved weights to check.
"""

import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import pipeline
from ..analysis.memory import reruns
from ..check.mean import check_mean
from ..check.outcome import is_small, rounds
from ..emit.write import write
from ..errors import RunError
from ..frontend.capture.capture import capture
from ..frontend.load import load
from ..frontend.samples import microbatches, read_samples, samples_of_step, total_steps
from ..ir.graph import Graph
from ..ir.norms import counting_norms
from ..ir.spec import Spec, Train
from ..passes.segment import segment
from . import observe
from .compare import Compare, Comparison, Row, worst
from .launch import ForkServer, run_forked, run_torchrun
from .observe import Recording
from .reference import Followed, Trace, run_reference
from .saved import check_saved, read_saved
from .stale import spec_of

EXACT = 1e-10
"""In float64, the two trainings side by side. Measured on specs/, 3 steps: below 1e-14."""
FLIPPED = 1e-7
"""The same of a model that computes in float32 inside: there two sums that differ in their last
bit, as heads that share a key add up its gradient, may be rounded to different numbers. Measured on
Cohere: 2e-11 in gradients, 1e-9 in parameters; a float32 itself has 6e-8."""
ROUNDED = 1e-5
"""In float32, each step from the scripts' own weights. Ranks run the same kernels on the same
microbatches as the reference, so that most differences are 0; where a sum has another order (a
tied gradient, a norm), gradients were off by 4e-7 of the step's largest."""
ROUNDED_BF16 = 2e-2
"""The same for gradients under autocast: parts that are in bfloat16, of 8 bits, are added up in an
order that hangs on how the model is written. Losses and updates are held to ROUNDED: forwards round
alike. Measured on specs/ in two stages: 0 in most, at most 3e-3 of the step's largest gradient."""
WHOLE = 2
"""Steps that are compared with the whole batch in one go, too."""
LONGEST_S = 24 * 3600.0
"""A rank that waits for another is ended by the script's own timeout, long before."""
cpu = {"CUDA_VISIBLE_DEVICES": ""}
left_by_a_run = shutil.ignore_patterns(
    "metrics.jsonl", "weights-rank*.pt", "earlier", "__pycache__"
)


@dataclass(frozen=True, slots=True)
class Job:
    """Scripts to run, and how far."""

    spec: Spec
    """That they are of."""
    graph: Graph
    """Its, with layers."""
    folder: Path
    length: int
    """Steps of the training."""
    steps: int
    """Those to compare."""
    max_forwards: tuple[int, ...] | None
    """After how many forwards each rank is stopped; None: they run to their ends."""


def verify(
    target: Path,
    *,
    steps: int | None = None,
    exact: bool = False,
    timeout_s: float = LONGEST_S,
    fork_server: ForkServer | None = None,
) -> Comparison:
    """Compare `steps` steps, all by default, of a spec's scripts or of a folder's.

    `exact` compiles the spec, or the folder's, for float64 and allows next to no difference. The
    scripts run on the CPU, under torchrun, or from the fork server if there is one. Raises RunError
    where they fail, other PpcErrors where the spec or the model does.
    """
    with (
        tempfile.TemporaryDirectory(
            prefix=".ppc-verify-", dir=place(target, exact=exact)
        ) as scripts,
        tempfile.TemporaryDirectory(prefix="ppc-verify-") as recordings,
    ):
        job = prepare(target, steps, Path(scripts), exact=exact)
        graph = job.graph
        ranks = run(job, Path(recordings), timeout_s, fork_server)
        exactly, replicas = job.spec.train.precision == "fp64", job.spec.parallel.data
        follow = () if exactly else merge(ranks, replicas)
        saved = read_saved(job.folder)
        whole = WHOLE if exactly and is_separable(job.spec, graph) else 0
        reference = run_reference(
            job.spec, graph, job.steps, saved=saved, follow=follow, whole=whole
        )
        rows = Compare(
            ranks=ranks,
            logged=read_metrics(job.folder),
            reference=reference,
            parameters=graph.parameters,
            replicas=replicas,
            **limits(job.spec.train, graph),
        ).rows()
        written = () if job.max_forwards else check_saved(job.spec, job.folder, ranks, graph)
        return Comparison(worst([*check_recipes(graph, reference), *rows, *written]))


def is_separable(spec: Spec, graph: Graph) -> bool:
    """Whether the batch in one go gives what its microbatches do: nothing couples samples, nothing
    is drawn in forward. Of large models that is not known."""
    batch = spec.train.global_batch
    count = spec.parallel.microbatches * spec.parallel.data
    sizes = [len(part) for part in microbatches(range(batch), count)]
    alone = not any(op.random or set(op.mutates) & graph.canonical.keys() for op in graph.ops)
    alone = alone and not counting_norms(graph) and not graph.coupled
    return alone and is_small(graph, batch) and not check_mean(spec, graph, sizes)


def limits(train: Train, graph: Graph) -> dict[str, float]:
    """What may differ, in gradients, in a batch in one go, and in all else."""
    whole = ROUNDED if rounds(graph) else EXACT
    if train.precision == "fp64":
        limit = FLIPPED if rounds(graph) else EXACT
        return {"limit": limit, "gradient_limit": limit, "whole_limit": whole}
    if train.precision == "fp32" and not any(op.autocast for op in graph.ops):
        return {"limit": ROUNDED, "gradient_limit": ROUNDED, "whole_limit": whole}
    limit = ROUNDED_BF16 if train.compile else ROUNDED  # compiled, fewer results are rounded
    return {"limit": limit, "gradient_limit": ROUNDED_BF16, "whole_limit": whole}


def place(target: Path, *, exact: bool) -> Path | None:
    """The folder in which the scripts' folder is made; None for any.

    A copy lies beside its original: scripts name the data's files relative to their own place.
    """
    if not target.exists():
        hint = "name a spec, or a folder that ppc compile wrote"
        raise RunError(f"{target} is not there", hint=hint)
    if target.is_file() and (target.parent / "manifest.json").is_file():
        message = f"{target} is no spec, but a file of compiled scripts"
        raise RunError(message, hint=f"ppc verify {shlex.quote(str(target.parent))}")
    if exact or not target.is_dir():
        return None
    beside = target.absolute().parent
    if not os.access(beside, os.W_OK):
        hint = "verify the spec instead, or a copy elsewhere"
        raise RunError(f"{beside} cannot be written: {target} is copied beside itself", hint=hint)
    return beside


def prepare(target: Path, steps: int | None, folder: Path, *, exact: bool) -> Job:
    """Put the scripts into the folder."""
    spec = load(spec_of(target) if target.is_dir() else target)
    if exact:
        spec = replace(spec, train=replace(spec.train, precision="fp64"))
    if spec.checkpoint:  # none of a run is taken up, or replaced
        own = str(folder.absolute() / "checkpoints")
        spec = replace(spec, checkpoint=replace(spec.checkpoint, dir=own))
    samples = read_samples(spec).count
    length = total_steps(spec, samples)
    compared = min(steps or length, length)
    if target.is_dir() and not exact:
        copy(target, folder)
        keep_apart(folder)
        forwards = count_forwards(spec, samples, compared) if compared < length else None
        return Job(spec, segment(capture(spec)), folder, length, compared, forwards)
    if compared < length:
        spec = replace(spec, train=replace(spec.train, steps=compared, epochs=None))
    forms: dict[str, Any] = {}
    write(pipeline.compile(spec, folder, forms.__setitem__), folder)
    return Job(spec, forms["segment"], folder, compared, compared, None)


def copy(target: Path, folder: Path) -> None:
    """The scripts, with what else lies there: somebody who edits them may read it."""
    try:
        shutil.copytree(target, folder, symlinks=True, ignore=left_by_a_run, dirs_exist_ok=True)
    except shutil.Error as error:
        file, _, why = error.args[0][0]
        hint = "move it out of the folder"
        raise RunError(f"{file} cannot be copied: {why}", hint=hint) from error


def keep_apart(folder: Path) -> None:
    """Let copied scripts have checkpoints of their own: none of a run is taken up, or replaced."""
    place = re.compile(r"^CHECKPOINTS = (\(\n[^)]*\n\)|[^\n]*)$", re.MULTILINE)
    for script in folder.glob("rank*.py"):
        text = script.read_text(encoding="utf-8")
        own = place.sub('CHECKPOINTS = FOLDER / "checkpoints-of-verify"', text)
        if own != text:
            script.write_text(own, encoding="utf-8")


def merge(ranks: Sequence[Recording], replicas: int) -> list[Followed]:
    """What all ranks did, by step: gradients are the same on all replicas."""
    every = [rank for rank in ranks if rank.steps]
    count = min((len(rank.steps) for rank in every), default=0)
    return [
        Followed(
            {n: t for rank in every for n, t in rank.steps[step].gradients.items()},
            tuple(
                {
                    name: tensor
                    for rank in every
                    if rank.rank % replicas == replica
                    for name, tensor in rank.steps[step].state.items()
                }
                for replica in range(replicas)
            ),
        )
        for step in range(count)
    ]


def count_forwards(spec: Spec, samples: int, steps: int) -> tuple[int, ...]:
    """By rank, how often its stage runs forward in these steps: once for each of its replica's
    microbatches that has samples, or twice where it runs again before the backward."""
    data, count = spec.parallel.data, spec.parallel.microbatches
    taken = [samples_of_step(spec, samples, step) for step in range(steps)]
    parts = [len(microbatches(numbers, count * data)) for numbers in taken]
    by_replica = [sum(len(range(r, number, data)) for number in parts) for r in range(data)]
    runs = [2 if reruns(spec, stage) else 1 for stage in range(spec.parallel.pipeline)]
    return tuple(times * number for times in runs for number in by_replica)


def run(
    job: Job, recordings: Path, timeout_s: float, fork_server: ForkServer | None
) -> tuple[Recording, ...]:
    """Run the scripts under observation; what each rank did."""
    world_size = job.spec.parallel.pipeline * job.spec.parallel.data
    device = job.spec.cluster.device.kind
    wrapper = observe.wrapper(recordings, job.max_forwards, device)
    if fork_server is None:
        result = run_torchrun(
            job.folder, world_size, timeout_s=timeout_s, wrapper=wrapper, environment=cpu
        )
    else:
        result = run_forked(
            job.folder, world_size, timeout_s=timeout_s, server=fork_server,
            wrapper=wrapper, environment=cpu,
        )  # fmt: skip
    result.check()
    return observe.read(recordings, world_size)


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """What the scripts logged, a line each step."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def check_recipes(graph: Graph, reference: Trace) -> Iterator[Row]:
    """Whether the recorded initialisation is that of the user's model."""
    for fqn in graph.parameters:
        note = reference.untrue.get(fqn, "")
        yield Row("recipe", None, fqn, None if note else 0.0, 0.0, note)
