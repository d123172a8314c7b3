"""The reference run equals a loop written by hand, in all that a spec can ask of it."""

import copy
import math
import zlib

import pytest
import torch
import torch.nn.functional as F
from jobs import make_spec
from torch import nn

from ppc.errors import CaptureError, RunError
from ppc.frontend.capture.build import build_model
from ppc.frontend.capture.capture import capture
from ppc.frontend.capture.schema import draws
from ppc.frontend.samples import read_samples, samples_of_step
from ppc.passes.segment import segment
from ppc.run.reference import Followed, run_reference
from ppc.run.weights import check_recipes, full_state, replay_weights

pytestmark = pytest.mark.torch

SEED = 5
NET = """
import torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return x + F.dropout(self.drop(self.up(x)), 0.25)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.1)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.constant_(module.bias, 0.25)

    def forward(self, tokens):
        x = F.dropout(self.embed(tokens), 0.1)
        x = self.norm(self.frozen(x).tanh())
        for block in self.blocks:
            x = block(x)
        return self.head(F.dropout(x, 0.3))

def build():
    return Net()
"""
DATA = {
    "source": "random",
    "samples": 11,
    "fields": {
        "tokens": {"dtype": "int64", "high": 11},
        "labels": {"dtype": "int64", "high": 11},
    },
}


def net_spec(folder, **train):
    train = {"global_batch": 6, "steps": 5, "seed": SEED, "optimizer": "adamw", **train}
    return make_spec(folder, NET, model={"loss": "cross_entropy"}, data=DATA, train=train)


def generator(key):
    return torch.Generator().manual_seed(zlib.crc32(key.encode()))


def by_hand(steps, make_optimizer, lr, clip=None, dtype=torch.float32):
    """The same training without the compiler: results, gradients and states by step."""
    namespace = {"torch": torch, "nn": nn}
    exec(NET, namespace)  # noqa: S102
    model = namespace["build"]().to(dtype)
    for name, p in model.named_parameters():
        if p.dim() == 2:
            p.data.copy_(
                torch.empty(p.shape).normal_(0, 0.1, generator=generator(f"{SEED} {name} 0"))
            )
    optimizer, run = make_optimizer(model.parameters()), []
    for step in range(steps):
        epoch, index = divmod(step, 2)
        order = torch.randperm(11, generator=generator(f"{SEED} epoch {epoch}")).tolist()
        batch = order[:6] if index == 0 else order[6:]
        total = 0.0
        for number, part in enumerate((batch[:3], batch[3:])):
            tokens, labels = (
                torch.cat(
                    [torch.randint(11, (1,), generator=generator(f"{SEED} {f} {j}")) for j in part]
                )
                for f in ("tokens", "labels")
            )
            loss = F.cross_entropy(forward(model, tokens, f"{SEED} {step} {number}"), labels)
            (loss * len(part) / len(batch)).backward()
            total += loss.item() * len(part) / len(batch)
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results = {"loss": total}
        if clip:
            norm = results["gradient_norm"] = math.sqrt(
                sum(g.double().square().sum().item() for g in gradients.values())
            )
            for gradient in gradients.values():
                gradient.mul_(min(1.0, clip / (norm + 1e-6)))
        gradients = {n: g.clone() for n, g in gradients.items()}
        for group in optimizer.param_groups:
            group["lr"] = lr(step)
        optimizer.step()
        optimizer.zero_grad()
        run.append((results, gradients, {n: t.clone() for n, t in model.state_dict().items()}))
    return run


def forward(model, tokens, key):
    def seed(layer):
        torch.manual_seed(zlib.crc32(f"{key} {layer}".encode()))

    x = model.embed(tokens)
    seed("")
    x = model.norm(model.frozen(F.dropout(x, 0.1)).tanh())
    for i, block in enumerate(model.blocks):
        seed(f"blocks.{i}")
        x = block(x)
    seed("#1")
    return model.head(F.dropout(x, 0.3))


def assert_same(trace, run, tolerance=2e-4):
    assert len(trace.results) == len(trace.steps) == len(run)
    for results, step, (expected, gradients, state) in zip(
        trace.results, trace.steps, run, strict=True
    ):
        assert results == pytest.approx(expected, rel=tolerance)
        assert step.gradients.keys() == {*gradients, "head.weight"}
        assert torch.equal(step.gradients["head.weight"], step.gradients["embed.weight"])
        assert step.state.keys() == state.keys()
        pairs = [(n, step.gradients[n], g) for n, g in gradients.items()]
        for name, found, wanted in (*pairs, *((n, step.state[n], t) for n, t in state.items())):
            assert torch.allclose(found, wanted, rtol=tolerance, atol=tolerance), name


def adamw(parameters):
    return torch.optim.AdamW(parameters, betas=(0.9, 0.99), eps=1e-5, weight_decay=0.1)


