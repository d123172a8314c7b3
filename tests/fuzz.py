"""Specs that nobody would write: random bytes, and valid specs with something changed.

    python tests/fuzz.py KIND NUMBER    answers case NUMBER again, and shows it

A case is a function of its kind and number.
"""

import random
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

from ruamel.yaml import YAML
from typer.testing import CliRunner

from ppc import cli

root = Path(__file__).parent.parent
short = b"""\
model: {factory: 'torch.nn:Linear', inputs: [x]}
cluster: {devices_per_node: 1, device: cpu}
"""
valid = [path.read_bytes() for path in sorted(root.glob("specs/*.yaml"))]
valid.append(b"""\
model:
  factory: models/gpt.py:build
  args: {layers: 4, width: 1e1, heads: [4, {a: ~}], config: {factory: "torch:zeros", args: {b: x}}}
  inputs: {tokens: {field: tokens, shape: [batch, 3], dtype: int64}, labels: labels}
  loss: models/gpt.py:loss
  weight: {kind: tokens, field: labels, ignore_index: -1}
data: {source: random, samples: 64, last_batch: drop,
       fields: {tokens: {shape: [3], dtype: int64, low: 1, high: 9}, labels: {shape: [3]}}}
train:
  global_batch: 32
  epochs: 2
  optimizer: {name: adamw, lr: 2e-3, betas: [0.9, 0.95], foreach: true,
              groups: [{params: ["*.bias", "*norm*"], weight_decay: 0}, {params: "head*", lr: 1}]}
  lr_schedule: {name: one_cycle, pct_start: 0.1, div_factor: 20}
  clip_value: 1.0
  precision: bf16
  compile: false
  timeout: 10min
cluster:
  nodes: 2
  devices_per_node: 2
  device: {kind: cuda, memory: 12GiB, flops: {fp32: 20TFLOP/s}, memory_bandwidth: 400GB/s}
  links: {intra_node: {bandwidth: 450GB/s, latency: 5us}, inter_node: {bandwidth: 100Gbit/s}}
parallel: {pipeline: 2, data: 2, schedule: {kind: gpipe}, microbatches: 4, cuts: [blocks.2],
           recompute: [blocks.0], sync_batch_norm: true}
""")
valid += [
    b"data: {source: arrays, files: {x: x.npy}}\n" + short,
    b"data: {source: arrays, files: x.safetensors}\n" + short,
    b"data: {source: tokens, files: [a.bin], dtype: uint16, sequence: 4}\n" + short,
    b"data: {source: 'd.py:D', args: {n: 3}, fields: [x, y], workers: 2, pad: {x: 0}, length: 9}\n"
    + short,
]
trees = [YAML(typ="safe", pure=True).load(text) for text in valid]
seeds = [*valid] + [path.read_bytes() for path in sorted(root.glob("tests/errors/*.yaml"))]

NASTY = (
    "", "\0", "\n", "\r", "\t", "\x1b[2J", "\u202e", "\ud800", "\u2028", "\ufeff", "\u0430", "..",
    "../..", "/", "/etc/passwd", "~", "{{ 7 * 7 }}", "{% raw %}", "{x!r}", "{", "}", "%s", "'", '"',
    '"""', "'''", "\\", "\\\n", "#", "${HOME}", "`id`", "__import__('os')", "a" * 300, "no", "on",
    "3e-4", "1_000", "0x10", "0o17", "1:30", "~", "null", ".nan", ".inf", "-.inf", "<<", "&a", "*a",
    "*", "**", "[", "]", "|", ">", "!!python/name:os.system", "!tag", "? a", "- ", ": ", "@", "%",
    "models/gpt.py:build", "gpt.py:", ":build", "torch.nn:Linear", "class", "None", "lambda",
    "rank0.py:x", "con", ".", "x.npy", "a.safetensors", "{stdlib}/*.py", "{stdlib}", "auto",
)  # fmt: skip
"""Text that means something to some reader."""
NUMBERS = (
    0, -1, 1, 2, 7, 2**31, 2**53, 2**63 - 1, 2**63, 10**30, -(10**30), 10**400, 0.0, -0.0, 0.5,
    1e-320, 1e300, 1e308, float("inf"), float("-inf"), float("nan"), True, False, None,
)  # fmt: skip


def make(kind: str, number: int) -> bytes:
    """The text of a case."""
    draw = random.Random(f"{kind} {number}")
    return {"bytes": make_bytes, "text": mutate_text, "tree": mutate_tree}[kind](draw)


def make_bytes(draw: random.Random) -> bytes:
    """Noise, or noise made of what YAML reads as structure."""
    if draw.random() < 0.3:
        return draw.randbytes(draw.randrange(400))
    pieces = [b": ", b"- ", b"\n", b"  ", b"{", b"}", b"[", b"]", b"&a ", b"*a", b"<<: ", b"? ",
              b"!!map ", b"|\n", b">-\n", b"'", b'"', b"#", b"---\n", b"...\n", b"%YAML 1.1\n",
              b"model", b"data", b"cluster", b"\t", b"\xef\xbb\xbf", b"\xff\xfe", b"\x85",
              b"\xc2\x85"]  # fmt: skip
    return b"".join(
        draw.choice(pieces) if draw.random() < 0.8 else draw.randbytes(draw.randrange(1, 4))
        for _ in range(draw.randrange(60))
    )


