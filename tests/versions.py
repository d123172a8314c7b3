"""Tries other versions of torch: the emitted scripts from 2.9 on, the compiler on the last three.

    python tests/versions.py                 # make versions: all, hours and gigabytes
    python tests/versions.py 2.9.1 2.15.0    # these alone; what the others gave before is kept

Every spec of specs/ is compiled once, here, for a few steps, and runs under torchrun of each
version, on the CPU, beside torch alone; its losses are to be those of the torch that is installed
here. Where the compiler is to work, it is installed there too: `ppc verify --exact` of every spec,
and the tests of what touches torch. docs/versions.md is written from what was found.

Each version gets an environment of its own below build/versions, for as long as it takes; one that
is there already is used as it is, and stays. Pip's own settings say where torch comes from: with an
index of builds for CPUs in PIP_EXTRA_INDEX_URL each is a tenth as large.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from ppc import pipeline
from ppc.emit.write import write
from ppc.frontend.load import load
from ppc.version import oldest

root = Path(__file__).parents[1]
build = root / "build" / "versions"
specs = sorted((root / "specs").glob("*.yaml"))
OLDEST = (2, 9)  # for scripts; ppc.version says it for the compiler
STEPS, LIMIT = 3, 1e-5  # a loss may differ by this part of itself
TESTS = (
    "build", "canonical", "capture", "leaf", "lift", "masks", "norms", "ops", "parity", "precision",
    "private", "recompute", "record", "refusals", "registered", "statements",
)  # fmt: skip  # files of what touches torch

page = """# Versions of torch

Made by `make versions` (`tests/versions.py`), by hand: continuous integration runs one version,
that of `constraints.txt`.

Scripts: all specs of `specs/`, compiled for {steps} steps under torch {here}, run by torchrun of
each version, on the CPU by gloo. The third column is the largest difference of
a loss from that under {here}, as a part of it; {limit:g} is allowed. Compiler: `ppc verify --exact`
of the same specs under that version, and the tests that are listed below, without the slow ones.
{system}.

| torch | scripts that ran | losses differ by | `ppc verify --exact` | tests |
|---|---|---|---|---|
{rows}

Tests: {tests}.

## Not run, or failed

{missing}
"""


def main():
    known = newest_patches()
    for name in ("scripts", "results"):
        (build / name).mkdir(parents=True, exist_ok=True)
    compile_all()
    here = {spec.stem: run(sys.executable, spec.stem) for spec in specs}
    for version in sys.argv[1:] or known:
        found = try_version(version, here)
        (build / "results" / f"{version}.json").write_text(json.dumps(found, indent=2))
        write_page(known)


def say(message):
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {message}\n")


def newest_patches():
    """The last of 2.9, of 2.10 and so on, of what pip finds."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {}
    for version in re.search(r"Available versions: (.*)", text)[1].split(", "):
        minor = minor_of(version)
        if minor >= OLDEST and re.fullmatch(r"[\d.]+", version):
            found.setdefault(minor, version)  # the newest come first
    return sorted(found.values(), key=minor_of)


def minor_of(version):
    return tuple(map(int, version.split(".")[:2]))


def compile_all():
    for path in specs:
        say(f"compiling {path.name}")
        spec = load(path)
        spec = replace(spec, train=replace(spec.train, steps=STEPS, epochs=None))
        folder = build / "scripts" / spec.name
        shutil.rmtree(folder, ignore_errors=True)
        write(pipeline.compile(spec, folder), folder)


