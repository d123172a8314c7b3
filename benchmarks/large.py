"""What it takes to compile large models: seconds and peak memory of `ppc check`, `plan` and
`compile`, each in a process of its own.

    python benchmarks/large.py                     Llama 70B on 64 ranks, Llama 405B on 1,024
    python benchmarks/large.py --shapes llama_70b

Nothing as large as the weights is ever held: what is counted is Python, torch and the forms. The
last line is 405B in 8 stages, which does not fit and is refused.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).parent
SPECS = HERE / "large"
ASKED = {  # seconds and GB, on two cores
    ("llama_70b", "plan"): (40, None),
    ("llama_70b", "compile"): (60, 2),
    ("llama_405b", "compile"): (180, 3),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One command."""

    spec: str
    command: str
    exit_code: int
    seconds: float
    cpu_s: float
    peak_gb: float
    """Of resident memory, 10^9 bytes."""
    written_mb: float
    files: int
    fullest_gb: float | None
    """Of all devices' memory, as `ppc plan` counts it."""
    complaint: str


def run(spec: Path, command: str, output: Path) -> Run:
    """Run `ppc COMMAND SPEC` and see what it takes."""
    arguments = [sys.executable, "-m", "ppc", command, str(spec), "--json"]
    arguments += ["-o", str(output)] if command == "compile" else []
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+") as told:
        process = subprocess.Popen(arguments, stdout=told)
        _, status, used = os.wait4(process.pid, 0)
        told.seek(0)
        found = json.load(told)
    seconds = time.perf_counter() - begin
    written = [path.stat().st_size for path in output.rglob("*") if path.is_file()]
    return Run(
        spec=spec.stem,
        command=command,
        exit_code=os.waitstatus_to_exitcode(status),
        seconds=seconds,
        cpu_s=used.ru_utime + used.ru_stime,
        peak_gb=used.ru_maxrss * 1024 / 1e9,
        written_mb=sum(written) / 1e6,
        files=len(written),
        fullest_gb=max(map(total, found["memory"])) / 1e9 if "memory" in found else None,
        complaint=" ".join(each["message"] for each in found.get("complaints", ())),
    )


def total(memory: Mapping[str, int]) -> int:
    """Bytes of one rank at the peak."""
    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers")
    return sum(memory[kind] for kind in kinds)


def too_few_stages(folder: Path) -> Path:
    """405B on 64 devices in 8 stages: a stage is larger than a device."""
    text = (SPECS / "llama_405b.yaml").read_text()
    text = text.replace("nodes: 128", "nodes: 8").replace("pipeline: 128", "pipeline: 8")
    path = folder / "llama_405b_8_stages.yaml"
    path.write_text(text.replace("llama.py", str((SPECS / "llama.py").resolve())))
    return path


def line(found: Run) -> str:
    seconds, memory = ASKED.get((found.spec, found.command), (None, None))
    asked = [f"{seconds} s"] * bool(seconds) + [f"{memory} GB"] * bool(memory)
    fullest = f"  fullest device {found.fullest_gb:.0f} GB" if found.fullest_gb else ""
    limits = f"  asked: {', '.join(asked)}" if asked else ""
    return (
        f"{found.spec:20} {found.command:8} {found.seconds:7.1f} s  {found.cpu_s:7.1f} s of CPU"
        f"  {found.peak_gb:5.2f} GB  {found.files:5} files, {found.written_mb:5.1f} MB"
        f"{fullest}{limits}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="*", default=["llama_70b", "llama_405b"])
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks/large"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    found = []
    for shape in options.shapes:
        for command in ("check", "plan", "compile"):
            found.append(run(SPECS / f"{shape}.yaml", command, options.folder / shape))
            print(line(found[-1]), flush=True)
    refused = run(too_few_stages(options.folder), "plan", options.folder / "none")
    print(f"{line(refused)}\nrefused: {refused.complaint}")
    found.append(refused)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
