"""Layers that sleep, on the emitted scripts and on torch.distributed.pipelining: what a schedule
and its transport cost, with no rank in need of a core.

    python benchmarks/virtual.py                   4 stages x 16 microbatches, 8 x 32; gpipe, 1f1b
    python benchmarks/virtual.py --large           values whose transfer takes as long as a forward

Both sides run the same layers, loss, optimizer and data, one after the other in turn. A step is
taken from the end of one to the end of the next on the last rank. `share` is the simulator's
makespan, with the times and latency measured here, over the median step: 1 would be a transport
that costs nothing. Run it on a machine that does nothing else.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import bench
import numpy as np

from ppc.analysis.simulate import Clock, by_edge, simulate
from ppc.ir.program import Program
from ppc.ir.schedule import Kind
from ppc.run.launch import ForkServer, run_forked

KEPT = 1024
LARGE = 16 * 2**20  # elements of 4 bytes: 64 MB
SHARE, LARGE_SHARE, LARGE_COST = 0.97, 0.95, 1.10  # what is asked for
SETTLING = 6  # steps until freed memory serves for every large value
LAYERS = bench.HERE / "layers"


@dataclass(frozen=True, slots=True)
class Case:
    """What runs."""

    stages: int
    microbatches: int
    schedule: str
    forward_ms: float
    backward_ms: float
    width: int = KEPT
    pinned: bool = False
    """Each rank to a core."""

    @property
    def name(self) -> str:
        size = f"{4 * self.width // 2**20} MB" if self.width > KEPT else "4 KB"
        return f"{self.stages} x {self.microbatches} {self.schedule} {size}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "VIRTUAL_FORWARD_MS": str(self.forward_ms),
            "VIRTUAL_BACKWARD_MS": str(self.backward_ms),
            "VIRTUAL_PINNED": "1" * self.pinned,
        }


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds that things take on this machine."""

    forward_s: float
    backward_s: float
    latency_s: float
    transfer_s: float = 0.0
    both_ways_s: float = 0.0
    """Of a message while another comes the other way."""


def measure(server: ForkServer, folder: Path, case: Case, rounds: int) -> Measured:
    """Times of a layer alone, and of a message between two idle ranks."""
    found: dict[str, float] = {}
    settings = {"width": case.width, "elements": case.width, "rounds": rounds}
    modules = [LAYERS / "net.py", LAYERS / "sleeping.py"]
    for ranks in (1, 2):
        run = bench.write_peer(
            "measure", folder / f"measure{ranks}", ranks, settings, case.environment, modules
        )
        run_forked(
            run.folder, ranks, timeout_s=bench.TIMEOUT_S, server=server, environment=run.environment
        ).check()
        found |= json.loads((run.folder / "measured.json").read_text())
    return Measured(**found)


def mean(found: list[Measured]) -> Measured:
    """Of measurements at several times."""
    fields = Measured.__slots__
    return Measured(*(sum(getattr(m, f) for m in found) / len(found) for f in fields))


def write_inputs(folder: Path, case: Case, steps: int) -> Path:
    """The model and the data beside the spec."""
    folder.mkdir(parents=True, exist_ok=True)
    for module in LAYERS.glob("*.py"):
        shutil.copy(module, folder)
    for name in "xy":
        np.save(folder / f"{name}.npy", np.ones((4 * case.microbatches, KEPT), np.float32))
    tree = {
        "name": folder.name,
        "model": {
            "factory": "net.py:build",
            "args": {"depth": case.stages, "width": case.width},
            "loss": "net.py:loss",
        },
        "data": {"source": "arrays", "files": {"x": "x.npy", "target": "y.npy"}},
        "train": {
            "global_batch": case.microbatches,
            "steps": steps,
            "optimizer": {"name": "sgd", "lr": 0.01},
        },
        "cluster": {"devices_per_node": case.stages, "device": "cpu"},
        "parallel": {
            "pipeline": case.stages,
            "schedule": case.schedule,
            "microbatches": case.microbatches,
            "cuts": [f"layers.{i}" for i in range(1, case.stages)],
        },
    }
    return bench.write_spec(folder / "job.yaml", tree)


def ours(folder: Path, case: Case, steps: int) -> tuple[bench.Run, tuple[Program, ...]]:
    """The emitted scripts, unmodified."""
    path = write_inputs(folder, case, steps)
    return bench.compile_ours(path, folder / "scripts", case.environment)


