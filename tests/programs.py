"""Random programs: a random model with cuts, schedule, microbatches, replicas and recompute drawn
for it, executed by real ranks. A model is captured once for all of its programs.

    python tests/programs.py MODEL NUMBER      one of them alone
"""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from unittest.mock import patch

from jobs import make_spec
from models_random import Writer

from ppc import pipeline
from ppc.check.capture import microbatch_sizes
from ppc.emit.job import Job
from ppc.errors import PpcError
from ppc.frontend.capture.capture import capture
from ppc.ir.graph import Graph
from ppc.ir.report import File
from ppc.ir.spec import Spec
from ppc.passes.segment import segment
from ppc.run.compare import Comparison
from ppc.run.launch import ForkServer
from ppc.run.verify import verify

STEPS = 2
DATA = {"source": "random", "samples": 12, "fields": {"x": {"shape": [4, 6]}}}
REFUSED = (
    "the model fails on a microbatch",  # torch itself cannot train it
    "writes over what it is given",
    "could run again by itself",
    "would write it again when it runs again",
    "makes nothing that a later stage could not make",
    "without gradient, and stage",  # trained on one stage, read under no_grad on another
    "the stage between them has no layer",
    "nothing to train",
)
"""Words of the compiler's refusals that a random model or program may rightly meet."""

Spoil = Callable[[tuple[File, ...]], tuple[File, ...]]


class ProgramWriter(Writer):
    """Models with more of what crosses a cut, or counts twice when it runs again."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.whole: list[str] = []
        """Values of no gradient: a mask, or indices, by how a float is made of one."""
        self.frozen_parts: list[str] = []

    def statement(self) -> None:
        more = [self.norm, self.mask, self.index, self.whole_read, self.checkpointed, self.fresh]
        if self.random.random() < 0.4:
            self.random.choice(more)()
        else:
            super().statement()

    def single(self) -> str:
        name = super().single()
        if self.random.random() < 0.1 and name not in self.frozen_parts:
            self.frozen_parts.append(name)
            self.init.append(f"{name}.requires_grad_(False)")
        return name

    def norm(self) -> None:
        value = self.value()
        if self.random.random() < 0.5:
            self.modules.append(self.module("nn.BatchNorm1d(4)"))
            self.assign(f"{self.modules[-1]}({value})")
        else:
            block = self.module("nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(4), nn.Tanh())")
            self.modules.append(block)
            self.assign(f"{block}({value})")

    def mask(self) -> None:
        name = f"mask{len(self.lines)}"
        self.lines.append(f"{name} = {self.value()} > 0.1")
        self.whole.append(f"torch.where({name}, {{value}}, 0.5)")

    def index(self) -> None:
        name, table = f"index{len(self.lines)}", self.module("nn.Embedding(6, 6)")
        self.lines.append(f"{name} = {self.value()}.argmax(dim=-1)")
        self.whole.append(f"{table}({name}) + {{value}}")

    def whole_read(self) -> None:
        if self.whole:
            self.assign(self.random.choice(self.whole).format(value=self.value()))
        else:
            self.call()

    def checkpointed(self) -> None:
        text = self.random.choice(["Block(4)", "Noisy(0.5)", "nn.Linear(6, 6)"])
        value = self.value()
        self.assign(f"checkpoint({self.module(text)}, {value}, use_reentrant=False)")

    def fresh(self) -> None:
        """Written in place while it is nobody else's."""
        other = self.value()
        self.assign(f"torch.tanh({self.value()})")
        name = self.values[-1]
        if name != other:
            self.lines.append(f"{name} = ({name} + 0.25).add_({other}).mul_(0.5)")

    def code(self) -> str:
        return f"from torch.utils.checkpoint import checkpoint\n{super().code()}"


@dataclass(frozen=True)
class Model:
    """A random model, captured; its folder holds the specs of its programs."""

    seed: int
    tree: dict[str, dict[str, object]]
    spec: Spec
    graph: Graph
    layers: tuple[str, ...]
    """Paths at which a stage may begin."""


@dataclass(frozen=True)
class Program:
    """How a model is laid out."""

    model: int
    number: int
    parallel: dict[str, object]
    data: dict[str, object]
    train: dict[str, object]
    bucket_bytes: int
    """Gradients of these models fit one bucket by default."""

    def __str__(self) -> str:
        how = self.parallel | self.train | self.data
        words = " ".join(f"{k}={v}" for k, v in how.items() if k not in ("fields", "source"))
        return f"python tests/programs.py {self.model} {self.number}   # {words}"


@dataclass(frozen=True)
class Outcome:
    """What came of a program; `comparison` is None where the compiler refused it."""

    program: Program
    comparison: Comparison | None
    hard: bool = False
    """It has three stages or more, a value that skips a stage, or two replicas."""
    refusal: str = ""

    @property
    def wrong(self) -> str:
        """What is not equal, with the command that shows it again; "" where all is."""
        if self.comparison is None or self.comparison.ok:
            return ""
        return f"{self.program}\n{self.comparison}"


