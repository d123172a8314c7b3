"""What the benchmarks share: compiling, running both sides in turn, medians and spreads."""

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

from ppc.emit.write import write
from ppc.frontend.load import load
from ppc.ir.program import Program
from ppc.pipeline import compile, lower
from ppc.run.launch import ForkServer, run_forked

HERE = Path(__file__).parent
TIMEOUT_S = 600.0
MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
}
"""Freed memory stays with the process, on both sides, as it does on a GPU. Else glibc gives large
blocks back and faults them in again, more on one side by luck: some per cent of a step."""


@dataclass(frozen=True, slots=True)
class Run:
    """Scripts of one side, ready to run."""

    folder: Path
    ranks: int
    times: Callable[[Path], list[float]]
    """Reads off the folder when each step ended, in seconds from a start."""
    environment: Mapping[str, str]

    def step_s(self, server: ForkServer, dropped: int = 1) -> float:
        """Seconds of a step: the median, without the first ones."""
        result = run_forked(
            self.folder,
            self.ranks,
            timeout_s=TIMEOUT_S,
            server=server,
            environment=self.environment,
        )
        result.check()
        ends = self.times(self.folder)[max(dropped - 1, 0) :]
        return median(after - before for before, after in pairwise(ends))


def start_server() -> ForkServer:
    """What starts the ranks of both sides; glibc reads MEMORY when the server starts."""
    os.environ.update(MEMORY)
    return ForkServer()


def write_spec(path: Path, tree: Mapping[str, object]) -> Path:
    """A spec file: JSON is YAML."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree, indent=2) + "\n")
    return path


def compile_ours(
    path: Path, folder: Path, environment: Mapping[str, str]
) -> tuple[Run, tuple[Program, ...]]:
    """The emitted scripts of a spec, and their programs."""
    spec = load(path)
    write(compile(spec, folder), folder)
    programs = lower(spec, folder).programs
    samples = spec.train.global_batch * getattr(spec.data, "sequence", 1)

    def times(folder: Path) -> list[float]:
        """A row's rate is over all steps so far."""
        rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
        rate = next(key for key in rows[0] if key.endswith("_per_second"))
        return [row["step"] * samples / row[rate] for row in rows]

    return Run(folder, len(programs), times, environment), programs


def write_peer(
    peer: str, folder: Path, ranks: int, settings: Mapping[str, object],
    environment: Mapping[str, str], modules: Sequence[Path],
) -> Run:  # fmt: skip
    """A script of peers/ with its settings and the models that it imports."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(HERE / "peers" / f"{peer}.py", folder / "run.py")
    for module in modules:
        shutil.copy(module, folder)
    (folder / "settings.json").write_text(json.dumps(settings))
    return Run(folder, ranks, lambda f: json.loads((f / "times.json").read_text()), environment)


def alternate(
    server: ForkServer, runs: Mapping[str, Run], repeats: int, *, dropped: int = 1
) -> dict[str, list[float]]:
    """Seconds of a step by name, the runs one after the other and that again: what the machine
    does meanwhile befalls all of them."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats):
        for name, run in runs.items():
            started = time.perf_counter()
            found[name].append(run.step_s(server, dropped))
            taken = time.perf_counter() - started
            print(
                f"  {repeat + 1}/{repeats} {name}: {1e3 * found[name][-1]:.1f} ms a step "
                f"({taken:.0f} s)",
                flush=True,
            )
    return found


def spread(values: Sequence[float]) -> float:
    """Distance of the quartiles."""
    if len(values) < 2:
        return 0.0
    low, _, high = quantiles(values, n=4, method="inclusive")
    return high - low


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Of the runs that stood beside each other."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def ms(values: Sequence[float]) -> str:
    """`1734.2 (1731.0-1741.5)`"""
    shown = f"{1e3 * median(values):.1f}"
    return f"{shown} ({1e3 * min(values):.1f}-{1e3 * max(values):.1f})"


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows of equal keys under a heading."""
    lines = [list(rows[0]), *([row[key] for key in rows[0]] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