def peer(folder: Path, case: Case, steps: int) -> bench.Run:
    """torch.distributed.pipelining with the same layers."""
    settings = {
        "schedule": case.schedule,
        "microbatches": case.microbatches,
        "steps": steps,
        "width": case.width,
        "data": str(folder.resolve()),
    }
    modules = [LAYERS / "net.py", LAYERS / "sleeping.py"]
    run = bench.write_peer(
        "pipeline", folder / "peer", case.stages, settings, case.environment, modules
    )
    shutil.copy(bench.HERE / "peers" / "virtual_stages.py", run.folder / "stages.py")
    return run


def makespan(programs: tuple[Program, ...], measured: Measured) -> float:
    """Seconds of a step by the simulator."""
    compute = {}
    for program in programs:
        for stage in program.stages:
            compute[stage, Kind.F] = measured.forward_s
            compute[stage, Kind.B] = measured.backward_s
    edges = {edge.name for program in programs for edge in program.edges}
    clock = Clock(
        compute,
        latency_s=dict.fromkeys(edges, measured.latency_s),
        transfer_s=dict.fromkeys(edges, measured.transfer_s),
    )
    return simulate(programs, clock, queue_of=by_edge).makespan_s


def beside_peer(
    server: ForkServer, folder: Path, case: Case, repeats: int, steps: int
) -> dict[str, object]:
    """A case on both sides."""
    print(f"{case.name}, F {case.forward_ms:g} ms, B {case.backward_ms:g} ms", flush=True)
    place = folder / f"{case.stages}x{case.microbatches}-{case.schedule}"
    run, programs = ours(place, case, steps)
    sides = {"torch": peer(place, case, steps), "ppc": run}
    found: dict[str, list[float]] = {name: [] for name in sides}
    measured = []
    for _ in range(repeats):
        measured.append(measure(server, place, case, rounds=6))
        for name, times in bench.alternate(server, sides, 1).items():
            found[name] += times
    return result(case, mean(measured), makespan(programs, mean(measured)), found)


def result(
    case: Case, measured: Measured, simulated_s: float, found: Mapping[str, list[float]]
) -> dict[str, object]:
    """All numbers of a case."""
    ideal_s = (case.microbatches + case.stages - 1) * (case.forward_ms + case.backward_ms) / 1e3
    paired = bench.ratios(found["ppc"], found["torch"])
    return {
        "case": case.name,
        "forward_ms": case.forward_ms,
        "backward_ms": case.backward_ms,
        "measured": {name: getattr(measured, name) for name in Measured.__slots__},
        "simulated_s": simulated_s,
        "ideal_s": ideal_s,
        "steps_s": dict(found),
        "share_of_simulated": simulated_s / median(found["ppc"]),
        "share_of_ideal": {name: ideal_s / median(times) for name, times in found.items()},
        "ratio": median(paired),
        "spread": bench.spread(paired),
    }


def is_fast(r: dict) -> bool:
    """Not slower than the peer, but for what cannot be told."""
    return r["ratio"] <= 1 + r["spread"]


def is_hidden(r: dict) -> bool:
    """A transfer hides behind other microbatches of gpipe; 1f1b has too few under way for that and
    should come near to what the simulator says."""
    if "1f1b" in r["case"]:
        return r["share_of_simulated"] >= LARGE_SHARE
    return r["over_small"] < LARGE_COST


def show(results: list[dict]) -> str:
    """The table for people."""
    rows = []
    for r in results:
        m, times = r["measured"], r["steps_s"]
        rows.append(
            {
                "case": r["case"],
                "F, B ms": f"{1e3 * m['forward_s']:.2f}, {1e3 * m['backward_s']:.2f}",
                "latency": f"{1e6 * m['latency_s']:.0f} us",
                "simulated": f"{1e3 * r['simulated_s']:.1f}",
                "ppc ms": bench.ms(times["ppc"]),
                "torch ms": bench.ms(times["torch"]),
                "share": f"{r['share_of_simulated']:.3f}",
                "of ideal": f"{r['share_of_ideal']['ppc']:.3f}",
                "torch's": f"{r['share_of_ideal']['torch']:.3f}",
                "ppc/torch": f"{r['ratio']:.4f} +- {r['spread']:.4f}",
                "": "ok" if r["share_of_simulated"] >= SHARE and is_fast(r) else "below",
            }
        )
    return bench.table(rows)


