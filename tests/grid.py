"""A grid of workloads and layouts, and `ppc verify --exact` of one row of it."""

from itertools import product
from unittest.mock import patch

from jobs import prove, vary
from programs import remembering

from ppc import pipeline
from ppc.run.reference import run_reference

STEPS = 3
TOKENS = {"shape": [8], "dtype": "int64", "high": 32}
WORDS = {"source": "random", "samples": 20, "fields": {"tokens": TOKENS, "labels": TOKENS}}
LABEL = {"shape": [], "dtype": "int64", "high": 10}
IMAGES = {"samples": 20, "fields": {"images": {"shape": [3, 16, 16]}, "labels": LABEL}}
VOLUMES = {
    "samples": 20,
    "fields": {
        "volumes": {"shape": [1, 8, 8, 8]},
        "labels": {"shape": [8, 8, 8], "dtype": "int64", "high": 3},
    },
}
GPT = {"layers": 3, "width": 16, "heads": 2, "context": 8, "vocab": 32}
MODELS = {
    "gpt": ("gpt_tied", GPT | {"tied": False}, WORDS, ["blocks"]),
    "gpt_tied": ("gpt_tied", GPT | {"tied": True}, WORDS, ["blocks"]),
    "resnet18": ("resnet18", {"width": 4}, IMAGES, ["layer1", "layer3"]),
    "lstm": (
        "lstm",
        {"width": 16, "vocab": 32},
        WORDS | {"files": None, "sequence": None},
        ["layers"],
    ),
    "dlrm": ("dlrm", {}, {"samples": 20}, ["top", "bottom"]),
    "frozen": ("frozen", {}, IMAGES, ["head"]),
    "unet3d": ("unet3d", {"levels": 2}, VOLUMES, ["encoders", "ups"]),
}
"""Model -> its spec, smaller arguments, data, and the modules to compute again."""
DROPS = ("gpt", "gpt_tied", "lstm")
"""Models with dropout."""
EVERY_LAYOUT = ("gpt_tied", "resnet18", "unet3d")
"""Models that take every layout: tied weights and dropout, batch norms, skips over stages. The
others are in rows that have every pair."""
FACTORS = {
    "model": tuple(MODELS),
    "stages": (1, 2, 3, 4),
    "schedule": ("gpipe", "1f1b"),
    "microbatches": (1, 3, 8),
    "replicas": (1, 2),
    "recompute": ("none", "stage", "layers"),
    "dropout": (0.0, 0.1),
    "last_batch": ("keep", "drop"),
}
"""20 samples in batches of 16: the last has 4, so that of 8 microbatches some are empty."""


def allowed(row):
    return row["model"] in DROPS or not row["dropout"]


def check(folder, server, row):
    name, args, data, modules = MODELS[row["model"]]
    args = args | ({"dropout": row["dropout"]} if row["model"] in DROPS else {})
    recompute = modules if row["recompute"] == "layers" else row["recompute"]
    parallel = {
        "pipeline": row["stages"],
        "schedule": row["schedule"],
        "microbatches": row["microbatches"],
        "data": row["replicas"],
        "recompute": recompute,
    }
    data = data | {"last_batch": row["last_batch"]}
    train = {"global_batch": 16, "steps": STEPS, "epochs": None, "lr_schedule": "constant"}
    train["optimizer"] = {"name": "sgd", "lr": 0.05, "momentum": 0.9}
    spec = vary(folder, name, args, data=data, train=train, parallel=parallel)
    try:
        prove(spec, server)
    except Exception as error:
        error.add_note(f"the row {named(row)}")
        raise


def named(row):
    return "-".join(map(str, row.values()))


def referring():
    """The user's model trains once for each way to make microbatches: no layout changes that."""
    traces = {}

    def once(spec, *arguments, **more):
        key = spec.parallel.microbatches, spec.parallel.data, spec.data.last_batch
        if key not in traces:
            traces[key] = run_reference(spec, *arguments, **more)
        return traces[key]

    return patch("ppc.run.verify.run_reference", once)


def check_every_layout(folder, server, model, tell):
    """Of a model, with dropout and without. Scripts that run need no comparison at compile time."""
    for dropout in FACTORS["dropout"][: 1 + (model in DROPS)]:
        given = FACTORS | {"model": (model,), "dropout": (dropout,)}
        rows = [dict(zip(given, values, strict=True)) for values in product(*given.values())]
        with remembering(), referring(), patch.object(pipeline, "check_text", lambda *_: None):
            for number, row in enumerate(rows):
                check(folder, server, row)
                if number % 48 == 47:
                    tell(f"{model}, dropout {dropout}: {number + 1} of {len(rows)} layouts")
