"""Files that are no specs, or hostile ones: each gets its exact answer, by `ppc check`, and leaves
nothing behind. Those that are text with a mistake in one place are in tests/errors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ppc import cli
from ppc.frontend.load import load

HEAD = """\
model: {factory: torch.nn:Linear, args: {in_features: 4, out_features: 2}}
data: {source: random, samples: 64, fields: {input: {shape: [4]}}}
cluster: {devices_per_node: 1, device: cpu}
"""


def with_key(section: str, line: str) -> bytes:
    return f"{HEAD}{section}: {{{line}}}\n".encode()


def model(line: str) -> bytes:
    return HEAD.replace("{factory: torch.nn:Linear, ", f"{{{line}, ", 1).encode()


def arguments(text: str) -> bytes:
    return HEAD.replace("{in_features: 4, out_features: 2}", text, 1).encode()


def data(text: str) -> bytes:
    return "".join(
        f"data: {text}\n" if line.startswith("data") else line + "\n" for line in HEAD.splitlines()
    ).encode()


BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
).encode()

CASES: dict[str, bytes] = {
    "empty": b"",
    "only a comment": b"# nothing\n",
    "only a byte-order mark": b"\xef\xbb\xbf",
    "null": b"null\n",
    "a list": b"- model\n",
    "utf-16": HEAD.encode("utf-16"),
    "latin-1": HEAD.replace("torch.nn", "t\xf6rch.nn").encode("latin-1"),
    "a NUL": HEAD.encode() + b"train: \0\n",
    "an escape character": HEAD.encode() + b"train: \x1b[2J\n",
    "a pickle": b"\x80\x04\x95\x0b\x00\x00\x00",
    "an ELF file": b"\x7fELF\x02\x01\x01" + bytes(64),
    "larger than a MiB": b"#" * (1 << 20) + b"#",
    "brackets without end": b"[" * 5000,
    "mappings without end": b"{a: " * 5000,
    "lists without end": b"- " * 5000,
    "an alias bomb": BOMB,
    "an alias in itself": HEAD.encode() + b"train: &a {steps: *a}\n",
    "a merge key": with_key("train", "<<: {steps: 3}"),
    "a merge of an anchor": b"x: &x {steps: 3}\n" + HEAD.encode() + b"train: {<<: *x}\n",
    "a key given twice by an alias": with_key("train", "steps: 1, steps: 2"),
    "two keys that look alike": with_key("tr\u0430in", "steps: 1"),
    "a key turned around": with_key('"train\\u202e"', "steps: 1"),
    "YAML 1.1": b"%YAML 1.1\n---\n" + HEAD.encode(),
    "a tag that calls": arguments("!!python/object/apply:os.system ['touch pwned']"),
    "a tag that imports": arguments("{in_features: !!python/name:os.system , out_features: 2}"),
    "a tag of one's own": arguments("{in_features: !mine 4, out_features: 2}"),
    "binary data": arguments("{in_features: !!binary aGk=, out_features: 2}"),
    "a set": HEAD.encode() + b"train: !!set {steps}\n",
    "no for false": with_key("parallel", "sync_batch_norm: no"),
    "on for true": with_key("train", "compile: on"),
    "yes for true": with_key("train", "compile: yes"),
    "a number of many digits": with_key("train", f"steps: {'9' * 5000}"),
    "a number beyond 64 bits": with_key("train", "steps: 9223372036854775808"),
    "a batch beyond 64 bits": with_key("train", "global_batch: 1" + "0" * 30),
    "a seed beyond 64 bits": with_key("train", "seed: 1" + "0" * 30),
    "minutes and seconds": with_key("train", "timeout: 1:30"),
    "infinity": with_key("train", "clip_norm: .inf"),
    "not a number": with_key("train", "optimizer: {name: sgd, lr: .nan}"),
    "a float for a count": with_key("train", "steps: 1e3"),
    "true for a count": with_key("train", "steps: true"),
    "minus zero steps": with_key("train", "steps: -0"),
    "a quoted number": with_key("train", "steps: '3'"),
    "a name with a line end": b'name: "job\\n"\n' + HEAD.encode(),
    "a name that goes up": b"name: ../../etc\n" + HEAD.encode(),
    "an absolute name": b"name: /etc/passwd\n" + HEAD.encode(),
    "a name that is here": b"name: .\n" + HEAD.encode(),
    "a name that is above": b"name: ..\n" + HEAD.encode(),
    "a hidden name": b"name: .git\n" + HEAD.encode(),
    "a name with a NUL": b'name: "job\\0"\n' + HEAD.encode(),
    "a name of many letters": b"name: " + b"a" * 101 + b"\n" + HEAD.encode(),
    "an empty name": b"name: ''\n" + HEAD.encode(),
    "a name of quotes": b"name: '\"\"\"; import os; \"\"\"'\n" + HEAD.encode(),
    "a name of a template": b"name: '{{ 7 * 7 }}'\n" + HEAD.encode(),
    "a name that looks like another": "name: j\u043eb\n".encode() + HEAD.encode(),
    "a name turned around": b'name: "job\\u202e"\n' + HEAD.encode(),
    "a factory with a line end": model('factory: "torch.nn:Linear\\n"'),
    "a factory that calls": model("factory: 'os:system(\"touch pwned\")'"),
    "a factory of a template": model("factory: '{{ 7 * 7 }}:x'"),
    "a factory with a NUL": model('factory: "a\\0.py:build"'),
    "a factory in a line of its own": model('factory: "a\\nimport os#.py:build"'),
    "a loss that calls": model("loss: 'mse_loss; import os', factory: torch.nn:Linear"),
    "a loss with a line end": model('loss: "mse_loss\\n", factory: torch.nn:Linear'),
    "an argument that is code": arguments("{'in_features=4); import os#': 1}"),
    "an argument with a line end": arguments('{"in_features\\n": 1}'),
    "an argument of a template": arguments("{'{{ x }}': 1}"),
    "a field that is code": data("{source: random, samples: 64, fields: {'x; import os': {}}}"),
    "a field with a line end": data('{source: random, samples: 64, fields: {"x\\n": {}}}'),
    "a file with a NUL": data('{source: text, files: "a\\0*", sequence: 4}'),
    "a file that paints": data('{source: text, files: "\\e[2J*.txt", sequence: 4}'),
    "a file of half a character": data('{source: text, files: "\\ud800*", sequence: 4}'),
    "an argument of half a character": arguments('{name: "\\ud83d", other: "\\ude00\\ud83d"}'),
    "a key of half a character": arguments('{"\\ud83d": 1}'),
    "an array with a NUL": data('{source: arrays, files: {input: "x\\0.npy"}}'),
    "a Dataset with a factory": data("{source: m.py:D, args: {a: {factory: 'os:getpid'}}}"),
    "a Dataset with a word of Python": data("{source: m.py:D, args: {lambda: 1}}"),
    "more stages than devices": with_key("parallel", "pipeline: 1000000"),
    "more replicas than samples": with_key("parallel", "data: 9223372036854775807"),
    "minus one replica": with_key("parallel", "data: -1"),
    "half a stage": with_key("parallel", "pipeline: 1.5"),
    "microbatches of nothing": with_key("parallel", "microbatches: 0"),
    "cuts as text": with_key("parallel", "cuts: 'a, b'"),
    "an empty cut": with_key("parallel", "cuts: ['']"),
}  # fmt: skip
ANSWERS = Path(__file__).parent / "errors" / "malformed.txt"


def answers() -> dict[str, str]:
    """What each is answered with; SPEC stands for the file."""
    blocks = ANSWERS.read_text().split("\n=== ")
    parts = (block.partition("\n") for block in blocks[1:])
    return {name: text.strip("\n") for name, _, text in parts}


def listing(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def check(path: Path) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["check", str(path)])
    assert "Traceback" not in done.output
    return done.exit_code, done.output.replace(str(path), "SPEC").strip("\n")


@pytest.mark.parametrize("name", CASES)
def test_answer(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text("class D: pass\nraise SystemExit('user code ran')\n")
    path = tmp_path / "s.yaml"
    path.write_bytes(CASES[name])
    before = listing(tmp_path)
    code, text = check(path)
    assert code == 1
    assert text == answers()[name]
    assert all(line.isprintable() for line in text.splitlines())
    assert listing(tmp_path) == before


def test_every_answer_has_its_case():
    assert set(answers()) == set(CASES)


def test_yaml_traps_that_are_none(tmp_path):
    """YAML 1.2: numbers, texts, no date, no sixty-based number; underscores as in Python."""
    path = tmp_path / "s.yaml"
    values = "{a: 3e-4, b: no, c: on, d: 2001-01-01, e: 1:30, f: 0o17, g: 010, h: 1_000, i: ~"
    values += ', j: "\\ud83d\\ude00"}'  # as JSON escapes it
    path.write_bytes(b"\xef\xbb\xbf" + arguments(values).replace(b"\n", b"\r\n"))
    assert load(path).model.factory.args == {
        "a": 3e-4, "b": "no", "c": "on", "d": "2001-01-01", "e": "1:30", "f": 15, "g": 10,
        "h": 1000, "i": None, "j": "\U0001f600",
    }  # fmt: skip


def test_a_pipe_and_a_device(tmp_path):
    assert check(Path("/dev/zero"))[1].startswith("SPEC: is larger than 1048576 bytes")
    assert check(Path("/dev/null"))[1].startswith("SPEC: the file is empty")
    (tmp_path / "link.yaml").symlink_to(tmp_path / "link.yaml")
    code, text = check(tmp_path / "link.yaml")
    assert (code, text.splitlines()[0]) == (
        1,
        "SPEC: cannot be read: too many levels of symbolic links",
    )


def test_a_file_name_that_is_no_text(tmp_path):
    """In a real process: its output is not made for that."""
    path = os.fsencode(tmp_path) + b"/\xff\x1b[2J.yaml"
    for content, code in ((HEAD.encode() + b"parallel: {pipeline: 2}\n", 1), (HEAD.encode(), 1)):
        Path(os.fsdecode(path)).write_bytes(content)
        done = subprocess.run(
            [sys.executable, "-m", "ppc", "check", path], capture_output=True, check=False
        )
        assert done.returncode == code
        assert b"Traceback" not in done.stderr
        assert b"\xff" not in done.stderr
        assert b"\x1b[2J" not in done.stderr
