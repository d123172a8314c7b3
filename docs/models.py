"""Writes docs/models.md: what the scripts of models from transformers look like.

    python docs/models.py

Compiles every model of tests/hf.py for one, two and three stages; a few minutes on a CPU.
"""

import ast
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

root = Path(__file__).parent.parent
sys.path.insert(0, str(root / "tests"))

from hf import CASES, spec_of  # noqa: E402  # beside the tests

from ppc import pipeline  # noqa: E402
from ppc.emit.job import Job  # noqa: E402
from ppc.emit.render import render  # noqa: E402
from ppc.frontend.capture.build import build_model  # noqa: E402
from ppc.frontend.capture.capture import capture  # noqa: E402
from ppc.ir.graph import Graph  # noqa: E402
from ppc.ir.spec import Spec  # noqa: E402
from ppc.ir.unit import Unit  # noqa: E402

head = """# Models of transformers

Made by `docs/models.py`. Each model is built small from its config (`specs/models/hf*.py`), with
fresh weights, and compiled in one, two and three stages. No script imports transformers, and no
module is a leaf of the spec's. CLIP's spec accepts that its loss couples samples. Their proof is
`tests/test_parity_hf.py`, `ppc verify` of each in float64 with four microbatches in two and three
stages: T5 and CLIP in three stages with `make test`, all of them with `make test-all`.

Numbers are for one / two / three stages. *Script* is lines of all ranks' files, *model* those of
the classes in them, `Stage` included. *Classes* are those besides `Stage`; *kinds* are modules that
differ by type or repr in the user's model, stage by stage. Where there are more classes, one type
computes different things; where fewer, a module was written in place. *torch.ops* counts lines
that call an operation for which there is no other spelling.

| model | script | model | classes | kinds | torch.ops | over the cuts, in three stages |
|---|---|---|---|---|---|---|
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(Path(folder), name) for name in CASES]
    (root / "docs" / "models.md").write_text(head + "".join(rows))


def row(folder: Path, name: str) -> str:
    """A line of the table."""
    counts = []
    spec = spec_of(folder, name)
    graph, modules = capture(spec), dict(build_model(spec).named_modules())
    for stages in (1, 2, 3):
        job = lower(spec_of(folder, name, pipeline=stages), graph)
        files = {file.path: str(file.text) for file in render(job) if file.path.startswith("rank")}
        texts = [files[f"rank{unit.rank}.py"] for unit in job.units]
        own = [line for text in texts for lines in classes(text).values() for line in lines]
        names = [name for text in texts for name in classes(text) if name != "Stage"]
        calls = [line.strip() for line in own if "torch.ops." in line]
        kinds = sum(len(set(kinds_of(job.graph, unit, modules))) for unit in job.units)
        counts.append(
            (sum(map(len, map(str.splitlines, texts))), len(own), len(names), kinds, calls)
        )
        print(name, stages, *counts[-1], flush=True)  # noqa: T201
    columns = list(zip(*counts, strict=True))
    shown = [" / ".join(map(str, column)) for column in columns[:4]]
    calls = " / ".join(str(len(found)) for found in columns[4])
    listed = sorted(
        {call for found in columns[4] for call in re.findall(r"torch\.ops[\w.]+", " ".join(found))}
    )
    calls += f": {', '.join(listed)}" if listed else ""
    return f"| {name} | {' | '.join(shown)} | {calls} | {'; '.join(cuts(job))} |\n"


def lower(spec: Spec, graph: Graph) -> Job:
    """The forms of a captured model. What tests check is not checked here again."""
    idle = {
        "check_capture": lambda *_: None,
        "check_mean": lambda *_: (),
        "runners_up": lambda *_: (),
    }
    with patch.multiple(pipeline, capture=lambda _: graph, **idle):
        return pipeline.lower(spec, spec.folder / "out")


def classes(text: str) -> dict[str, list[str]]:
    """The lines of each class of the model's, by name."""
    lines = text.splitlines()
    return {
        node.name: lines[node.lineno - 1 : node.end_lineno]
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name not in ("Edge", "Reducer")
    }


def kinds_of(graph: Graph, unit: Unit, modules: dict[str, object]) -> Iterator[tuple[type, str]]:
    """Type and repr of each module that is whole on a stage and is none of torch's own."""
    for path, _ in unit.calls:
        module = graph.modules[path]
        if module.constructor is None and not module.sequential:
            yield type(modules[path]), repr(modules[path])


def cuts(job: Job) -> Iterator[str]:
    """`0 to 1: hidden_states`."""
    for program in job.programs:
        for edge in program.edges:
            if edge.kind == "activations" and edge.source == program.rank:
                names = ", ".join(job.boundary[value] for value, _ in edge.values)
                yield f"{edge.source} to {edge.target}: {names}"


if __name__ == "__main__":
    main()
