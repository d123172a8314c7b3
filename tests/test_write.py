"""A compilation is written whole or not at all, and nothing of anybody else's is lost."""

import errno
import json
import os
from pathlib import Path

import pytest

from ppc.emit.write import write
from ppc.errors import OutputError
from ppc.ir.report import File


def files(mark: str = "1", *paths: str) -> tuple[File, ...]:
    """A compilation: its files and manifest."""
    paths = paths or ("rank0.py", "run.py")
    made = [File(name, f"# {mark} {name}\n") for name in paths]
    digests = {file.path: file.sha256 for file in made}
    manifest = {"compilation": f"c{mark}", "files": digests}
    return (*made, File("manifest.json", json.dumps(manifest)))


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_folder(tmp_path):
    assert write(files(), tmp_path / "some" / "where") is None
    assert tree(tmp_path / "some" / "where")["rank0.py"] == b"# 1 rank0.py\n"
    assert names(tmp_path / "some") == ["where"]  # nothing is left beside it


def test_bytes_and_texts_of_any_kind(tmp_path):
    given = (File("a/b.safetensors", b"\0\xff"), File("é.py", "# é\r\n"), *files())
    write(given, tmp_path / "out")
    assert tree(tmp_path / "out")["a/b.safetensors"] == b"\0\xff"
    assert tree(tmp_path / "out")["é.py"] == "# é\r\n".encode()


