"""Fixture pairs of passes/*.txt, and what is printed there read back.

=== title
printed form in
---
printed form out
"""

import re
from pathlib import Path

from ppc.ir.graph import Dim, TensorMeta, dtypes
from ppc.ir.program import (
    Collective,
    Compute,
    Flush,
    Instruction,
    Log,
    Loop,
    Microbatch,
    Post,
    Save,
    Send,
    Update,
    Wait,
)
from ppc.ir.schedule import parse_action
from ppc.ir.unit import Transfer

folder = Path(__file__).parent / "passes"


def fixture_pairs(name: str) -> dict[str, tuple[str, str]]:
    """(form in, form out) by title."""
    text = (folder / f"{name}.txt").read_text()
    cases = {}
    for case in text.split("=== ")[1:]:
        title, _, body = case.partition("\n")
        before, after = body.split("---\n")
        cases[title] = before.strip("\n") + "\n", after.strip("\n") + "\n"
    return cases


def parse_transfer(line: str) -> Transfer:
    """`x: f32[batch, 8] stage 0 -> 1, gradient back`."""
    match = re.fullmatch(r"(\S+): (\w+)\[(.*)\] stage (\d+) -> (\d+)(, gradient back)?", line)
    value, dtype, sizes, source, target, back = match.groups()
    names = {printed: name for name, (printed, _) in dtypes.items()}
    shape = tuple(Dim() if size == "batch" else int(size) for size in sizes.split(", "))
    meta = TensorMeta(shape, names[dtype], requires_grad=bool(back))
    return Transfer(value, int(source), int(target), meta, gradient=bool(back))


def parse_instruction(line: str) -> Instruction:
    """One instruction outside of loops over microbatches."""
    if match := re.fullmatch(r"(\d+[A-Z])\((\d+)\)", line):
        action = parse_action(match[1] + match[2])
        return Compute(action, Microbatch(action.microbatch))
    word, _, rest = line.partition(" ")
    if word in ("Wait", "Send"):
        edge, _, microbatch = rest.rpartition(" ")
        return {"Wait": Wait, "Send": Send}[word](edge, Microbatch(int(microbatch)))
    if word == "Collective":
        kind, value, ranks = re.fullmatch(r"(\w+) (.*) \((.*)\)", rest).groups()
        return Collective(kind, value, tuple(int(r) for r in ranks.split(",") if r.strip()))
    if word == "Update":
        return Update(clip=rest == "True")
    return {"Post": Post, "Flush": Flush, "Log": Log, "Save": Save}[word](*([rest] if rest else []))


def parse_program(text: str) -> tuple[int, tuple[Instruction, ...]]:
    """A printed program whose only loop is the training loop: its rank and instructions."""
    first, *rest = text.splitlines()
    outer: list[Instruction] = []
    body: list[Instruction] = []
    for line in rest:
        if line.startswith("    "):
            body.append(parse_instruction(line.strip()))
            continue
        if body:
            outer.append(Loop("STEPS", tuple(body)))
            body = []
        if line.strip() != "STEPS x":
            outer.append(parse_instruction(line.strip()))
    return int(first.removeprefix("rank ")), tuple(outer)
