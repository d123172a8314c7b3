"""The observer sees what a rank did: equal to one process that trains the same model by hand."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ppc.errors import RunError
from ppc.run import observe
from ppc.run.launch import run_forked, run_torchrun

pytestmark = pytest.mark.dist

TWO_RANKS = Path(__file__).parent / "two_ranks"
MICROBATCHES, MICROBATCH_SIZE, STEPS = 3, 4, 4


class Model(nn.Module):
    """What the two scripts compute, in one process."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 2)
        for name, p in self.named_parameters():
            generator = torch.Generator().manual_seed(sum(name.encode()))
            p.data.copy_(torch.randn(p.shape, generator=generator) / 2)

    def forward(self, x, y):
        return F.mse_loss(self.down(torch.tanh(self.up(self.norm(self.embed(x))))), y)


def reference():
    """Initial state, gradients before each step, states after it."""
    model = Model()
    initial = copy.deepcopy(model.state_dict())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, gradients, states = torch.optim.AdamW(trained, lr=0.01), [], []
    for step in range(STEPS):
        draw = [torch.Generator().manual_seed(first + step) for first in (0, 1000)]
        x = torch.randn(MICROBATCHES, MICROBATCH_SIZE, 5, generator=draw[0])
        y = torch.randn(MICROBATCHES, MICROBATCH_SIZE, 2, generator=draw[1])
        for mb in range(MICROBATCHES):
            (model(x[mb], y[mb]) / MICROBATCHES).backward()
        nn.utils.clip_grad_norm_(trained, 0.1)
        gradients.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
        )
        optimizer.step()
        optimizer.zero_grad()
        states.append(copy.deepcopy(model.state_dict()))
    return initial, gradients, states


@pytest.fixture
def scripts(tmp_path):
    return shutil.copytree(TWO_RANKS, tmp_path / "scripts")


def union(dicts):
    """Both ranks' tensors; a name on one rank only."""
    first, second = dicts
    assert not first.keys() & second.keys()
    return {**first, **second}


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], msg=lambda m, n=name: f"{n}: {m}")


def test_recordings_equal_one_process(scripts, tmp_path, fork_server):
    wrapper = observe.wrapper(tmp_path / "seen")
    run_forked(scripts, 2, timeout_s=60, server=fork_server, wrapper=wrapper).check()
    ranks = observe.read(tmp_path / "seen", 2)
    initial, gradients, states = reference()
    assert [rank.rank for rank in ranks] == [0, 1]
    assert_equal(union([rank.initial for rank in ranks]), initial)
    assert [len(rank.steps) for rank in ranks] == [STEPS, STEPS]
    for step in range(STEPS):
        assert_equal(union([rank.steps[step].gradients for rank in ranks]), gradients[step])
        assert_equal(union([rank.steps[step].state for rank in ranks]), states[step])
    assert_equal(union([rank.final for rank in ranks]), states[-1])
    assert "embed.weight" in ranks[0].initial  # frozen: held, but it has no gradient
    assert "embed.weight" not in ranks[0].steps[0].gradients
    assert int(ranks[0].final["norm.num_batches_tracked"]) == STEPS * MICROBATCHES


def test_a_gradient_that_is_off_is_seen(scripts, tmp_path, fork_server):
    script = scripts / "rank1.py"
    faulty = script.read_text().replace("dist.send(x.grad, 0)", "dist.send(1.01 * x.grad, 0)")
    script.write_text(faulty)
    wrapper = observe.wrapper(tmp_path / "seen")
    run_forked(scripts, 2, timeout_s=60, server=fork_server, wrapper=wrapper).check()
    seen = union([rank.steps[0].gradients for rank in observe.read(tmp_path / "seen", 2)])
    expected = reference()[1][0]
    off = {name: (seen[name] / expected[name]).median().item() for name in expected}
    assert off["up.weight"] / off["down.weight"] == pytest.approx(1.01, rel=1e-3)


