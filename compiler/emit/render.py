"""Views -> files. The templates lay out text; which imports and constants a script needs is seen
from the text itself."""

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence

import jinja2

from ..ir.report import File
from .describe import start_command, start_words
from .environment import environment
from .job import Job
from .plan_text import make_plan_page
from .view import view_rank, view_stage

compilation_mark = "@compilation@"
oldest_torch = "2.9"
"""That scripts run with; there is no newest."""
modules = (
    "import ast", "import bisect", "import contextlib", "import datetime", "import functools",
    "import glob", "import itertools", "import json", "import math", "import os", "import random",
    "import shutil", "import signal", "import struct", "import sys", "import sysconfig",
    "import time", "import zlib",
)  # fmt: skip
torch_modules = (
    "import torch", "import torch.distributed as dist",
    "import torch.distributed.checkpoint as dcp", "import torch.nn as nn",
    "import torch.nn.functional as F", "import torch.utils.checkpoint",
)  # fmt: skip


def render(
    job: Job, saved: bytes = b"", copies: Mapping[str, str] | None = None
) -> tuple[File, ...]:
    """Every file of a compilation: scripts, run.py, plan.txt, manifest.json, then what they read.

    `saved`: weights that could not be recorded, as safetensors; `copies`: the user's own modules
    that the scripts import, file name -> text.
    """
    templates = environment()
    twins = job.plan.twins()
    ranks = list(zip(job.programs, job.units, strict=True))
    stages = {rank: view_stage(job, *ranks[rank]) for rank in dict.fromkeys(twins.values())}
    scripts = [
        render_rank(templates, view_rank(job, program, unit, stages[twins[program.rank]]))
        for program, unit in ranks
    ]
    run = templates.get_template("run.py.j2").render(
        name=job.spec.name,
        world_size=job.plan.world_size,
        start=start_words(job.spec),
        command=start_command(job.spec),
        oldest_torch=oldest_torch,
        checkpoints=job.spec.checkpoint is not None,
    )
    digest = hashlib.sha256(
        "\0".join([*scripts, *(copies or {}).values()]).encode() + saved
    ).hexdigest()[:12]
    files = [
        File(f"rank{program.rank}.py", script.replace(compilation_mark, digest))
        for program, script in zip(job.programs, scripts, strict=True)
    ]
    files.append(File("run.py", run))
    files.append(File("plan.txt", str(make_plan_page(job))))
    files += [File(name, text) for name, text in (copies or {}).items()]
    files += [File("weights.safetensors", saved)] if saved else []
    written = manifest(job, digest, files)
    return (*files, File("manifest.json", json.dumps(written, indent=2) + "\n"))


def render_rank(templates: jinja2.Environment, view: Mapping[str, object]) -> str:
    """One script: its text first, then the imports and constants that the text uses."""
    template = templates.get_template("rank.py.j2")
    view = {**view, "body": templates.get_template("body.py.j2").render(view)}
    data = view["data"]
    lists = [data["modules"] if isinstance(data, Mapping) else []]
    lists += [view[f"{what}modules"] for what in ("", "course_", "after_", "function_")]
    own = [*view["registering"], *sorted({line for lines in lists for line in lines})]  # type: ignore[misc]  # a list of lines
    draft = template.render(view, compilation=compilation_mark, imports=[])
    body = draft.split("# plan: what the compiler decided", 1)[1]
    exact = [*filter(None, view["default_dtype"])] if own else []  # type: ignore[call-overload]  # lines
    view = view | {"default_dtype": []} if exact else view
    constants = view["training_constants"]
    kept = {"training_constants": [line for line in constants if is_used(line, body)]}  # type: ignore[attr-defined]
    text = template.render({**view, **kept}, compilation=compilation_mark, imports=[])
    body = text.split("# plan: what the compiler decided", 1)[1]
    imports = choose_imports(body, own, exact)
    return template.render({**view, **kept}, compilation=compilation_mark, imports=imports)


def is_used(line: str, body: str) -> bool:
    """Whether a name that a constant's line sets is read anywhere else."""
    names = re.findall(r"[A-Z][A-Z_]+", line.split("=", maxsplit=1)[0])
    rest = body.replace(line, "", 1)
    return any(re.search(rf"\b{name}\b", rest) for name in names)


def choose_imports(body: str, own: list[str], exact: Sequence[str] = ()) -> list[str]:
    """The imports that a script's text uses, sorted as isort does. `exact`: what comes before those
    of the user's, which may make tensors."""
    groups: list[list[str]] = [["from pathlib import Path"], [], []]
    for group, lines in zip(groups, (modules, torch_modules), strict=False):
        group += [line for line in lines if reads(line, body)]
    for line in own:
        root = re.split(r"[ .]", line)[1]
        groups[0 if root in sys.stdlib_module_names else 1 if root == "torch" else 2].append(line)
    standard, of_torch, others = groups
    before = ["", *exact] if exact else []
    later = ["", *others] if others else []
    return [*in_order(standard), "", *in_order(of_torch), *before, *later]


def in_order(lines: list[str]) -> list[str]:
    return sorted(lines, key=lambda line: (line.startswith("from "), line))


def reads(line: str, body: str) -> bool:
    """Whether a script takes something of what a line imports: `time.`, not `self.time.` or the
    name of a weight, "time.mlp.0.bias"."""
    name = line.rsplit(maxsplit=1)[-1]
    return bool(re.search(rf"""(?<![\w."']){name}\.""", body))


def manifest(job: Job, compilation: str, files: Iterable[File]) -> dict[str, object]:
    """What the folder was compiled from, and what was written."""
    return {
        "ppc": job.version,
        "compilation": compilation,
        "world_size": job.plan.world_size,
        "spec": job.source,
        "spec_sha256": job.spec_digest,
        "model": job.spec.model.factory.target.partition(":")[0],
        "sources": dict(job.sources),
        "versions": dict(job.versions),
        "inputs": {i.name: str(i.meta) for i in job.graph.inputs},
        "files": {file.path: file.sha256 for file in files},
    }