ADAMW = {"name": "adamw", "lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-5, "weight_decay": 0.1}


def test_dropout_tied_weights_frozen_layers_and_a_short_last_batch(tmp_path):
    spec = net_spec(tmp_path, optimizer=ADAMW)
    trace = run_reference(spec, segment(capture(spec)))
    assert trace.untrue == {}
    assert_same(trace, by_hand(5, adamw, lambda _: 0.01))
    last = trace.steps[-1]
    assert torch.equal(last.state["frozen.weight"], trace.initial["frozen.weight"])
    assert torch.equal(last.state["unused.weight"], trace.initial["unused.weight"])
    assert not last.gradients.keys() & {"frozen.weight", "unused.weight"}
    assert int(last.state["norm.num_batches_tracked"]) == 10


def test_clipping_counts_a_tied_gradient_once(tmp_path):
    spec = net_spec(tmp_path, optimizer=ADAMW, clip_norm=0.05)
    trace = run_reference(spec, segment(capture(spec)), steps=2)
    assert_same(trace, by_hand(2, adamw, lambda _: 0.01, clip=0.05))
    once = [g for n, g in trace.steps[1].gradients.items() if n != "head.weight"]
    assert nn.utils.get_total_norm(once).item() == pytest.approx(0.05, rel=1e-3)


def test_float64(tmp_path):
    spec = net_spec(
        tmp_path, optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9}, precision="fp64"
    )
    trace = run_reference(spec, segment(capture(spec)), steps=2)
    run = by_hand(2, lambda p: torch.optim.SGD(p, momentum=0.9), lambda _: 0.1, dtype=torch.float64)
    assert_same(trace, run, tolerance=1e-12)


COURSES = {  # of lr, by step
    "constant": (0.5, 1, 1, 1, 1),
    "linear": (0.5, 1, 1, 1 - 0.8 / 3, 1 - 0.8 * 2 / 3),
    "cosine": (0.5, 1, 1, 0.2 + 0.8 * 0.75, 0.2 + 0.8 * 0.25),
}


@pytest.mark.parametrize("name", COURSES)
def test_the_course_of_the_learning_rate(tmp_path, name):
    course = {"name": name, "warmup": 2} | ({} if name == "constant" else {"final": 0.2})
    optimizer = {"name": "sgd", "lr": 0.05, "weight_decay": 0.01}
    spec = net_spec(tmp_path, optimizer=optimizer, lr_schedule=course)
    trace = run_reference(spec, segment(capture(spec)))
    hand = by_hand(
        5, lambda p: torch.optim.SGD(p, weight_decay=0.01), lambda step: 0.05 * COURSES[name][step]
    )
    assert_same(trace, hand)


def test_a_microbatch_without_samples_is_left_out(tmp_path):
    data = {"source": "random", "samples": 5, "fields": {"x": {"shape": [5]}, "y": {"shape": [1]}}}
    spec = make_spec(tmp_path, data=data, train={"steps": 2}, parallel={"microbatches": 3})
    trace = run_reference(spec, segment(capture(spec)))  # 4 samples, then 1 for 3 microbatches
    state, order = trace.steps[0].state, torch.randperm(5, generator=generator("0 epoch 0"))
    last = int(order[4])
    x = torch.randn(5, generator=generator(f"0 x {last}"))
    y = torch.randn(1, generator=generator(f"0 y {last}"))
    expected = F.mse_loss(F.linear(x, state["weight"], state["bias"]), y)
    assert trace.results[1] == pytest.approx({"loss": expected.item()}, rel=1e-6)


def test_following_another_run_each_step_starts_from_its_weights(tmp_path):
    spec = net_spec(tmp_path, optimizer=ADAMW)
    graph = segment(capture(spec))
    free = run_reference(spec, graph)
    done = [Followed(step.gradients, (step.state,)) for step in free.steps]
    same = run_reference(spec, graph, follow=done)
    assert same.results == free.results
    other = copy.deepcopy(done)
    other[1].gradients["blocks.0.up.weight"].mul_(3)
    other[1].states[0]["norm.running_mean"] += 1
    other[1].states[0]["blocks.1.up.weight"] += 1
    trace = run_reference(spec, graph, follow=other)
    assert trace.results[:2] == free.results[:2]
    assert trace.results[2] != free.results[2]
    name = "blocks.0.up.weight"  # its own gradient, but the step that the other's makes
    assert torch.equal(trace.steps[1].gradients[name], free.steps[1].gradients[name])
    parameter = nn.Parameter(free.initial[name].clone())
    optimizer = adamw([parameter])
    for step, gradients in enumerate((free.steps[0].gradients, other[1].gradients)):
        optimizer.param_groups[0]["lr"] = 0.01
        parameter.grad = gradients[name]
        optimizer.step()
        if step == 0:
            parameter.data = other[0].states[0][name].clone()
    assert torch.allclose(trace.steps[1].state[name], parameter, rtol=1e-6, atol=1e-7)
    mean = trace.steps[2].state["norm.running_mean"] - free.steps[2].state["norm.running_mean"]
    assert mean.mean().item() == pytest.approx(0.9**2, abs=0.05)  # 1, after two microbatches


