"""pyproject.toml lists every package and data file, and the wheel works without the checkout."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

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


def test_the_wheel_runs(site, tmp_path):
    """`ppc init` and `ppc check`, from the wheel alone."""
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def ppc(*arguments):
        command = [sys.executable, "-m", "ppc", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    where = subprocess.run(
        [sys.executable, "-c", "import ppc; print(ppc.__file__)"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(where.stdout.strip()).is_relative_to(site)
    ppc("init")
    assert "ok" in ppc("check", "quickstart.yaml")


def test_constraints_pin_everything():
    """Exactly one version for each of the project's own dependencies."""
    lines = (root / "constraints.txt").read_text().splitlines()
    pinned = [line.partition("==")[0].lower() for line in lines if not line.startswith("#")]
    assert all("==" in line for line in lines if not line.startswith("#"))
    assert len(pinned) == len(set(pinned))
    assert "torch==2.13.0" in lines
    extras = project["project"]["optional-dependencies"]["dev"]
    for wanted in [*project["project"]["dependencies"], *extras]:
        assert wanted.partition(">")[0].lower() in pinned, wanted
