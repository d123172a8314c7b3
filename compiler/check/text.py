"""check_text: the classes of the emitted scripts compute what the graph does."""

import ast
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType, MappingProxyType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ..emit.leaves import name_class
from ..errors import InternalError
from ..frontend.capture.build import build_model, numerics
from ..frontend.capture.fields import bind, read_fields
from ..frontend.capture.private import fake_mode
from ..frontend.capture.replay import classes
from ..frontend.capture.training import make_training
from ..frontend.capture.user import first_line
from ..frontend.capture.whole import class_of, known, stand_in
from ..ir.function import UsersFunction
from ..ir.graph import Graph
from ..ir.spec import Spec
from ..ir.unit import Unit
from .listing import Listing, first_difference, list_operations
from .outcome import (
    differences,
    is_comparable,
    kept,
    make,
    run_graph,
    run_ops,
    tolerance_of,
)
from .real import microbatch, read_state
from .stages import arguments, find, key, load, name_results, receive, run_stages


def check_text(
    spec: Spec, graph: Graph, units: Sequence[Unit], scripts: Sequence[str], *sizes: int
) -> None:
    """Compare the text of every stage with the graph at each size of microbatch: loss and
    gradients, or lists of operations and of where gradients go when the model is large or computes
    in bfloat16.

    Raises InternalError where they differ.
    """
    with numerics(spec):
        stages = [
            compile_classes(script, unit, graph.functions)
            for script, unit in zip(scripts, units, strict=True)
        ]
        faults = list(compare(spec, graph, units, stages, sizes))
    if faults:
        what = "; ".join(faults[:5])
        raise InternalError(f"the emitted text is not the model: {what}", "lift", str(graph))


def compare(
    spec: Spec,
    graph: Graph,
    units: Sequence[Unit],
    stages: Sequence[CodeType],
    sizes: Sequence[int],
) -> Iterator[str]:
    """What differs."""
    try:
        if is_comparable(graph, max(sizes)):
            for size in sizes:
                yield from compare_numbers(spec, graph, units, stages, size)
            return
        for size in sizes:
            for unit, code in zip(units, stages, strict=True):
                yield from compare_listings(graph, unit, code, size)
    except InternalError:
        raise
    except Exception as error:  # noqa: BLE001  # of our own text, so it is our bug whatever it is
        yield f"it fails: {type(error).__name__}: {first_line(error)}"


def compile_classes(
    script: str, unit: Unit, functions: Mapping[str, UsersFunction] = MappingProxyType({})
) -> CodeType:
    """The imports of torch, the classes and seed_layer of a script, and how it starts its stage.
    `functions`: the graph's, which need more."""
    tree = ast.parse(script)
    own = {name for f in functions.values() for name, _ in (*f.parts, *f.imports)}
    wanted = [node for node in tree.body if is_wanted(node) or own & set(defined(node))]
    made = ast.parse("stage = Stage()").body + [n for n in ast.walk(tree) if is_evaluation(n)]
    outside = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    inside = (node for function in outside for node in ast.walk(function))
    for around in {ast.unparse(c) for node in inside for c in autocasts(node)}:
        made += ast.parse(f"stage.forward = {around}(stage.forward)").body
    return compile(ast.Module(body=wanted + made, type_ignores=[]), f"rank{unit.rank}.py", "exec")


def is_wanted(node: ast.stmt) -> bool:
    """Whether a statement of a script is needed to build its Stage."""
    if isinstance(node, ast.FunctionDef):
        return node.name == "seed_layer"
    if isinstance(node, ast.Import):
        return all(alias.name.split(".")[0] in ("torch", "math", "zlib") for alias in node.names)
    return isinstance(node, ast.ClassDef)