def make_model(seed: int, folder: Path) -> Model:
    """Raises PpcError for a model that cannot be compiled at all."""
    given = {"model": {"loss": "output"}, "data": DATA, "train": {"precision": "fp64"}}
    spec = make_spec(folder, ProgramWriter(seed).code(), **given)
    graph = capture(spec)
    layers = dict.fromkeys(layer.path for layer in segment(graph).layers if layer.path)
    return Model(seed, json.loads(spec.path.read_text()), spec, graph, tuple(layers))


def draw_program(model: Model, number: int) -> Program:
    random = Random(f"program {model.seed} {number}")
    replicas = random.choice([1, 1, 2])
    stages = min(random.choice([1, 2, 2, 3, 3, 4]), len(model.layers), 6 // replicas)
    begins = sorted(random.sample(range(1, len(model.layers)), stages - 1)) if stages > 1 else []
    modules = [path for path in model.graph.modules if path]
    again = random.sample(modules, min(len(modules), random.choice([1, 2])))
    parallel = {
        "pipeline": stages,
        "data": replicas,
        "schedule": random.choice(["gpipe", "1f1b"]),
        "microbatches": random.choice([1, 2, 3, 4]),
        "cuts": [model.layers[i] for i in begins],
        "recompute": random.choice(["none", "stage", again]),
    }
    data = {"samples": random.choice([8, 11, 12]), "last_batch": random.choice(["keep", "drop"])}
    optimizer = {"name": "sgd", "lr": 0.1, "momentum": random.choice([0.0, 0.9])}
    parts = replicas * parallel["microbatches"]
    batch = random.randint(max(4, parts), max(8, parts))
    train = {"global_batch": batch, "steps": STEPS, "optimizer": optimizer}
    if random.random() < 0.3:
        train["clip_norm"] = 0.5
    bucket_bytes = random.choice([2**22, 300])
    return Program(model.seed, number, parallel, DATA | data, train, bucket_bytes)


@contextmanager
def remembering(graph: Graph | None = None):
    """The compiler captures a model once, or takes this graph for it, and compares the capture once
    for each size: all that is compiled meanwhile is one model at one precision."""
    captures: dict[object, object] = {"graph": graph} if graph else {}

    def once(function, key):
        def call(spec, graph, plan):
            at = function, key(spec, plan, graph)
            if at not in captures:
                captures[at] = function(spec, graph, plan)
            return captures[at]

        return call

    def capture_once(spec):
        if "graph" not in captures:
            captures["graph"] = capture(spec)
        return captures["graph"]

    def parts(_spec, sizes, _graph):
        return tuple(sizes)

    with (
        patch.object(pipeline, "capture", capture_once),
        patch.object(pipeline, "check_capture", once(pipeline.check_capture, microbatch_sizes)),
        patch.object(pipeline, "check_mean", once(pipeline.check_mean, parts)),
    ):
        yield


def run_program(
    model: Model, program: Program, server: ForkServer, spoil: Spoil | None = None
) -> Outcome:
    """Compile and run it, and compare with the user's model; `spoil` writes into the scripts."""
    devices = program.parallel["pipeline"] * program.parallel["data"]
    tree = model.tree | {"cluster": {"devices_per_node": devices, "device": "cpu"}}
    tree |= {"data": program.data, "parallel": program.parallel}
    tree["train"] = tree["train"] | program.train
    path = model.spec.folder / f"program{program.number}.yaml"
    path.write_text(json.dumps(tree))
    jobs: list[Job] = []
    lower, place, compile = pipeline.lower, pipeline.place, pipeline.compile

    def noting(*arguments):
        jobs.append(lower(*arguments))
        return jobs[-1]

    def placing(*arguments):
        return replace(place(*arguments), bucket_bytes=program.bucket_bytes)

    def spoiling(*arguments):
        return spoil(compile(*arguments))

    with ExitStack() as stack:
        stack.enter_context(patch.object(pipeline, "lower", noting))
        stack.enter_context(patch.object(pipeline, "place", placing))
        if spoil:
            stack.enter_context(patch.object(pipeline, "compile", spoiling))
        try:
            found = verify(path, exact=True, timeout_s=60, fork_server=server)
        except PpcError as error:
            if any(words in str(error) for words in REFUSED):
                return Outcome(program, None, refusal=str(error))
            error.add_note(str(program))
            raise
        except Exception as error:
            error.add_note(str(program))
            raise
    return Outcome(program, found, is_hard(jobs[-1]))


def is_hard(job: Job) -> bool:
    ends = {(edge.source, edge.target) for program in job.programs for edge in program.edges}
    skip = any(target - source > job.plan.replicas for source, target in ends)
    return len(job.plan.stages) >= 3 or skip or job.plan.replicas > 1


def run_programs(seed: int, numbers: Sequence[int], server: ForkServer) -> list[Outcome]:
    """Of one model; none where it is refused."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = make_model(seed, Path(folder))
        except PpcError as error:
            if any(words in str(error) for words in REFUSED):
                return []
            error.add_note(f"model {seed}")
            raise
        with remembering(model.graph):
            return [run_program(model, draw_program(model, n), server) for n in numbers]


def main() -> None:
    seed, *numbers = map(int, sys.argv[1:])
    with ForkServer() as server:
        for outcome in run_programs(seed, numbers, server):
            print(outcome.program, outcome.refusal or outcome.comparison, sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
