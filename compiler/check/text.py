"""check_text: the classes of the emitted scripts compute what the graph does."""

import ast
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ..errors import InternalError
from ..frontend.capture.build import build_model, default_dtype
from ..frontend.capture.fields import bind, read_fields
from ..frontend.capture.private import fake_mode
from ..frontend.capture.training import make_training
from ..ir.graph import Graph, TensorMeta
from ..ir.spec import Spec
from ..ir.unit import Unit
from .capture import microbatch, read_state
from .listing import first_difference, list_operations
from .outcome import (
    Outcome,
    copy_state,
    differences,
    is_small,
    kept,
    make,
    run_graph,
    run_ops,
    tolerance_of,
)

key = "0 0 0"
"""What seeds dropout: seed, step and microbatch."""


def check_text(
    spec: Spec, graph: Graph, units: Sequence[Unit], scripts: Sequence[str], batch: int
) -> None:
    """Compare the text of every stage with the graph: numbers when the model is small, lists of
    operations when it is large. Raises InternalError where they differ."""
    with default_dtype(spec.train.precision):
        stages = [
            compile_classes(script, unit) for script, unit in zip(scripts, units, strict=True)
        ]
        if is_small(graph, batch):
            faults = list(compare_numbers(spec, graph, units, stages, batch))
        else:
            faults = [
                f
                for unit, code in zip(units, stages, strict=True)
                if (f := compare_listings(graph, unit, code, batch))
            ]
    if faults:
        raise InternalError(
            f"the emitted text is not the model: {'; '.join(faults[:5])}", "lift", str(graph)
        )


def compile_classes(script: str, unit: Unit) -> CodeType:
    """The imports of torch, the classes and seed_layer of a script, and how it starts its stage."""
    tree = ast.parse(script)
    wanted = [node for node in tree.body if is_wanted(node)]
    made = ast.parse("stage = Stage()").body + [n for n in ast.walk(tree) if is_evaluation(n)]
    return compile(ast.Module(body=wanted + made, type_ignores=[]), f"rank{unit.rank}.py", "exec")


def is_wanted(node: ast.stmt) -> bool:
    """Whether a statement of a script is needed to build its Stage."""
    if isinstance(node, ast.FunctionDef):
        return node.name == "seed_layer"
    if isinstance(node, ast.Import):
        return all(alias.name.split(".")[0] in ("torch", "math", "zlib") for alias in node.names)
    return isinstance(node, ast.ClassDef)


def is_evaluation(node: ast.AST) -> TypeGuard[ast.stmt]:
    """Whether a statement puts a part of the stage in evaluation mode."""
    return isinstance(node, ast.Expr) and bool(
        re.fullmatch(r"stage\.\S+\.eval\(\)", ast.unparse(node))
    )


def make_stage(code: CodeType) -> nn.Module:
    """The script's stage."""
    names: dict[str, object] = {"device": torch.device("cpu"), "__name__": "rank"}
    exec(code, names)  # noqa: S102  # our own text
    return names["stage"]  # type: ignore[return-value]


def compare_numbers(
    spec: Spec, graph: Graph, units: Sequence[Unit], stages: Sequence[CodeType], batch: int
) -> Iterator[str]:
    """All stages in one process, against the graph: what differs."""
    model = build_model(spec)
    training = make_training(spec, model, bind(spec, model, read_fields(spec)))
    inputs = microbatch(spec, training, batch)
    state = read_state(graph, model)
    seeds = {op: path for unit in units for op, path in unit.seeds}

    def seed(op: str) -> None:
        if op in seeds:
            torch.manual_seed(zlib.crc32(f"{key} {seeds[op]}".encode()))

    with torch.random.fork_rng(devices=[]):
        expected = run_graph(graph, state, inputs, seed)
        found = run_stages(graph, units, [make_stage(code) for code in stages], state, inputs)
    yield from differences(found, expected, tolerance_of(spec.train.precision))


def run_stages(
    graph: Graph,
    units: Sequence[Unit],
    stages: Sequence[nn.Module],
    state: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
) -> Outcome:
    """The stages one after the other, each with copies of what it holds; their gradients add up."""
    values = {i.name: tensor for i, tensor in zip(graph.inputs, inputs, strict=True)}
    gradients: dict[str, Tensor] = {}
    after: dict[str, Tensor] = {}
    for unit, stage in zip(units, stages, strict=True):
        load(stage, unit, state)
        outputs = stage(*arguments(unit, values))
        values |= dict(
            zip(results(unit), outputs if isinstance(outputs, tuple) else (outputs,), strict=True)
        )
    loss, names = values[graph.outputs[0][1]], kept(graph)
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    for unit, stage in zip(units, stages, strict=True):
        for held in unit.state:
            tensor = find(stage, held.fqn)
            if held.canonical in names:
                after[held.canonical] = tensor.detach()
            if tensor.is_leaf and tensor.grad is not None:
                total = gradients.get(held.canonical)
                gradients[held.canonical] = tensor.grad if total is None else total + tensor.grad
    return Outcome(loss.detach(), gradients, after)


def arguments(unit: Unit, values: Mapping[str, Tensor]) -> list[object]:
    """What Stage.forward takes, in order."""
    given: list[object] = [values[t.value] for t in unit.receives]
    return given + [values[i.name] for i in unit.inputs] + ([key] if unit.seeds else [])


def results(unit: Unit) -> list[str]:
    """What Stage.forward returns, in order."""
    return [value for _, value in unit.outputs] + list(dict.fromkeys(t.value for t in unit.sends))


def load(stage: nn.Module, unit: Unit, state: Mapping[str, Tensor]) -> None:
    """Give a stage the model's weights; names of one tensor share it."""
    own = copy_state(
        {held.canonical: state[held.canonical] for held in unit.state if held.canonical in state}
    )
    for held in unit.state:
        if held.canonical not in own:
            continue
        for name in (held.fqn, *held.aliases):
            owner, _, last = name.rpartition(".")
            module = stage.get_submodule(owner)
            tensor = own[held.canonical]
            # setattr would take no plain tensor for a parameter
            stores: list[Any] = [module._parameters, module._buffers]  # noqa: SLF001
            store = next((store for store in stores if last in store), None)
            if store is None:
                raise InternalError(f"stage {unit.stage} has no {name}", "lift")
            store[last] = tensor
    missing = {n for n, _ in (*stage.named_parameters(), *stage.named_buffers())} - {
        n for held in unit.state for n in (held.fqn, *held.aliases)
    }
    if missing:
        raise InternalError(
            f"stage {unit.stage} has {', '.join(sorted(missing))}, which it should not", "lift"
        )


def find(stage: nn.Module, name: str) -> Tensor:
    owner, _, last = name.rpartition(".")
    return getattr(stage.get_submodule(owner), last)  # type: ignore[no-any-return]


def compare_listings(graph: Graph, unit: Unit, code: CodeType, batch: int) -> str | None:
    """One stage on tensors without values."""
    mode = fake_mode()
    with mode:
        stage = make_stage(code)
        given = {name: make(meta, batch) for name, meta in needed(unit).items()}
        state = {
            graph.canonical[n]: t for n, t in (*stage.named_parameters(), *stage.named_buffers())
        }
    run = partial(run_ops, unit.ops, graph.canonical, state, given, batch)
    expected = list_operations(run, mode)
    found = list_operations(lambda: stage(*arguments(unit, given)), mode)
    fault = first_difference(found, expected)
    return fault and f"stage {unit.stage}: {fault}"


def needed(unit: Unit) -> dict[str, TensorMeta]:
    return {t.value: t.meta for t in unit.receives} | {i.name: i.meta for i in unit.inputs}