def run(python, name):
    """The losses of a spec's scripts, or the end of what was said where they failed."""
    ranks = json.loads((build / "scripts" / name / "manifest.json").read_text())["world_size"]
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    with tempfile.TemporaryDirectory() as scratch:
        folder = shutil.copytree(build / "scripts" / name, Path(scratch, name))
        error = call([*command, "run.py"], folder, 900)
        return error or [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").open()]


def call(command, folder, limit_s):
    """Run a command; what it said, where it failed."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            list(map(str, command)), cwd=folder, env=environment, timeout=limit_s,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not done after {limit_s} s"
    said = done.stdout + done.stderr
    return said.strip()[-2000:] or "failed without a word" if done.returncode else ""


def try_version(version, here):
    """What is known of one version afterwards."""
    home = build / version
    kept, python = home.exists(), home / "bin" / "python"
    try:
        say(f"torch {version}: installing")
        error = "" if kept else install(home, python, [f"torch=={version}"])
        error = error or call([python, "-c", "import torch"], build, 300)
        if error:
            say(error)
            return {"version": version, "missing": error.splitlines()[-1]}
        found = {"version": version, "scripts": {}}
        for path in specs:
            found["scripts"][path.stem] = compare(run(python, path.stem), here[path.stem])
            say(f"torch {version}: {path.stem}: {found['scripts'][path.stem]}")
        if minor_of(version) >= oldest:
            found |= try_compiler(version, home, python)
        return found
    finally:
        if not kept:
            shutil.rmtree(home, ignore_errors=True)


def install(home, python, packages):
    """Make the environment; what pip said, where it failed."""
    command = [sys.executable, "-m", "venv", home]
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", *packages]
    return call(command, build, 300) or call(pip, root, 7200)


def compare(losses, expected):
    """The largest relative difference, or what is wrong."""
    if isinstance(losses, str):
        return losses
    if len(losses) != len(expected):
        return f"{len(losses)} steps, not {len(expected)}"
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def try_compiler(version, home, python):
    """What `ppc verify` and the tests say there, beside the versions that constraints.txt pins."""
    pins = (root / "constraints.txt").read_text().splitlines()
    pins = [line for line in pins if not re.match(r"(torch|triton|nvidia\S*)==", line)]
    (home / "constraints.txt").write_text("\n".join(pins))
    say(f"torch {version}: installing the compiler")
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", home / "constraints.txt"]
    error = call([*pip, f"torch=={version}", "--editable", ".[dev]"], root, 3600)
    if error:
        return {"compiler": {path.stem: error for path in specs}, "tests": "not installed"}
    proved = {}
    for path in specs:
        command = [python, "-m", "ppc", "verify", path, "--exact", "--steps", STEPS]
        proved[path.stem] = call(command, root, 1200)
        say(f"torch {version}: verify {path.stem}: {proved[path.stem] or 'ok'}")
    files = [f"tests/test_{name}.py" for name in TESTS if (root / f"tests/test_{name}.py").exists()]
    say(f"torch {version}: {len(files)} files of tests")
    report = home / "tests.txt"
    with report.open("w") as output:
        command = [python, "-m", "pytest", "-q", "-m", "not slow and not gpu", *files]
        subprocess.run(command, cwd=root, stdout=output, stderr=output, check=False)
    lines = report.read_text().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    for line in (*failed, lines[-1]):
        say(line)
    return {"compiler": proved, "tests": lines[-1].strip("= "), "failed": failed}


def write_page(known):
    """`known`: the versions that there are; some may not have been tried."""
    results = [json.loads(path.read_text()) for path in (build / "results").glob("*.json")]
    tried = {result["version"] for result in results}
    results += [{"version": v, "missing": "not tried"} for v in known if v not in tried]
    results.sort(key=lambda result: minor_of(result["version"]))
    text = page.format(
        steps=STEPS, here=metadata.version("torch").partition("+")[0], limit=LIMIT,
        system=f"Python {platform.python_version()} on {platform.system()}, {platform.machine()}",
        rows="\n".join(row(result) for result in results if "missing" not in result),
        tests=", ".join(f"`test_{name}`" for name in TESTS),
        missing="\n".join(line for r in results for line in gaps(r)) or "Nothing is missing.",
    )  # fmt: skip
    (root / "docs" / "versions.md").write_text(text)


def row(result):
    scripts, proved = result["scripts"], result.get("compiler", {})
    numbers = [value for value in scripts.values() if isinstance(value, float)]
    ran = f"{sum(value <= LIMIT for value in numbers)} of {len(specs)}"
    largest = f"{max(numbers):.1g}" if numbers else ""
    right = f"{sum(not error for error in proved.values())} of {len(specs)}" if proved else ""
    tests = re.sub(r" in [\d.]+s.*", "", result.get("tests", ""))
    return f"| {result['version']} | {ran} | {largest} | {right} | {tests} |"


def gaps(result):
    """What did not run, or failed, a line each."""
    version = result["version"]
    if "missing" in result:
        yield f"- {version}: {result['missing']}"
        return
    runs = {"scripts": result["scripts"]}
    if minor_of(version) >= oldest:
        runs["ppc verify --exact"] = result.get("compiler", {})
    for what, found in runs.items():
        absent = [path.stem for path in specs if path.stem not in found]
        if absent:
            yield f"- {version}, {what}: not tried for {', '.join(absent)}"
        wrong = {name: v for name, v in found.items() if isinstance(v, str) and v}
        yield from (f"- {version}, {what}, {n}: {last_words(v)}" for n, v in wrong.items())
    if minor_of(version) >= oldest and "tests" not in result:
        yield f"- {version}, tests: not tried"
    yield from (f"- {version}, tests: {line}" for line in result.get("failed", ()))


def last_words(error):
    """The last line that is more than a rule."""
    return next(line.strip() for line in reversed(error.splitlines()) if line.strip("= -"))


if __name__ == "__main__":
    main()