def large(server: ForkServer, folder: Path, repeats: int, steps: int, width: int) -> list[dict]:
    """2 stages x 16 microbatches, F as long as a value's transfer in such a schedule takes just
    then: how fast memory is changes from minute to minute on a shared machine."""
    still = Case(2, 16, "gpipe", 0.0, 0.0, width, pinned=sys.platform == "linux")
    cases = [replace(still, schedule=s, width=w) for s in ("gpipe", "1f1b") for w in (KEPT, width)]
    written = {
        case.name: ours(folder / case.name.replace(" ", "-"), case, steps + SETTLING)
        for case in cases
    }
    found: dict[str, list[dict[str, float]]] = {case.name: [] for case in cases}
    for _ in range(repeats):
        idle = measure(server, folder, still, rounds=5)
        print(
            f"{4 * width / 2**20:.0f} MB from rank to rank: {1e3 * idle.transfer_s:.1f} ms, "
            f"{1e3 * idle.both_ways_s:.1f} ms while others come back",
            flush=True,
        )
        for shape in cases:
            transfer_ms = 1e3 * as_sent(shape, idle).transfer_s
            case = replace(shape, forward_ms=transfer_ms, backward_ms=2 * transfer_ms)
            measured = measure(server, folder, case, rounds=5)
            run, programs = written[case.name]
            run = replace(run, environment=case.environment)
            (step_s,) = bench.alternate(server, {case.name: run}, 1, dropped=SETTLING)[case.name]
            times = {"step_s": step_s, "one_way_s": makespan(programs, measured)}
            times["simulated_s"] = makespan(programs, as_sent(case, measured))
            found[case.name].append(asdict(measured) | times)
    return [large_result(case, found) for case in cases]


def as_sent(case: Case, measured: Measured) -> Measured:
    """With the time of a transfer under such a schedule: 1f1b sends values and gradients at one
    time, and on one machine both directions share its cores and memory."""
    if "1f1b" not in case.schedule:
        return measured
    return replace(measured, transfer_s=measured.both_ways_s)


def large_result(case: Case, found: Mapping[str, list[dict[str, float]]]) -> dict[str, object]:
    """All numbers of a case with large values, or beside one."""
    mine, small = found[case.name], found[replace(case, width=KEPT).name]
    paired = bench.ratios([r["step_s"] for r in mine], [r["step_s"] for r in small])
    return {
        "case": case.name,
        "repeats": mine,
        "share_of_simulated": median(r["simulated_s"] / r["step_s"] for r in mine),
        "share_of_one_way": median(r["one_way_s"] / r["step_s"] for r in mine),
        "over_small": median(paired),
        "spread": bench.spread(paired),
    }


def show_large(results: list[dict]) -> str:
    rows = []
    for r in results:
        at = {name: median(one[name] for one in r["repeats"]) for name in r["repeats"][0]}
        rows.append(
            {
                "case": r["case"],
                "F, B ms": f"{1e3 * at['forward_s']:.1f}, {1e3 * at['backward_s']:.1f}",
                "transfer ms": f"{1e3 * at['transfer_s']:.1f}",
                "both ways": f"{1e3 * at['both_ways_s']:.1f}",
                "simulated": f"{1e3 * at['simulated_s']:.1f}",
                "ppc ms": bench.ms([one["step_s"] for one in r["repeats"]]),
                "share": f"{r['share_of_simulated']:.3f}",
                "one way": f"{r['share_of_one_way']:.3f}",
                "over 4 KB": f"{r['over_small']:.3f} +- {r['spread']:.3f}",
                "": "ok" if is_hidden(r) else "below",
            }
        )
    return bench.table(rows)


def pairs(text: str, separator: str) -> list[tuple[float, float]]:
    return [tuple(map(float, item.split(separator))) for item in text.split(",")]  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="4x16,8x32", help="stages x microbatches")
    parser.add_argument("--times", default="30/60,10/20", help="ms of F / B of a stage")
    parser.add_argument("--schedules", default="gpipe,1f1b")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each side")
    parser.add_argument("--steps", type=int, default=5, help="of a run; the first is dropped")
    parser.add_argument("--large", action="store_true", help="2 x 16 with large values, instead")
    parser.add_argument(
        "--elements", type=int, default=LARGE, help="of a large value, 4 bytes each"
    )
    parser.add_argument("--json", type=Path, help="file for all numbers")
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks/virtual"))
    given = parser.parse_args()
    with bench.start_server() as server:
        if given.large:
            results = large(server, given.folder, given.repeats, given.steps, given.elements)
            print(show_large(results))
        else:
            results = [
                beside_peer(
                    server,
                    given.folder,
                    Case(int(p), int(m), schedule, f, b),
                    given.repeats,
                    given.steps,
                )
                for f, b in pairs(given.times, "/")
                for p, m in pairs(given.shapes, "x")
                for schedule in given.schedules.split(",")
            ]
            print(show(results))
    if given.json:
        given.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