def test_the_folder_is_open_to_those_whom_the_umask_lets_in(tmp_path):
    before = os.umask(0o027)
    try:
        write(files(), tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


def test_an_older_compilation_is_replaced(tmp_path):
    write(files("1", "rank0.py", "rank1.py"), tmp_path / "out")
    (tmp_path / "out" / "__pycache__").mkdir()
    (tmp_path / "out" / "__pycache__" / "points.pyc").write_bytes(b"")
    write(files("2"), tmp_path / "out")
    assert sorted(tree(tmp_path / "out")) == ["manifest.json", "rank0.py", "run.py"]
    assert names(tmp_path) == ["out"]


outputs = {"metrics.jsonl": b"{}", "weights-rank0.pt": b"w", "weights-rank1.pt.partial": b"p"}


def run(folder: Path) -> None:
    for name, text in outputs.items():
        (folder / name).write_bytes(text)


def test_outputs_of_runs_of_the_same_scripts_stay(tmp_path):
    write(files(), tmp_path / "out")
    run(tmp_path / "out")
    assert write(files(), tmp_path / "out") is None
    assert tree(tmp_path / "out").items() >= outputs.items()


def test_outputs_of_runs_of_others_are_kept_apart(tmp_path):
    """Nobody must take the weights of an older model, or of more ranks, for the new ones'."""
    out = tmp_path / "out"
    write(files("1"), out)
    run(out)
    assert write(files("2"), out) == out / "earlier" / "c1"
    assert tree(out / "earlier" / "c1") == outputs
    assert not (out / "weights-rank0.pt").exists()
    run(out)
    assert write(files("3"), out) == out / "earlier" / "c2"
    assert write(files("4"), out) is None
    assert names(out / "earlier") == ["c1", "c2"]
    assert tree(out / "earlier" / "c2") == outputs


@pytest.mark.parametrize("name", ["notes.txt", "sub/data.bin", ".hidden", "sub/metrics.jsonl"])
def test_files_of_others_stay_untouched(name, tmp_path):
    out = tmp_path / "out"
    write(files("1", "rank0.py", "rank1.py"), out)
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("mine")
    before = (out / name).stat()
    assert write(files("2"), out) is None
    assert tree(out) == {name: b"mine", **{file.path: file.content for file in files("2")}}
    assert (out / name).stat() == before
    assert names(tmp_path) == ["out"]


def test_the_folder_itself_stays(tmp_path, monkeypatch):
    """A shell may stand in it, a disk may be mounted there."""
    write(files("1"), tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out")
    write(files("2"), Path())
    assert Path("rank0.py").read_text() == "# 2 rank0.py\n"


@pytest.mark.parametrize(
    ("mine", "new"),
    [
        ("rank1.py", "rank1.py"),
        ("rank1.py/deep.txt", "rank1.py"),
        ("sub", "sub/deep.py"),
        ("rank0.py/deep.txt", "rank0.py"),
    ],
)
def test_files_of_others_in_the_way_are_a_reason_to_refuse(mine, new, tmp_path):
    out = tmp_path / "out"
    write(files("1"), out)
    if mine.startswith("rank0.py"):
        (out / "rank0.py").unlink()
    (out / mine).parent.mkdir(exist_ok=True)
    (out / mine).write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(OutputError) as error:
        write(files("2", "run.py", new), out)
    place = mine.partition("/")[0]
    assert error.value.message == f"{out} holds files of others where ppc writes its own: {place}"
    assert error.value.hint == "give another folder: -o FOLDER; or move or delete them first"
    assert tree(tmp_path) == before


def test_a_manifest_cannot_name_what_lies_elsewhere(tmp_path):
    out = tmp_path / "out"
    write(files("1"), out)
    run(out)
    (tmp_path / "mine.txt").write_text("mine")
    mine = {"../mine.txt": "", str(tmp_path / "mine.txt"): "", "rank0.py": "", "run.py": ""}
    lie = {"compilation": "../../c1", "files": mine}
    (out / "manifest.json").write_text(json.dumps(lie))
    assert write(files("2"), out) == out / "earlier" / "unknown"
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert names(tmp_path) == ["mine.txt", "out"]


def test_what_somebody_edited_is_a_reason_to_refuse(tmp_path):
    out = tmp_path / "out"
    write(files("1"), out)
    (out / "rank0.py").write_text("# mine\n")
    before = tree(tmp_path)
    with pytest.raises(OutputError) as error:
        write(files("2"), out)
    assert error.value.message == (
        f"{out} holds files that were changed since ppc wrote them: rank0.py"
    )
    assert error.value.hint == "give another folder: -o FOLDER; or move or delete them first"
    assert tree(tmp_path) == before
    (out / "rank0.py").unlink()
    write(files("2"), out)
    assert tree(out)["rank0.py"] == b"# 2 rank0.py\n"


def test_an_edit_that_the_compiler_makes_too_is_none(tmp_path):
    """As a merge of two branches may have made it."""
    write(files("1"), tmp_path)
    (tmp_path / "rank0.py").write_text("# 2 rank0.py\n")
    write(files("2"), tmp_path)
    assert tree(tmp_path)["rank0.py"] == b"# 2 rank0.py\n"


def test_a_manifest_without_digests(tmp_path):
    """Of an older ppc: whether a file was edited is not known."""
    write(files("1"), tmp_path)
    names = ["rank0.py", "run.py", "manifest.json"]
    (tmp_path / "manifest.json").write_text(json.dumps({"files": names}))
    write(files("2"), tmp_path)
    assert tree(tmp_path)["rank0.py"] == b"# 2 rank0.py\n"


@pytest.mark.parametrize("manifest", [None, "", "[]", '{"files": 3}', '{"files": ["a.py"]'])
def test_a_folder_that_no_compilation_wrote(manifest, tmp_path):
    for name in "abcde":
        (tmp_path / f"{name}.py").write_text("mine")
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(OutputError, match=r"a\.py, b\.py, c\.py and [23] more"):
        write(files(), tmp_path)


def test_a_folder_with_a_great_many_files(tmp_path):
    for number in range(101):
        (tmp_path / str(number)).write_text("mine")
    with pytest.raises(OutputError, match=r"did not write: \d+, \d+, \d+ and many more"):
        write(files(), tmp_path)


def test_a_link_to_nothing_is_somebodys(tmp_path):
    write(files(), tmp_path / "out")
    (tmp_path / "out" / "data").symlink_to(tmp_path / "gone")
    write(files("2"), tmp_path / "out")
    assert (tmp_path / "out" / "data").is_symlink()
    with pytest.raises(OutputError, match="where ppc writes its own: data"):
        write(files("3", "data", "run.py"), tmp_path / "out")


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "out").mkdir()
    write(files(), tmp_path / "out")
    assert "rank0.py" in tree(tmp_path / "out")


def test_a_file_in_the_folders_place(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(OutputError, match="out is no folder"):
        write(files(), tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_a_file_in_the_parents_place(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match=r"file.* cannot be written: "):
        write(files(), tmp_path / "file" / "out")


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(files(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert "rank0.py" in tree(tmp_path / "real")


def test_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(files("1"), Path("out"))
    write(files("2"), Path("./out"))
    assert tree(tmp_path / "out")["run.py"] == b"# 2 run.py\n"


class Disk:
    """Makes the n-th call of an operation of a Path's fail."""

    def __init__(self, monkeypatch, operation: str, at: int) -> None:
        self.count, self.at = 0, at
        real = getattr(Path, operation)

        def call(path, *args, **kwargs):
            self.count += 1
            if self.count == self.at:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            return real(path, *args, **kwargs)

        monkeypatch.setattr(Path, operation, call)


@pytest.mark.parametrize(
    ("operation", "at"),
    [("write_bytes", 1), ("write_bytes", 3), *(("rename", at) for at in (1, 2, 4, 6, 8, 9))],
)
def test_a_failure_leaves_the_old_folder_as_it_was(operation, at, tmp_path, monkeypatch):
    out = tmp_path / "out"
    write(files("1"), out)
    run(out)
    before = tree(tmp_path)
    disk = Disk(monkeypatch, operation, at)
    with pytest.raises(OutputError, match="cannot be written: No space left on device"):
        write(files("2"), out)
    assert disk.count >= at
    monkeypatch.undo()
    assert tree(tmp_path) == before
    assert names(tmp_path) == ["out"]


def test_a_failure_leaves_no_new_folder(tmp_path, monkeypatch):
    Disk(monkeypatch, "write_bytes", 2)
    with pytest.raises(OutputError):
        write(files(), tmp_path / "out")
    assert names(tmp_path) == []


def test_an_interrupt_leaves_nothing_half_written(tmp_path, monkeypatch):
    write(files("1"), tmp_path / "out")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(files("2"), tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert tree(tmp_path / "out")["run.py"] == b"# 1 run.py\n"


def test_where_nothing_can_be_restored_nothing_is_deleted(tmp_path, monkeypatch):
    """Neither the new files nor the old ones can be put in place: what is old stays aside."""
    out = tmp_path / "out"
    write(files("1"), out)
    run(out)
    before = tree(out)
    real, calls = Path.rename, []

    def rename(path, target):
        calls.append(path)
        if len(calls) > 2:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OutputError, match="Input/output error"):
        write(files("2"), out)
    (aside,) = out.glob(".out-*")
    assert before.items() <= (tree(out) | tree(aside / "old")).items()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_parent_that_may_not_be_written(tmp_path):
    parent = tmp_path / "parent"
    parent.mkdir(mode=0o555)
    with pytest.raises(OutputError, match="Permission denied"):
        write(files(), parent / "out")
