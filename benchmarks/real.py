"""Real models on the emitted scripts and on what one would write with torch alone: a GPT and a
ResNet, each process on one thread.

    python benchmarks/real.py

one        one process, beside a loop that accumulates gradients over the same microbatches
pipeline   2 stages in 1F1B order, beside torch.distributed.pipelining with the same cut
data       2 replicas, beside DistributedDataParallel

Samples are read in the same way, the optimizer is the same, a step is taken from the end of one to
the end of the next. Runs alternate; printed are the ratios of neighbours: their median, and the
distance of their quartiles. Run it on a machine that does nothing else.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import bench
import numpy as np
from ruamel.yaml import YAML

from ppc.run.launch import ForkServer

SPECS = bench.HERE.parent / "specs"
LIMITS = {"one": 1.02, "pipeline": 1.0, "data": 1.0}
PEERS = {"one": "eager", "pipeline": "pipeline", "data": "ddp"}
CUTS = {"gpt": "blocks.2", "resnet": "layer3"}
SPEC_OF = {"gpt": "quickstart", "resnet": "resnet18"}
WIDTH = 32  # of the ResNet
MICROBATCHES = 8


def make_tree(model: str, way: str, steps: int) -> dict:
    """The spec of specs/ for this benchmark: without clipping and schedules of the rate."""
    tree = YAML(typ="safe").load(SPECS / f"{SPEC_OF[model]}.yaml")
    train = tree["train"]
    ranks = 1 if way == "one" else 2
    parallel = {"pipeline": ranks if way != "data" else 1, "microbatches": MICROBATCHES}
    if way == "pipeline":
        parallel |= {"schedule": "1f1b", "cuts": [CUTS[model]]}
    if way == "data":
        parallel["data"] = 2
    if model == "resnet":
        tree["model"]["args"] = {"width": WIDTH}
        files = {name: f"{name}.npy" for name in ("images", "labels")}
        tree["data"] = {"source": "arrays", "files": files, "last_batch": "drop"}
    return {
        "name": f"{model}-{way}",
        "model": tree["model"],
        "data": tree["data"],
        "train": {
            "global_batch": 32,
            "steps": steps,
            "optimizer": train["optimizer"],
            "precision": "fp32",
        },
        "cluster": {"devices_per_node": ranks, "device": "cpu"},
        "parallel": parallel,
    }


def write_inputs(folder: Path) -> None:
    """Models and arrays beside the specs."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(SPECS / "models", folder / "models", dirs_exist_ok=True)
    rng = np.random.default_rng(0)
    np.save(folder / "images.npy", rng.standard_normal((256, 3, 32, 32), np.float32))
    np.save(folder / "labels.npy", rng.integers(0, 10, 256))


def make_sides(model: str, way: str, folder: Path, steps: int) -> dict[str, bench.Run]:
    """Both sides of a comparison."""
    tree = make_tree(model, way, steps)
    path = bench.write_spec(folder / f"{tree['name']}.yaml", tree)
    run, _ = bench.compile_ours(path, folder / tree["name"], {})
    settings = {
        "model": model,
        "args": tree["model"].get("args", {}),
        "data": str(folder.resolve()),
        "global_batch": tree["train"]["global_batch"],
        "microbatches": MICROBATCHES,
        "schedule": "1f1b",
        "steps": steps,
    }
    module = SPECS / "models" / f"{model}.py"
    peer = bench.write_peer(
        PEERS[way], folder / f"{tree['name']}-peer", run.ranks, settings, {}, [module]
    )
    shutil.copy(bench.HERE / "peers" / "real_stages.py", peer.folder / "stages.py")
    return {"torch": peer, "ppc": run}


def compare(server: ForkServer, model: str, way: str, folder: Path, pairs: int, steps: int) -> dict:
    """The numbers of one comparison."""
    print(f"{model}, {way}", flush=True)
    sides = make_sides(model, way, folder, steps)
    found = bench.alternate(server, sides, pairs, dropped=2)
    paired = bench.ratios(found["ppc"], found["torch"])
    return {
        "case": f"{model} {way}",
        "steps_s": found,
        "ratios": paired,
        "ratio": median(paired),
        "spread": bench.spread(paired),
        "limit": LIMITS[way],
    }


def show(results: list[Mapping]) -> str:
    return bench.table(
        [
            {
                "case": r["case"],
                "ppc ms": bench.ms(r["steps_s"]["ppc"]),
                "torch ms": bench.ms(r["steps_s"]["torch"]),
                "ppc/torch": f"{r['ratio']:.4f} +- {r['spread']:.4f}",
                "at most": f"{r['limit']:.2f} + spread",
                "": "ok" if r["ratio"] <= r["limit"] + r["spread"] else "slower",
            }
            for r in results
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="gpt,resnet")
    parser.add_argument("--ways", default="one,pipeline,data")
    parser.add_argument("--pairs", type=int, default=11, help="runs of each side")
    parser.add_argument("--steps", type=int, default=10, help="of a run; the first two are dropped")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks/real"))
    given = parser.parse_args()
    write_inputs(given.folder)
    with bench.start_server() as server:
        results = [
            compare(server, model, way, given.folder, given.pairs, given.steps)
            for way in given.ways.split(",")
            for model in given.models.split(",")
        ]
    print(show(results))
    if given.json:
        given.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
