"""Random models, cut anywhere: the text computes what the model does, and is formatted."""

import json

import pytest
from emitted import emit
from formatted import unformatted
from jobs import make_spec
from models_random import random_cuts, random_model

from ppc import pipeline
from ppc.errors import CaptureError, PlanError
from ppc.frontend.capture.capture import capture
from ppc.frontend.load import load
from ppc.passes.segment import segment

pytestmark = pytest.mark.torch


def compile_at_random_cuts(seed: int, folder, monkeypatch) -> None:
    data = {"source": "random", "samples": 12, "fields": {"x": {"shape": [4, 6]}}}
    given = {"model": {"loss": "output"}, "data": data, "train": {"precision": "fp64"}}
    spec = make_spec(folder, random_model(seed), **given)
    graph = capture(spec)
    layers = [p for p in dict.fromkeys(layer.path for layer in segment(graph).layers) if p]
    monkeypatch.setattr(pipeline, "capture", lambda _: graph)
    for number, cuts in enumerate(random_cuts(layers, seed)):
        tree = json.loads(spec.path.read_text())
        tree["parallel"] |= {"pipeline": len(cuts) + 1, "cuts": cuts}
        tree["parallel"]["schedule"] = ("gpipe", "1f1b")[number % 2]
        tree["cluster"]["devices_per_node"] = len(cuts) + 1
        spec.path.write_text(json.dumps(tree))
        try:
            emitted = emit(load(spec.path))
        except PlanError:  # a module that begins where the one around it does
            continue
        except CaptureError as error:
            if not error.message.startswith("the model fails on a microbatch"):
                raise
            pytest.skip("torch itself cannot train this model")
        target = folder / "scripts" / str(number)
        target.mkdir(parents=True)
        for rank, script in enumerate(emitted.scripts):
            (target / f"rank{rank}.py").write_text(script)
    assert unformatted(folder / "scripts") == []


@pytest.mark.parametrize("seed", range(40))
def test_random_model(seed, tmp_path, monkeypatch):
    compile_at_random_cuts(seed, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40, 400))
def test_many_random_models(seed, tmp_path, monkeypatch):
    compile_at_random_cuts(seed, tmp_path, monkeypatch)
