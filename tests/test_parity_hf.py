"""Models of transformers train in stages as they do in one process; scripts do not import it."""

import re
from pathlib import Path
from unittest.mock import patch

import pytest
from hf import CASES, spec_of
from jobs import make_spec, prove

from ppc.emit.write import write
from ppc.errors import CaptureError
from ppc.frontend.capture.capture import capture

pytestmark = pytest.mark.dist


def check(folder: Path, server, name: str, args, stages: int) -> None:
    spec = spec_of(folder, name, args, pipeline=stages, schedule="gpipe" if stages == 2 else "1f1b")
    with patch("ppc.run.verify.write", wraps=write) as written:
        prove(spec, server, exact=CASES[name].exact)
    (files, _), _ = written.call_args
    scripts = [str(file.text) for file in files if file.path.startswith("rank")]
    assert len(scripts) == stages
    assert not any(re.search(r"^(import|from) transformers", s, re.MULTILINE) for s in scripts)


@pytest.mark.parametrize("name", ["t5", "clip"])
def test_a_model(tmp_path, fork_server, name):
    check(tmp_path, fork_server, name, CASES[name].dropout, stages=3)


def test_clip_is_refused_unless_the_spec_accepts_it(tmp_path):
    spec = spec_of(tmp_path, "clip", coupled="refuse")
    with pytest.raises(CaptureError) as raised:
        capture(spec)
    assert str(raised.value).endswith(
        "f32[batch, batch] pairs the samples of a microbatch with each other, so several "
        "microbatches do not add up to their global batch\nhint: parallel: {microbatches: 1}; or "
        "model: {coupled: accept}, and the loss of each microbatch is that of its own samples alone"
    )
    assert "modeling_clip.py:" in str(raised.value.where)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3])
def test_clip_in_one_microbatch(tmp_path, fork_server, stages):
    spec = spec_of(tmp_path, "clip", coupled="refuse", pipeline=stages, microbatches=1)
    found = prove(spec, fork_server)
    assert "whole" in {row.kind for row in found.rows}


grid = [
    (name, args, stages)
    for name, case in CASES.items()
    for args in ({}, case.dropout)
    for stages in (2, 3)
    if args is not None
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "args", "stages"),
    grid,
    ids=[f"{n}-{'drop' if a else 'plain'}-{s}" for n, a, s in grid],
)
def test_every_model(tmp_path, fork_server, name, args, stages):
    check(tmp_path, fork_server, name, args, stages)


COHERE = """
from transformers import CohereConfig, CohereForCausalLM

def build():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_qk_norm": True}
    tokens = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return CohereForCausalLM(CohereConfig(num_hidden_layers=2, **sizes, **heads, **tokens))
"""


@pytest.mark.slow
def test_float32_inside(tmp_path, fork_server):
    """Heads that share a key add up its gradient in another order, and a norm in float32 makes a
    difference of 1e-11 of a last bit."""
    tokens = {"shape": [12], "dtype": "int64", "high": 60}
    spec = make_spec(
        tmp_path,
        COHERE,
        model={"loss": "output"},
        data={"source": "random", "samples": 16, "fields": {"input_ids": tokens, "labels": tokens}},
        train={"global_batch": 8, "optimizer": {"name": "adamw", "lr": 1e-3}},
        cluster={"devices_per_node": 2},
        parallel={"pipeline": 2, "microbatches": 4},
    )
    prove(spec, fork_server)
