"""Whether a folder is still what it was compiled from; C54 has more (test_cases_mistakes.py)."""

import json
from pathlib import Path

import pytest

from ppc.errors import RunError
from ppc.frontend.sources import digest
from ppc.run.stale import spec_of
from ppc.run.verify import copy, verify

AGAIN = "put back the one that ppc compile wrote; or delete out and run ppc compile SPEC -o out"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder `out`, beside the spec and the file that it was compiled from."""
    monkeypatch.chdir(tmp_path)
    Path("my job.yaml").write_text("model: x\n")
    Path("net.py").write_text("def build(): ...\n")
    Path("out").mkdir()
    Path("out/run.py").touch()
    write_manifest(spec_sha256=digest(Path("my job.yaml")))
    assert spec_of(Path("out")) == Path("my job.yaml")
    return Path("out")


def write_manifest(**keys):
    sources = {"net.py": digest(Path("net.py"))}
    manifest = {"spec": "my job.yaml", "sources": sources, "files": {"run.py": ""}} | keys
    Path("out/manifest.json").write_text(json.dumps(manifest))


def refused(folder):
    with pytest.raises(RunError) as raised:
        spec_of(folder)
    return str(raised.value)


def test_a_file_that_is_gone(folder):
    """To compile again is no way out while the spec needs it."""
    Path("net.py").unlink()
    assert refused(folder) == (
        "net.py is gone, from which out was compiled\n"
        "hint: put it back; or, where my job.yaml and its files can do without: "
        "ppc compile 'my job.yaml' -o out"
    )


def test_a_script_that_is_gone(folder):
    (folder / "run.py").unlink()
    assert refused(folder) == (
        "out/run.py is gone, which ppc compile wrote\nhint: ppc compile 'my job.yaml' -o out"
    )


def test_the_spec_is_gone(folder):
    Path("my job.yaml").unlink()
    assert refused(folder) == (
        "out was compiled from my job.yaml, which is not there\n"
        "hint: run ppc verify in the folder that holds my job.yaml, or ppc compile SPEC -o out"
    )


def test_a_manifest_that_is_gone(folder):
    (folder / "manifest.json").unlink()
    assert refused(folder) == f"out has no manifest.json that names its spec\nhint: {AGAIN}"
    (folder / "run.py").unlink()
    assert refused(folder).endswith("hint: ppc compile SPEC writes a folder that has one")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", ":1:1: is not JSON: Expecting value"),
        ('{\n"spec": 1,}', ":2:11: is not JSON: Expecting property name enclosed in double quotes"),
        ("[]", " does not say what out was compiled from"),
        (
            '{"spec": 3, "spec_sha256": "", "sources": {}, "files": {}}',
            " does not say what out was compiled from",
        ),
        ('{"spec": "a", "sources": {}}', " does not say what out was compiled from"),
        (
            '{"spec": "a", "spec_sha256": "", "sources": 3}',
            " does not say what out was compiled from",
        ),
        (b"\xff\xfe", " does not say what out was compiled from"),
    ],
)
def test_a_broken_manifest(folder, text, complaint):
    (folder / "manifest.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert refused(folder) == f"out/manifest.json{complaint}\nhint: {AGAIN}"


def test_digests_that_are_no_text(folder):
    write_manifest(spec_sha256=digest(Path("my job.yaml")), sources={"net.py": 3})
    assert refused(folder).startswith(
        "net.py has changed since out was compiled from it: sha256 3 "
    )


def test_what_is_not_there(tmp_path):
    with pytest.raises(RunError) as raised:
        verify(tmp_path / "nowhere")
    assert str(raised.value) == (
        f"{tmp_path}/nowhere is not there\nhint: name a spec, or a folder that ppc compile wrote"
    )


def test_a_copy_has_what_lies_beside_the_scripts_and_none_of_what_runs_wrote(folder):
    """A link stays one: it may lead nowhere, or to a disk full of data."""
    for name in ("mine.py", "metrics.jsonl", "weights-rank0.pt", "earlier/c1/metrics.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "data").symlink_to("gone")
    copy(folder, Path("copy"))
    copied = sorted(path.name for path in Path("copy").iterdir())
    assert copied == ["data", "manifest.json", "mine.py", "run.py"]