def test_both_ways_record_the_same_bits_and_the_script_does_the_same(
    scripts, tmp_path, fork_server
):
    forked, torchrun = tmp_path / "forked", tmp_path / "torchrun"
    options = {"timeout_s": 60}
    run_forked(scripts, 2, server=fork_server, wrapper=observe.wrapper(forked), **options).check()
    result = run_torchrun(scripts, 2, wrapper=observe.wrapper(torchrun), **options).check()
    assert "rank 1 | step 3" in result.ranks[1].stdout
    for a, b in zip(observe.read(forked, 2), observe.read(torchrun, 2), strict=True):
        assert a.initial.keys() == b.initial.keys()
        for one, other in zip(a.steps, b.steps, strict=True):
            for name in one.gradients:
                assert torch.equal(one.gradients[name], other.gradients[name]), name
            for name in one.state:
                assert torch.equal(one.state[name], other.state[name]), name
        saved = torch.load(scripts / f"weights-rank{a.rank}.pt")
        for name, tensor in saved.items():
            assert torch.equal(tensor, b.final[name]), name


def run_observed(tmp_path, fork_server, text):
    (tmp_path / "run.py").write_text(text)
    return run_forked(
        tmp_path, 1, timeout_s=20, server=fork_server, wrapper=observe.wrapper(tmp_path / "seen")
    )


def test_a_frozen_stage_without_optimizer_is_recorded(tmp_path, fork_server):
    text = """
import torch
stage = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3, affine=False))
stage.requires_grad_(False)
for _ in range(5):
    stage(torch.ones(2, 3))
"""
    run_observed(tmp_path, fork_server, text).check()
    (rank,) = observe.read(tmp_path / "seen", 1)
    assert rank.steps == ()
    assert torch.equal(rank.initial["0.weight"], rank.final["0.weight"])
    assert int(rank.initial["1.num_batches_tracked"]) == 0
    assert int(rank.final["1.num_batches_tracked"]) == 5


def test_tied_parameters_and_hidden_buffers_are_under_every_name(tmp_path, fork_server):
    text = """
import torch
stage = torch.nn.Module()
stage.a, stage.b = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
stage.b.weight = stage.a.weight
stage.register_buffer("mask", torch.ones(2), persistent=False)
stage.forward = lambda x: stage.b(stage.a(x)) * stage.mask
optimizer = torch.optim.SGD(stage.named_parameters(), lr=0.1)
stage(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""
    run_observed(tmp_path, fork_server, text).check()
    (rank,) = observe.read(tmp_path / "seen", 1)
    assert rank.initial.keys() == {"a.weight", "b.weight", "mask"}
    assert torch.equal(rank.final["a.weight"], rank.final["b.weight"])
    assert not torch.equal(rank.initial["a.weight"], rank.final["a.weight"])


def test_what_was_seen_before_an_error_is_kept(tmp_path, fork_server):
    text = """
import torch
stage = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(stage.named_parameters(), lr=0.1)
for step in range(3):
    stage(torch.ones(1, 1)).sum().backward()
    optimizer.step()
raise ValueError("at the third step")
"""
    result = run_observed(tmp_path, fork_server, text)
    assert "at the third step" in result.explain()
    (rank,) = observe.read(tmp_path / "seen", 1)
    assert len(rank.steps) == 3
    assert [step.gradients["weight"].item() for step in rank.steps] == [1, 2, 3]


def test_an_optimizer_without_names_is_refused(tmp_path, fork_server):
    text = """
import torch
stage = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
stage(torch.ones(1, 1)).sum().backward()
optimizer.step()
"""
    result = run_observed(tmp_path, fork_server, text)
    assert "hint: give it stage.named_parameters()" in result.explain()


def test_a_missing_recording_is_named(tmp_path):
    with pytest.raises(RunError, match="rank 0 of 2 left no recording"):
        observe.read(tmp_path, 2)