def defined(node: ast.stmt) -> Iterator[str]:
    """The names that a statement of a script gives a meaning."""
    if isinstance(node, ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def imported(graph: Graph) -> dict[str, object]:
    """What scripts import from the user's modules for their stages."""
    return {f.name: classes[target] for target, f in graph.functions.items() if f.module}


def is_evaluation(node: ast.AST) -> TypeGuard[ast.stmt]:
    """Whether a statement puts a part of the stage in evaluation mode."""
    return isinstance(node, ast.Expr) and bool(
        re.fullmatch(r"stage\.\S+\.eval\(\)", ast.unparse(node))
    )


def autocasts(node: ast.AST) -> list[ast.expr]:
    """The torch.autocast that a `with` enters, if it does: a script runs its stage in such."""
    if not isinstance(node, ast.With):
        return []
    entered = [item.context_expr for item in node.items]
    return [e for e in entered if ast.unparse(e).startswith("torch.autocast(")]


def make_stage(code: CodeType, imported: Mapping[str, object] = MappingProxyType({})) -> nn.Module:
    """The script's stage, the only replica of it."""
    names: dict[str, object] = {"device": torch.device("cpu"), "__name__": "rank", **imported}
    names |= {name_class(leaf.constructor.cls): class_of(leaf) for leaf in known.leaves.values()}
    names |= {"REPLICA": 0, "REPLICAS": 1, "sum_replicas": lambda tensor: tensor}
    exec(code, names)  # noqa: S102  # our own text
    stage: nn.Module = names["stage"]  # type: ignore[assignment]
    stand_in(stage, stage=True)
    return stage


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
        made = [make_stage(code, imported(graph)) for code in stages]
        found = run_stages(graph, units, made, state, inputs)
    yield from differences(found, expected, tolerance_of(spec.train.precision, graph))


def compare_listings(graph: Graph, unit: Unit, code: CodeType, batch: int) -> Iterator[str]:
    """One stage on tensors without values."""
    mode = fake_mode()
    with mode:
        stage = make_stage(code, imported(graph))
        normalise_alone(stage)
        load(stage, unit, {fqn: make(p.meta, 0) for fqn, p in graph.parameters.items()})
        given = {t.value: receive(make(t.meta, batch), t) for t in unit.receives}
        given |= {i.name: make(i.meta, batch) for i in unit.inputs}
    held = [*stage.named_parameters(), *stage.named_buffers()]
    state = {graph.canonical[n]: t.detach().requires_grad_(t.requires_grad) for n, t in held}
    names = [(f"input {name}", tensor) for name, tensor in given.items()] + held
    run = partial(units_results, graph, unit, given, state, batch)
    expected = list_operations(run, names, mode, gradients=True)
    run = partial(stages_results, graph, unit, given, stage)
    found = list_operations(run, names, mode, gradients=True)
    if difference := first_difference(found, expected):
        yield f"stage {unit.stage}, in a microbatch of {batch}: {difference}"


def normalise_alone(stage: nn.Module) -> None:
    """The graph has plain batch norms, whose operations are others than those of replicas."""
    for module in stage.modules():
        if type(module).__name__.startswith("SyncBatchNorm"):
            module.__class__ = type(module).__mro__[1]


def units_results(
    graph: Graph, unit: Unit, given: Mapping[str, Tensor], state: Mapping[str, Tensor], batch: int,
    listing: Listing,
) -> dict[str, Tensor]:  # fmt: skip
    """Run a stage's ops: what it gives, and what it leaves changed."""
    seeds = dict(unit.seeds)

    def before(op: str) -> None:
        if op in seeds:
            listing.seed(f"{key} {seeds[op]}")

    values = run_ops(unit.ops, graph.canonical, state, given, batch, before)
    given_on = [value for _, value in unit.outputs] + [t.value for t in unit.sends]
    found: dict[str, Any] = {value: values[value] for value in given_on}
    return found | changed(graph, unit, state.__getitem__)


def stages_results(
    graph: Graph, unit: Unit, given: Mapping[str, Tensor], stage: nn.Module, listing: Listing
) -> dict[str, Tensor]:
    """Run the script's stage: the same. Its seeding is noted, not done."""

    def seed_layer(key: str, path: str) -> None:
        listing.seed(f"{key} {path}")

    type(stage).forward.__globals__["seed_layer"] = seed_layer
    found = name_results(unit, stage(*arguments(unit, given)))
    names = {held.canonical: held.fqn for held in unit.state}
    return found | changed(graph, unit, lambda canonical: find(stage, names[canonical]))


def changed(graph: Graph, unit: Unit, find: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """The state that a stage may leave changed."""
    names = kept(graph)
    return {held.canonical: find(held.canonical) for held in unit.state if held.canonical in names}
