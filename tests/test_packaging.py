"""pyproject.toml lists every package and data file, the wheel works without the checkout, and
constraints.txt pins what is installed."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ppc import version

root = Path(__file__).parent.parent
project = tomllib.loads((root / "pyproject.toml").read_text())
setuptools = project["tool"]["setuptools"]
folders = {name: root / folder for name, folder in setuptools["package-dir"].items()}


def test_every_package_is_listed():
    found = {"ppc.schemas", "ppc.specs", "ppc.templates"}
    for path in folders["ppc"].rglob("*.py"):
        found.add(".".join(["ppc", *path.relative_to(folders["ppc"]).parent.parts]))
    assert sorted(setuptools["packages"]) == sorted(found)
    for name in found:
        folder = folders.get(name) or folders["ppc"].joinpath(*name.split(".")[1:])
        assert (folder / "__init__.py").is_file(), name


def test_every_data_file_is_listed():
    for name, folder in folders.items():
        patterns = setuptools["package-data"].get(name, [])
        listed = {path for pattern in patterns for path in folder.glob(pattern)}
        wanted = {p for p in folder.rglob("*") if p.suffix in {".j2", ".json", ".typed"}}
        assert wanted <= listed, name
        assert listed, name


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The wheel, built from a copy of the sources and unpacked."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for folder in folders.values():
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(folder, source / folder.name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    code = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    shutil.rmtree(source / "compiler")
    (wheel,) = (source / "dist").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def test_the_wheel_has_every_file(site):
    for name, folder in folders.items():
        target = site.joinpath(*name.split("."))
        patterns = ["**/*.py"] if name == "ppc" else []
        for pattern in [*patterns, *setuptools["package-data"].get(name, [])]:
            for path in folder.glob(pattern):
                copied = target / path.relative_to(folder)
                assert copied.read_bytes() == path.read_bytes()
    assert not list(site.glob("ppc/specs/*_tied.yaml"))  # the starter, not all examples
    assert next(site.glob("*.dist-info/licenses/LICENSE")).is_file()


tiny = """\
model: {factory: torch.nn:Linear, args: {in_features: 4, out_features: 2}, loss: mse_loss}
data: {source: random, samples: 8, fields: {input: {shape: [4]}, target: {shape: [2]}}}
train: {global_batch: 4}
cluster: {devices_per_node: 1, device: cpu}
"""


@pytest.mark.torch
def test_the_wheel_runs(site, tmp_path):
    """Schema, starter and templates are found, and scripts made, from the wheel alone."""
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def python(*arguments):
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip

    assert Path(python("-c", "import ppc; print(ppc.__file__)").strip()).is_relative_to(site)
    python("-m", "ppc", "init")
    assert "ok" in python("-m", "ppc", "check", "quickstart.yaml")
    (tmp_path / "tiny.yaml").write_text(tiny)
    python("-m", "ppc", "compile", "tiny.yaml", "-o", "out")
    ast.parse((tmp_path / "out/rank0.py").read_text())
    assert "memory at the peak" in (tmp_path / "out/plan.txt").read_text()


def test_constraints_pin_what_is_installed():
    """One version of all that the project's dependencies bring here, and of nothing else."""
    lines = (root / "constraints.txt").read_text().splitlines()
    pins = [line.partition("==") for line in lines if not line.startswith("#")]
    pinned = [canonicalize_name(name) for name, _, _ in pins]
    assert all(version for _, _, version in pins)
    assert len(pinned) == len(set(pinned))
    assert "torch==2.13.0" in lines
    extras = project["project"]["optional-dependencies"]["dev"]
    requirements = [*project["project"]["dependencies"], *extras]
    assert sorted(set(pinned) - brought_by(requirements, anywhere=True)) == []
    unpinned = {n for n in brought_by(requirements) - set(pinned) if is_installed(n)}
    # PyPI's torch for Linux brings these, in versions that it names itself
    assert [n for n in unpinned if not n.startswith(("nvidia-", "cuda-", "triton"))] == []


def test_the_versions_of_torch_agree():
    """What pip asks for, what the commands call tested, and what docs/versions.md says of."""
    (needed,) = (r for r in project["project"]["dependencies"] if r.startswith("torch"))
    assert needed == f"torch>={'.'.join(map(str, version.oldest))}"
    page = (root / "docs" / "versions.md").read_text()
    found = re.findall(r"^(?:\| |- )(\d+)\.(\d+)", page, re.MULTILINE)
    minors = sorted({(int(major), int(minor)) for major, minor in found})
    assert (minors[0], minors[-1]) == ((2, 9), version.newest)
    assert minors[-3] == version.oldest  # the compiler: on the last three


def brought_by(requirements, *, anywhere=False):
    """The names of these and of all that they require, here or on whatever machine."""
    found, left = set(), [Requirement(text) for text in requirements]
    while left:
        name = canonicalize_name(left.pop().name)
        if name not in found:
            found.add(name)
            needs = metadata.requires(name) or [] if is_installed(name) else []
            needed = [Requirement(text) for text in needs if "extra ==" not in text]
            left += [r for r in needed if anywhere or not r.marker or r.marker.evaluate()]
    return found


def is_installed(name):
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False
