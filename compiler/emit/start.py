"""The lines between a script's definitions and its training loop, and after it."""

from collections.abc import Iterator

from ..ir.graph import Dim, Graph
from ..ir.program import Edge, Program, Save
from ..ir.unit import Unit
from .checkpoint import group_of, resume_lines
from .constants import compared_constants
from .data import DataView
from .expression import quote
from .groups import member_lines
from .job import Job, dtypes
from .layout import width, wrap
from .loop import reads_early
from .messages import is_general, label, message_shape, variable
from .norms import norm_group_lines
from .optimizer import optimizer_lines
from .recompute import recompute_lines
from .reducer import cover, padded, reduced_parameters, reduction


def grad_lines(job: Job, unit: Unit) -> Iterator[str]:
    """Gradients that are there from the start."""
    for name in padded(job, unit):
        yield from wrap(f"tied = stage.get_parameter({quote(name)})", 0)
        yield "tied.grad = torch.zeros_like(tied)"


def fact_lines(job: Job, program: Program, unit: Unit, data: DataView | None) -> Iterator[str]:
    """What the ranks must agree on: the compilation first, then what someone may have edited."""
    facts = ['"compilation": COMPILATION', '"torch": torch.__version__']
    facts += [f'"data": {data.fact}'] if data else []
    yield (
        "# before the first message: "
        "do all ranks run this compilation, with this torch, on this data?"
    )
    yield from wrap(f"facts = {{{', '.join(facts)}}}", 0)
    names = compared_constants(job.spec)
    if len(constants := f'facts["constants"] = {", ".join(names)}') <= width:
        yield constants
    else:
        cut = names.index("LR")
        yield f'facts["constants"] = {", ".join(names[:cut])}'
        yield f'facts["rates"] = {", ".join(names[cut:])}'
    if job.plan.replicas > 1:
        yield 'facts["replicas"] = REPLICAS, BUCKET_BYTES'
        total = "str(sum(t.double().sum().item() for t in stage.state_dict().values()))"
        yield from wrap(f'facts["weights of stage {unit.stage}"] = {total}', 0)
    if group_of(program):
        yield 'facts["checkpoints"] = tuple(find_checkpoints())'
    if program.edges:
        here = ", ".join(variable(edge, program.rank) for edge in program.edges)
        yield from wrap(f"for edge in [{here}]:", 0)
        count = "MICROBATCH_SIZE" if job.plan.even else "1"
        message = f"[(({count}, *edge.shape), edge.dtype)]"
        if is_general(program):
            message = f"edge.room({count})"
        yield f"    facts[edge.name] = str({message})"


def check_lines() -> Iterator[str]:
    """Compare the facts, before the groups: groups of another compilation would not be answered.

    Through the store: torch's collectives of objects need numpy.
    """
    yield "store = dist.group.WORLD.get_group_store()"
    yield 'store.set(f"facts {RANK}", repr(facts))'
    yield 'told = [ast.literal_eval(store.get(f"facts {i}").decode()) for i in range(WORLD_SIZE)]'
    yield "for fact in dict.fromkeys(name for theirs in told for name in theirs):"
    yield "    found = {i: theirs[fact] for i, theirs in enumerate(told) if fact in theirs}"
    yield "    if len(set(found.values())) > 1:"
    yield '        raise RuntimeError(f"{HERE}, before step 1: ranks differ in {fact}: {found}")'


def stage_lines(job: Job, unit: Unit) -> Iterator[str]:
    """From the device to the stage, the same on its replicas."""
    cuda = job.spec.cluster.device.kind == "cuda"
    yield from device_lines(cuda=cuda, distributed=job.plan.world_size > 1)
    yield 'with torch.device("meta"):  # no values yet'
    yield "    stage = Stage().to_empty(device=device)"
    yield "init_weights(stage)"
    yield from tie_lines(job.graph, unit)
    yield from frozen_lines(job.graph, unit)
    yield from recompute_lines(job, unit)
    if job.spec.train.compile:
        yield from compile_lines(unit)


def meeting_lines(job: Job, program: Program, unit: Unit, data: DataView | None) -> Iterator[str]:
    """From the edges to the optimizer, the same on its replicas."""
    if job.plan.world_size > 1:
        yield from fact_lines(job, program, unit, data)
        yield from check_lines()
    if program.groups:
        yield from group_lines(job, program)
    yield from norm_group_lines(program)
    if reduction(program) is not None:
        yield from wrap(f"reducer = Reducer({reduced_parameters(job, unit)})", 0)
    yield from grad_lines(job, unit)
    yield from optimizer_lines(job, unit)


def ready_lines(job: Job, program: Program, unit: Unit) -> Iterator[str]:
    """Right before the loop."""
    yield from resume_lines(job, program)
    saves = bool(group_of(program))
    if unit.outputs and not program.coords.get("data", 0):
        if saves:
            yield 'metrics = FOLDER / "metrics.jsonl"'
            yield "metrics.touch()"
            yield "lines = metrics.read_text().splitlines(keepends=True)"
            yield 'metrics.write_text("".join(lines[:first]))  # later steps come again'
        else:
            yield '(FOLDER / "metrics.jsonl").unlink(missing_ok=True)'
        yield "begin = time.perf_counter()"
    if reads_early(job, program, unit):
        yield f"batch = get_batch({'first' if saves else '0'})"


def device_lines(*, cuda: bool, distributed: bool) -> Iterator[str]:
    """Scripts for GPUs run without them, too: that is how they are proved."""
    if cuda:
        yield "cuda = torch.cuda.is_available()"
        gpu = 'torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))'
        yield f'device = {gpu} if cuda else torch.device("cpu")'
    else:
        yield 'device = torch.device("cpu")'
    if distributed and cuda:
        yield 'backend, device_id = ("nccl", device) if cuda else ("gloo", None)'
        yield "dist.init_process_group(backend, timeout=TIMEOUT, device_id=device_id)"
    elif distributed:
        yield 'dist.init_process_group("gloo", timeout=TIMEOUT)'