def test_each_replica_has_its_own_buffers(tmp_path):
    """Microbatches 0 and 2 are replica 0's, 1 and 3 replica 1's."""
    code = "def build():\n    return nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 1))\n"
    spec = make_spec(
        tmp_path,
        code,
        train={"global_batch": 8},
        cluster={"devices_per_node": 2},
        parallel={"data": 2},
    )
    trace = run_reference(spec, segment(capture(spec)), steps=1)
    x, _ = read_samples(spec).batch(samples_of_step(spec, 10, 0), ["x", "y"], 0)
    for replica, buffers in enumerate(trace.buffers[0]):
        norm = nn.BatchNorm1d(5)
        for part in x.tensor_split(4)[replica::2]:
            norm(part)
        for name, tensor in norm.named_buffers():
            assert torch.equal(buffers[f"0.{name}"], tensor)
    assert torch.equal(
        trace.steps[0].state["0.running_mean"], trace.buffers[0][0]["0.running_mean"]
    )


def test_it_leaves_torch_as_it_was(tmp_path):
    spec = make_spec(tmp_path)
    graph = segment(capture(spec))
    torch.manual_seed(1)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    run_reference(spec, graph, steps=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("body", "drawn"),
    [
        ("self.drop(x) + F.scaled_dot_product_attention(x, x, x, dropout_p=0.2)", 2),
        ("drop(self.mid(drop(F.scaled_dot_product_attention(x, x, x))))", 2),
        ("drop(self.mid(drop(F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False))))", 2),
        ("F.rrelu(self.mid(x), training=True)", 1),
        ("torch.randn_like(x) + self.many(x, x, x)[0]", 2),
    ],
)
def test_random_layers_are_met_in_the_users_model(tmp_path, body, drawn):
    """Operations that only can draw are not counted, those that do are, however they are spelt."""
    code = f"""
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.many = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)
        self.mid = nn.Linear(4, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        drop = F.dropout
        x = {body}
        return self.out(x)

def build():
    return Net()
"""
    data = {
        "source": "random",
        "samples": 8,
        "fields": {"x": {"shape": [3, 4]}, "y": {"shape": [3, 1]}},
    }
    spec = make_spec(tmp_path, code, data=data)
    graph = segment(capture(spec))
    assert sum(op.random for op in graph.ops) == drawn
    first, second = (run_reference(spec, graph, steps=2) for _ in range(2))
    assert first.results == second.results
    torch.manual_seed(99)
    assert run_reference(spec, graph, steps=2).results == first.results


@pytest.mark.parametrize(
    ("op", "arguments", "expected"),
    [
        (torch.ops.aten.rrelu_with_noise.default, {"training": False}, False),
        (torch.ops.aten.rrelu_with_noise.default, {"training": True}, True),
        (torch.ops.aten.rrelu_with_noise.default, {}, False),
        (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, {}, False),
        (torch.ops.aten.bernoulli_.float, {"p": 0.0}, True),
    ],
)
def test_which_operations_draw(op, arguments, expected):
    assert draws(op, (), arguments) == expected


def test_randomness_that_the_graph_does_not_have_as_the_model_has_is_an_error(tmp_path):
    code = """
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x):
        x = F.dropout(x, 1.0)
        return self.b(F.dropout(self.a(x), 0.5))

def build():
    return Net()
"""
    spec = make_spec(tmp_path, code)
    with pytest.raises(RunError, match=r"graph: \['', '#1'\]; met in the model: \[''\]"):
        run_reference(spec, segment(capture(spec)))  # dropout of everything draws nothing


def test_an_error_in_the_users_forward_is_at_the_users_line(tmp_path):
    code = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(5), nn.Linear(5, 1)

    def forward(self, x):
        return self.out(self.norm(x))

def build():
    return Net()
"""
    spec = make_spec(tmp_path, code, parallel={"microbatches": 4})
    graph = segment(capture(spec))
    with pytest.raises(CaptureError, match=r"net.py:11: step 0, microbatch 0: .*more than 1 value"):
        run_reference(spec, graph)


def test_recipes_that_are_not_the_models_are_found(tmp_path):
    code = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(40, 40)
        nn.init.constant_(self.wide.bias, 0.5)
        self.register_buffer("table", torch.arange(4.0) / 3, persistent=False)

    def forward(self, x):
        return self.wide(x) + self.table[3]

def build():
    return Net()
"""
    data = {
        "source": "random",
        "samples": 8,
        "fields": {"x": {"shape": [40]}, "y": {"shape": [40]}},
    }
    spec = make_spec(tmp_path, code, data=data)
    graph = segment(capture(spec))
    real = full_state(build_model(spec))
    values = replay_weights(graph, 0, saved={})
    assert check_recipes(graph, real, values) == {}
    other_seed = replay_weights(graph, 1, saved={})
    assert not torch.equal(other_seed["wide.weight"], values["wide.weight"])
    assert check_recipes(graph, real, other_seed) == {}
    for name, wrong, note in (
        ("wide.bias", values["wide.bias"] + 0.01, "off by 0.01"),
        ("table", values["table"].double(), "the model has torch.float32"),
        ("wide.weight", values["wide.weight"] * 1.5, "standard deviation differs"),
        ("wide.weight", values["wide.weight"] + 0.1, "mean differs"),
    ):
        found = check_recipes(graph, real, values | {name: wrong})
        assert found.keys() == {name}
        assert note in found[name]
