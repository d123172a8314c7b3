"""Scripts of small jobs for tests, and their classes brought to life."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torch import nn

from ppc.check.text import check_text, compile_classes, make_stage
from ppc.emit.job import Job
from ppc.emit.render import render
from ppc.frontend.sources import copied_modules
from ppc.ir.spec import Spec
from ppc.pipeline import lower


@dataclass(frozen=True)
class Emitted:
    """A compilation with the forms behind it."""

    spec: Spec
    job: Job
    files: dict[str, str | bytes]

    def script(self, rank: int = 0) -> str:
        return str(self.files[f"rank{rank}.py"])

    @property
    def scripts(self) -> list[str]:
        return [self.script(rank) for rank in range(len(self.job.programs))]

    def classes(self, rank: int = 0) -> dict[str, str]:
        """The text of each class of a script."""
        return classes_of(self.script(rank))

    def forward(self, name: str = "Stage", rank: int = 0) -> list[str]:
        """The lines of a class's forward."""
        _, text = self.classes(rank)[name].split("def forward(")
        return [line.removeprefix(" " * 8) for line in text.splitlines()[1:]]

    def init(self, name: str = "Stage", rank: int = 0) -> list[str]:
        """The lines of a class's __init__."""
        text, _ = self.classes(rank)[name].split("    def forward(")
        _, _, lines = text.partition("super().__init__()\n")
        return [line.removeprefix(" " * 8) for line in lines.rstrip().splitlines()]

    def stage(self, rank: int = 0) -> nn.Module:
        """An instance of a script's Stage, its values not initialised."""
        return make_stage(compile_classes(self.script(rank), self.job.units[rank]))


@cache
def classes_of(script: str) -> dict[str, str]:
    lines = script.splitlines()
    found = [node for node in ast.parse(script).body if isinstance(node, ast.ClassDef)]
    return {node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in found}


def emit(spec: Spec, folder: Path | None = None) -> Emitted:
    """Compile as `pipeline.compile` does, its checks included, and keep the forms."""
    job = lower(spec, folder or spec.folder / "out", lambda *_: None)
    files = {file.path: file.text for file in render(job, job.graph.saved, copied_modules(spec))}
    emitted = Emitted(spec, job, files)
    check_text(spec, job.graph, job.units, emitted.scripts, job.plan.microbatch_size)
    return emitted