def compile_lines(unit: Unit) -> Iterator[str]:
    """Compile the forward alone: the stage keeps its names, its hooks and its state dict."""
    options = ', options={"fallback_random": True}' if unit.seeds else ""
    comment = "  # dropout as without it" if unit.seeds else ""
    yield f"stage.forward = torch.compile(stage.forward{options}){comment}"


def tie_lines(graph: Graph, unit: Unit) -> Iterator[str]:
    """Names of one parameter on one stage."""
    for held in unit.state:
        for alias in held.aliases:
            owner, _, name = alias.rpartition(".")
            module = f"stage.get_submodule({quote(owner)})" if owner else "stage"
            kind = "buffer" if graph.parameters[held.canonical].buffer else "parameter"
            yield f"# {alias} is tied to {held.fqn}"
            text = f"{module}.register_{kind}({quote(name)}, stage.get_{kind}({quote(held.fqn)}))"
            yield from wrap(text, 0)


def frozen_lines(graph: Graph, unit: Unit) -> Iterator[str]:
    """What is not trained, and what stays in evaluation mode."""
    frozen = [
        h.fqn for h in unit.state if not h.trainable and not graph.parameters[h.canonical].buffer
    ]
    names = {h.fqn for h in unit.state if not graph.parameters[h.canonical].buffer}
    for path in cover(frozen, names):
        getter = "get_parameter" if path in names else "get_submodule"
        yield f"stage.{getter}({quote(path)}).requires_grad_(False)"
    evaluated = [path for path, module in graph.modules.items() if not module.training and path]
    here = {h.fqn.rpartition(".")[0] for h in unit.state}
    leaves = {path for path, module in graph.modules.items() if module.constructor}
    here |= {op.call[0] for op in unit.ops} & leaves
    for path in evaluated:
        inside = any(name == path or name.startswith(f"{path}.") for name in here)
        if inside and not any(path.startswith(f"{other}.") for other in evaluated):
            yield f"stage.get_submodule({quote(path)}).eval()"


def group_lines(job: Job, program: Program) -> Iterator[str]:
    """Each directed edge has a group of its own: its messages wait for nobody else's. So have sums:
    torch's modules may hold its default group, whose threads then do not end before Python."""
    groups = ", ".join(map(str, program.groups))
    short = f"groups = {{g: dist.new_group(g, timeout=TIMEOUT) for g in [{groups}]}}"
    if job.plan.world_size == 2:
        yield short + ("  # one for each direction" if program.edges else "")
        return
    if sums(job):
        yield "# a group for each direction and for those who sum, made by all ranks in one order"
    else:
        yield (
            "# a group for each direction, made by all ranks in one order: "
            "no message waits for another's"
        )
    one, several = ("ranks", "members") if sums(job) else ("pair", "pairs")
    if len(short) <= width:
        yield short
    else:
        yield from member_lines(program.groups, several)
        yield f"groups = {{{one}: dist.new_group({one}, timeout=TIMEOUT) for {one} in {several}}}"


def sums(job: Job) -> bool:
    """Whether some ranks sum gradients or norms, or write checkpoints together."""
    held = (held for unit in job.units for held in unit.state)
    together = job.spec.train.clip_norm is not None or job.spec.checkpoint is not None
    return job.plan.replicas > 1 or together or any(len(h.stages) > 1 for h in held if h.trainable)


def edge_lines(job: Job, program: Program) -> Iterator[str]:
    """The edges that start or end here; none for a rank alone."""
    for edge in program.edges:
        peer = edge.target if edge.source == program.rank else edge.source
        pair = f"({edge.source}, {edge.target})"
        room = room_of(edge, dtypes[job.spec.train.precision], general=is_general(program))
        arguments = ", ".join([f'"{label(edge)}"', str(peer), pair, *room])
        yield from wrap(f"{variable(edge, program.rank)} = Edge({arguments})", 0)


def room_of(edge: Edge, default: str, *, general: bool) -> list[str]:
    """The room that a message takes: of one sample, or as a function of their number."""
    if general:
        rooms = [
            f"({show_shape(message_shape(edge, meta))}, torch.{meta.dtype})"
            for _, meta in edge.values
        ]
        return [f"lambda n: [{', '.join(rooms)}]"]
    ((_, meta),) = edge.values
    sizes = [str(size) for size in message_shape(edge, meta)[1:]]
    return sizes if meta.dtype == default else [*sizes, f"dtype=torch.{meta.dtype}"]


def show_shape(shape: tuple[int | Dim, ...]) -> str:
    """`(n, 128)`, n being the number of samples."""
    sizes = ", ".join(str(size).replace("*", " * ").replace("batch", "n") for size in shape)
    return f"({sizes}{',' if len(shape) == 1 else ''})"


def finish_lines(program: Program, *, distributed: bool) -> Iterator[str]:
    """Save this rank's part, whole or not at all."""
    path = f'"weights-rank{program.rank}.pt"'
    if Save() in program.actions:
        yield f'torch.save(stage.state_dict(), FOLDER / {path[:-1]}.partial")'
        yield f'os.replace(FOLDER / {path[:-1]}.partial", FOLDER / {path})'
    if not distributed:
        return
    if program.groups:
        yield "groups.clear()  # ends their threads: dropping a tensor after Python's end aborts"
    if program.norm_groups:
        yield "norm_groups.clear()"
    yield "dist.destroy_process_group()"
