"""The data section of scripts, at work beside what the language promises."""

import importlib
import sys
from pathlib import Path

import torch
from emitted import emit
from formatted import format_text
from jobs import make_spec

from ppc.frontend.samples import (
    epoch_of_step,
    microbatches,
    read_samples,
    samples_of_step,
    total_steps,
)
from ppc.frontend.sources import copied_modules
from ppc.ir.spec import Spec

model = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))

def build():
    return Net()
"""
text_model = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Embedding(256, 6), nn.Linear(6, 256)

    def forward(self, tokens):
        return self.last(torch.tanh(self.first(tokens))).flatten(0, 1)

def build():
    return Net()

def loss(logits, labels):
    return nn.functional.cross_entropy(logits, labels.flatten())
"""


def make(folder: Path, data, code: str = model, stages: int = 1, **sections) -> Spec:
    return make_spec(
        folder,
        code,
        data=data,
        cluster={"devices_per_node": stages} | sections.pop("cluster", {}),
        train={"global_batch": 4, "steps": 7} | sections.pop("train", {}),
        parallel={"pipeline": stages, "microbatches": 2} | sections.pop("parallel", {}),
        **sections,
    )


def forget() -> None:
    """Scripts import a module of the user's by its name, each its own."""
    for name in ("points", "rows"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


class Reader:
    """The data section of a script, at work."""

    def __init__(self, spec: Spec, script: str, folder: Path) -> None:
        assert script == format_text(script)
        head, _, rest = script.partition("# --------------------------------------------------"
                                         "----------------------------------- model\n")  # fmt: skip
        _, _, data = rest.partition("--- data\n")
        body, _, start = data.partition("\n# ----------------")
        counting = [line for line in start.splitlines() if line.startswith("STEPS = EPOCHS")]
        device = torch.device("cpu")
        self.scope = {"__file__": str(folder / "rank0.py"), "device": device, "cuda": False}
        before = torch.get_default_dtype()
        sys.path.insert(0, str(folder))
        try:
            exec("\n".join([head, body, *counting]), self.scope)  # noqa: S102  # our own text
            self.steps = self.scope["STEPS"]
        finally:
            torch.set_default_dtype(before)
            sys.path.remove(str(folder))
            forget()
        self.spec, self.precision = spec, spec.train.precision

    def batch(self, step: int) -> list[list[torch.Tensor]]:
        """The fields of each microbatch."""
        torch.set_default_dtype({"fp32": torch.float32, "fp64": torch.float64}[self.precision])
        try:
            found = self.scope["get_batch"](step)
        finally:
            torch.set_default_dtype(torch.float32)
        return [[part] if isinstance(part, torch.Tensor) else list(part) for part in found]


def compare(spec: Spec, folder: Path | None = None) -> list[str]:
    """Check each rank's reader against the language; the scripts."""
    folder = folder or spec.folder / "out"
    folder.mkdir(exist_ok=True, parents=True)
    emitted = emit(spec, folder)
    for name, text in copied_modules(spec).items():
        (folder / name).write_text(text)
    samples = read_samples(spec)
    for rank, unit in enumerate(emitted.job.units):
        script = emitted.script(rank)
        fields = [i.field for i in unit.inputs]
        if "# ----" not in script or not fields:
            assert "def get_batch" not in script
            continue
        reader = Reader(spec, script, folder)
        assert reader.steps == total_steps(spec, samples.count)
        assert reader.scope["SAMPLES"] == samples.count
        for step in range(reader.steps):
            numbers = samples_of_step(spec, samples.count, step)
            expected = [
                samples.batch(part, fields, epoch_of_step(spec, samples.count, step)[0])
                for part in microbatches(numbers, spec.parallel.microbatches)
            ]
            found = [part for part in reader.batch(step) if len(part[0])]
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                for a, b in zip(one, other, strict=True):
                    assert a.dtype == b.dtype
                    assert torch.equal(a, b)
    return emitted.scripts