def mutate_text(draw: random.Random) -> bytes:
    """A spec in which a few runs of characters, words or lines are cut, copied or replaced."""
    content = draw.choice(seeds)
    for _ in range(draw.randrange(1, 5)):
        start = draw.randrange(len(content) + 1)
        stop = min(len(content), start + draw.choice((0, 0, 1, 2, 5, 20, 100)))
        words = re.findall(rb"[\w./:-]+", content) or [b"x"]
        patch = draw.choice(
            (
                b"",
                draw.randbytes(draw.randrange(1, 4)),
                content[start:stop] * draw.choice((2, 3, 50)),
                draw.choice(words),
                draw.choice(NASTY).encode("utf-8", "surrogatepass"),
                draw.choice(content.splitlines() or [b""]) + b"\n",
            )
        )
        content = content[:start] + patch + content[stop:]
    return content


def mutate_tree(draw: random.Random) -> bytes:
    """A spec in which a few values or keys are others, written with every text escaped."""
    tree = deepcopy(draw.choice(trees))
    for _ in range(draw.randrange(1, 4)):
        holder, key = draw.choice(list(places(tree)))
        what = draw.random()
        if what < 0.6:
            holder[key] = value(draw, 3)
        elif what < 0.75 and isinstance(holder, dict):
            holder[text(draw)] = holder.pop(key)
        elif what < 0.85:
            del holder[key]
        else:
            other, name = draw.choice(list(places(tree)))
            holder[key] = other[name] if other[name] is not holder else 0
        if not list(places(tree)):
            break
    return write(tree).encode("utf-8", "surrogatepass")


def places(tree: object, depth: int = 0) -> Iterator[tuple[dict | list, object]]:
    """(what holds it, its key) of every value in a tree, in which some may be shared."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, item in list(items):
        yield tree, key
        if isinstance(item, dict | list) and depth < 8:
            yield from places(item, depth + 1)


def value(draw: random.Random, depth: int) -> object:
    what = draw.random()
    if what < 0.4 or depth == 0:
        return draw.choice(NUMBERS)
    if what < 0.75:
        return text(draw)
    inner = [value(draw, depth - 1) for _ in range(draw.randrange(4))]
    return inner if what < 0.87 else {text(draw): item for item in inner}


def text(draw: random.Random) -> str:
    return "".join(draw.choice(NASTY) for _ in range(draw.choice((1, 1, 1, 2))))


def write(tree: object, depth: int = 0) -> str:
    """A tree as YAML on one line: every text in double quotes, every other character escaped."""
    if depth > 20:
        return "0"
    if isinstance(tree, dict):
        inner = ", ".join(f"{write(str(k))}: {write(v, depth + 1)}" for k, v in tree.items())
        return f"{{{inner}}}"
    if isinstance(tree, list):
        return f"[{', '.join(write(item, depth + 1) for item in tree)}]"
    if isinstance(tree, str):
        return '"' + "".join(c if c.isalnum() and c.isascii() else escape(c) for c in tree) + '"'
    if isinstance(tree, float):
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(repr(tree), repr(tree))
    if tree is None or isinstance(tree, bool):
        return {None: "null", True: "true", False: "false"}[tree]
    return str(tree)


def escape(character: str) -> str:
    return f"\\U{ord(character):08X}" if ord(character) > 0xFFFF else f"\\u{ord(character):04X}"


def listing(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def stage(folder: Path) -> Path:
    """A copy of specs/, where what specs name is found."""
    shutil.copytree(root / "specs", folder / "specs")
    return folder / "specs" / "fuzz.yaml"


def fault(path: Path, content: bytes) -> str:
    """What is wrong with the answer to a spec; "" where nothing is."""
    path.write_bytes(content)
    done = CliRunner().invoke(cli.app, ["check", str(path)])
    if done.exit_code not in (0, 1):
        return f"exit code {done.exit_code}:\n{done.output}\n{done.exception!r}"
    if "Traceback" in done.output:
        return done.output
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return repr(done.exception)
    lines = done.stderr.splitlines()
    if done.exit_code == 1 and not (lines and all(map(is_told, lines))):
        return f"no place, no hint, or lines of neither:\n{done.stderr}"
    return ""


def is_told(line: str) -> bool:
    """A complaint with its place, or a hint; nothing that paints over others."""
    return line.isprintable() and line.startswith(("hint: ", "/"))


def main() -> None:
    case = make(sys.argv[1], int(sys.argv[2]))
    with tempfile.TemporaryDirectory() as scratch:
        answer = fault(stage(Path(scratch)), case) or "answered as it should be"
    sys.stdout.write(f"{case!r}\n{answer}\n")


if __name__ == "__main__":
    main()
