"""The lines between a script's definitions and its training loop, and after it."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from ..ir.graph import Graph, TensorMeta
from ..ir.program import Program
from ..ir.spec import SGD, AdamW, Spec
from ..ir.unit import Unit
from .data import DataView
from .job import Job, dtypes
from .layout import wrap
from .steps import variable


def check_edges(program: Program) -> list[str]:
    """Lines that add what each message holds to the facts to compare."""
    if not program.edges:
        return []
    names = ", ".join(variable(edge, program.rank) for edge in program.edges)
    return [
        *wrap(f"for edge in ({names}{',' if len(program.edges) == 1 else ''}):", 4),
        "        mine[edge.name] = describe(edge.empty(1))",
    ]


def start_lines(job: Job, program: Program, unit: Unit, data: DataView | None) -> Iterator[str]:
    """The statements between the device and the loop."""
    distributed = job.plan.world_size > 1
    if distributed:
        yield "if cuda:"
        yield "    torch.cuda.set_device(device)"
        yield 'backend, device_id = ("nccl", device) if cuda else ("gloo", None)'
        yield "dist.init_process_group(backend, timeout=TIMEOUT, device_id=device_id)"
    if data:
        yield from data.start
    yield ""
    yield 'with torch.device("meta"):'
    yield "    stage = Stage()  # no values yet"
    yield "stage.to_empty(device=device)"
    yield from tie_lines(job.graph, unit)
    yield "init_weights()"
    yield from frozen_lines(job.graph, unit)
    if program.groups:
        yield from group_lines(program)
        yield from edge_lines(job, program)
    yield from optimizer_lines(job.spec, unit)
    if distributed:
        yield "check_ranks()"
    if unit.outputs:
        yield '(FOLDER / "metrics.jsonl").unlink(missing_ok=True)'
        yield "begin = time.perf_counter()"


def tie_lines(graph: Graph, unit: Unit) -> Iterator[str]:
    """Names of one parameter on one stage."""
    for held in unit.state:
        for alias in held.aliases:
            owner, _, name = alias.rpartition(".")
            module = f'stage.get_submodule("{owner}")' if owner else "stage"
            kind = "buffer" if graph.parameters[held.canonical].buffer else "parameter"
            yield f'{module}.register_{kind}("{name}", stage.get_{kind}("{held.fqn}"))  # tied'


def frozen_lines(graph: Graph, unit: Unit) -> Iterator[str]:
    """What is not trained, and what stays in evaluation mode."""
    frozen = [
        h.fqn for h in unit.state if not h.trainable and not graph.parameters[h.canonical].buffer
    ]
    names = {h.fqn for h in unit.state if not graph.parameters[h.canonical].buffer}
    for path in cover(frozen, names):
        getter = "get_parameter" if path in names else "get_submodule"
        yield f'stage.{getter}("{path}").requires_grad_(False)'
    evaluated = [path for path, module in graph.modules.items() if not module.training and path]
    here = {name.rpartition(".")[0] for name in names}
    for path in evaluated:
        inside = any(name == path or name.startswith(f"{path}.") for name in here)
        if inside and not any(path.startswith(f"{other}.") for other in evaluated):
            yield f'stage.get_submodule("{path}").eval()'


def cover(chosen: Sequence[str], names: set[str]) -> list[str]:
    """The fewest paths that stand for all chosen names and no other."""
    left, found = list(chosen), []
    while left:
        parts = left[0].split(".")
        paths = [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
        path = next(
            p for p in paths if all(n in chosen for n in names if n == p or n.startswith(f"{p}."))
        )
        found.append(path)
        left = [n for n in left if n != path and not n.startswith(f"{path}.")]
    return found


def group_lines(program: Program) -> Iterator[str]:
    """Each directed edge has a group of its own: its messages wait for nobody else's."""
    groups = ", ".join(map(str, program.groups))
    yield "# a group for each direction, made by all ranks in one order: no message waits for another's"
    yield from wrap(f"groups = {{g: dist.new_group(g, timeout=TIMEOUT) for g in [{groups}]}}", 0)


def edge_lines(job: Job, program: Program) -> Iterator[str]:
    """The mailboxes."""
    for edge in program.edges:
        mine = variable(edge, program.rank)
        kind, other = (
            ("Outbox", edge.target) if edge.source == program.rank else ("Inbox", edge.source)
        )
        empties = [empty_text(meta, dtypes[job.spec.train.precision]) for _, meta in edge.values]
        multi = any(len(e.values) > 1 for e in program.edges)
        empty = f"[{', '.join(empties)}]" if multi else empties[0]
        group = f"groups[{edge.source}, {edge.target}]"
        yield from wrap(f'{mine} = {kind}("{edge.name}", {other}, {group}, lambda n: {empty})', 0)


def empty_text(meta: TensorMeta, default: str) -> str:
    sizes = ", ".join(str(size).replace("batch", "n") for size in meta.shape)
    dtype = "" if meta.dtype == default else f", dtype=torch.{meta.dtype}"
    return f"torch.empty({sizes}{dtype}, device=device)"


def optimizer_lines(spec: Spec, unit: Unit) -> Iterator[str]:
    """The optimizer over the stage's parameters, with their names."""
    if not any(held.trainable for held in unit.state):
        return
    form = spec.train.optimizer
    defaults = AdamW() if isinstance(form, AdamW) else SGD()
    options = [
        f"{name}={spell_option(value)}"
        for name, value in asdict(form).items()
        if name not in ("name", "lr") and value != getattr(defaults, name)
    ]
    cls = "torch.optim.AdamW" if isinstance(form, AdamW) else "torch.optim.SGD"
    yield from wrap(
        f"optimizer = {cls}({', '.join(['stage.named_parameters()', 'lr=LR', *options])})", 0
    )


def spell_option(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(spell_option, value))})"
    return repr(value)


def finish_lines(program: Program, unit: Unit) -> Iterator[str]:
    """Save this rank's part, whole or not at all."""
    path = f'"weights-rank{program.rank}.pt"'
    yield f'partial = FOLDER / ("weights-rank{program.rank}.pt" + ".partial")'
    yield "torch.save(stage.state_dict(), partial)"
    yield f"partial.replace(FOLDER / {path})"
    if program.groups or program.edges:
        yield "dist.destroy_process_group()"
