"""Small models of transformers by name, and their specs: tests and docs/models.py share them."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ppc.frontend.load import load
from ppc.ir.spec import Spec

MODELS = Path(__file__).parents[1] / "specs" / "models"


@dataclass(frozen=True)
class Case:
    """A model and what feeds it."""

    factory: str
    args: Mapping[str, object]
    fields: Mapping[str, object]
    loss: str = "output"
    inputs: tuple[str, ...] = ()
    """By default all fields."""
    dropout: Mapping[str, object] | None = None
    """Arguments with which it draws at random; None where it never does."""
    coupled: str = "refuse"
    exact: bool = True
    """Whether it computes in float64 throughout, where it is told to."""


def ids(*shape: int, high: int = 64) -> dict[str, object]:
    return {"shape": list(shape), "dtype": "int64", "high": high}


def numbers(*shape: int) -> dict[str, object]:
    return {"shape": list(shape)}


TOKENS = {"input_ids": ids(16), "labels": ids(16)}
IMAGES = {"pixel_values": numbers(3, 16, 16), "labels": ids(high=8)}
DEEP = {"layers": 3}
SMALL = DEEP | {"width": 32, "vocab": 64, "context": 16}
DROPOUT = {"dropout": 0.1}
CASES = {
    "gpt2": Case("hf:build_gpt2", SMALL, TOKENS, dropout=DROPOUT),
    "llama": Case("hf:build_llama", SMALL, TOKENS),
    "qwen3": Case("hf_language:build_qwen3", SMALL, TOKENS, dropout=DROPOUT),
    "mixtral": Case("hf_language:build_mixtral", SMALL, TOKENS, dropout=DROPOUT),
    "bert": Case("hf_language:build_bert", SMALL, TOKENS, dropout=DROPOUT),
    "t5": Case(
        "hf_language:build_t5", {}, {"input_ids": ids(12), "labels": ids(8)}, dropout=DROPOUT
    ),
    "vit": Case("hf_perception:build_vit", DEEP, IMAGES, dropout=DROPOUT),
    "resnet": Case(
        "hf_perception:build_resnet",
        {"widths": [8, 16, 32], "depths": [1, 2, 2]},
        {"pixel_values": numbers(3, 32, 32), "labels": ids(high=8)},
    ),
    "clip": Case(
        "hf_perception:build_clip",
        {},
        {"input_ids": ids(8), "pixel_values": numbers(3, 16, 16)},
        loss="models/hf_perception.py:clip_loss",
        inputs=("input_ids", "pixel_values"),
        coupled="accept",
    ),
    "whisper": Case(
        "hf_perception:build_whisper",
        {},
        {"input_features": numbers(8, 32), "labels": ids(8)},
        dropout=DROPOUT,
    ),
    "mamba": Case("hf_language:build_mamba", DEEP | {"residual_in_fp32": False}, TOKENS),
    "dinov2": Case(
        "hf_perception:build_dinov2", DEEP, IMAGES, dropout=DROPOUT | {"drop_path": 0.1}
    ),
}


def spec_of(
    folder: Path,
    name: str,
    args: Mapping[str, object] | None = None,
    *,
    coupled: str | None = None,
    model: Mapping[str, object] | None = None,
    **parallel: object,
) -> Spec:
    """The spec of a case: 8 samples a step in 4 microbatches, on as many CPUs as it has ranks."""
    case = CASES[name]
    file, _, function = case.factory.partition(":")
    parallel = {"pipeline": 2, "microbatches": 4} | parallel
    ranks = int(parallel["pipeline"]) * int(parallel.get("data", 1))  # type: ignore[call-overload]
    tree = {
        "name": name,
        "model": {
            "factory": f"models/{file}.py:{function}",
            "args": dict(case.args) | dict(args or {}),
            "inputs": {field: field for field in case.inputs or case.fields},
            "loss": case.loss,
            "coupled": coupled or case.coupled,
        }
        | dict(model or {}),
        "data": {"source": "random", "samples": 24, "fields": dict(case.fields)},
        "train": {"global_batch": 8, "steps": 3, "optimizer": {"name": "adamw", "lr": 0.001}},
        "cluster": {"devices_per_node": ranks, "device": "cpu"},
        "parallel": parallel,
    }
    shutil.copytree(MODELS, folder / "models", dirs_exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(tree))
    return load(path)
