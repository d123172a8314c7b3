"""Fixture pairs of passes/*.txt, and what is printed there read back.

=== title
printed form in
---
printed form out
"""

import re
from pathlib import Path

from graphs import Builder, elements

from ppc.ir.graph import Arg, Dim, Graph, Ref, State, TensorMeta, dtypes
from ppc.ir.plan import Mesh, Plan, Stage
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


def parse_meta(text: str, *, requires_grad: bool = False) -> TensorMeta:
    """`f32[batch, 8]`."""
    dtype, sizes = re.fullmatch(r"(\w+)\[(.*)\]", text).groups()
    names = {printed: name for name, (printed, _) in dtypes.items()}
    shape = tuple(Dim() if size == "batch" else int(size) for size in re.findall(r"\w+", sizes))
    return TensorMeta(shape, names[dtype], requires_grad)


def parse_transfer(line: str) -> Transfer:
    """`x: f32[batch, 8] stage 0 -> 1, gradient back`."""
    match = re.fullmatch(r"(\S+): (.*) stage (\d+) -> (\d+)(, gradient back)?", line)
    value, meta, source, target, back = match.groups()
    gradient = bool(back)
    meta = parse_meta(meta, requires_grad=gradient)
    return Transfer(value, int(source), int(target), meta, gradient)


views = ("view", "transpose", "slice")


def parse_graph(text: str) -> Graph:
    """A printed graph. Every call is of a leaf; ops do what their names say: `linear` multiplies,
    `dropout` draws, a view shares and `copy_` writes the memory of its first operand.
    """
    b = Builder()
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        name, _, meta = rest.partition(": ")
        if kind == "input":
            meta = parse_meta(meta.partition(" <- ")[0])
            b.input(name, *meta.shape[1:], dtype=meta.dtype)
        elif kind in ("param", "buffer"):
            b.parameter(name, *parse_meta(meta).shape, buffer=kind == "buffer")
        elif kind == "output":
            return b.graph(Ref(meta))
        else:
            parse_op(b, line)
    raise ValueError("a graph ends with its output")


def parse_op(b: Builder, line: str) -> None:
    """`v0: f32[batch, 8] = aten.linear.default(x, a.weight)    # a`."""
    pattern = r"(\w+): (.*) = aten\.(\w+)\.default\((.*)\) +# (\S+)"
    name, meta, target, arguments, call = re.fullmatch(pattern, line).groups()

    def argument(word: str) -> Arg:
        if word in b.parameters:
            return State(word)
        return Ref(word) if word in b.values else float(word)

    args = [argument(word) for word in arguments.split(", ")]
    meta = parse_meta(meta)
    if call != "root":
        b.module(call, target.title(), leaf=True)
    shown = [str(args[0])] if target in (*views, "copy_") else []
    flops = 0
    if target == "linear":
        flops = 2 * elements(meta.shape) * b.parameters[str(args[1])].meta.shape[-1]
    made = b.op(
        target,
        *args,
        call="" if call == "root" else call,
        shape=meta.shape,
        dtype=meta.dtype,
        flops=flops,
        random=target == "dropout",
        views=shown,
        mutates=shown if target == "copy_" else [],
    )
    if made.name != name:
        raise ValueError(f"{name} is op {made.name}")


def parse_plan(text: str) -> Plan:
    """A printed plan, but for its parameters and the times of its stages."""
    stages = []
    for line in text.splitlines():
        if match := re.fullmatch(r"stage (\d+) \(one rank: (\d+)\): layers (\d+)-(\d+).*", line):
            index, rank, first, last = map(int, match.groups())
            stages.append(Stage(index, tuple(range(first, last + 1)), Mesh((), (rank,))))
        elif match := re.fullmatch(r"(\d+) microbatches of (\d+) samples, (.*)", line):
            microbatches, batch = int(match[1]), int(match[2])
            return Plan(tuple(stages), {}, batch, microbatches, even=match[3] == "all alike")
    raise ValueError("a plan has a line of microbatches")


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
