"""The models of specs/models are ordinary user code: small, and they train outside ppc."""

import importlib.util
import inspect
import re
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from ppc.frontend.capture.loss import cross_entropy
from ppc.frontend.load import load as load_spec

pytestmark = pytest.mark.torch

SPECS = Path(__file__).parent.parent / "specs"
MODELS = SPECS / "models"


def load(name):
    spec = importlib.util.spec_from_file_location(name, MODELS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    known = set(sys.modules)
    with patch.object(sys, "path", [str(MODELS), *sys.path]):  # for what it imports beside it
        spec.loader.exec_module(module)
    for beside in set(sys.modules) - known:  # other folders have files of these names
        if beside in {path.stem for path in MODELS.glob("*.py")}:
            del sys.modules[beside]
    return module


def tokens(*shape):
    return torch.randint(256, shape)


def language_model(name, **args):
    module = load(name)
    model = module.build(**args)
    return model, module.loss(model(tokens(2, 16)), tokens(2, 16))


def gpt():
    return language_model("gpt", layers=2, width=32, context=16, dropout=0.1)


def lstm():
    return language_model("lstm", width=32, dropout=0.1)


def resnet():
    model = load("resnet").build(width=8)
    return model, F.cross_entropy(model(torch.randn(2, 3, 32, 32)), torch.randint(10, (2,)))


def unet3d():
    model = load("unet3d").build(width=4, levels=2)
    labels = torch.randint(3, (2, 8, 8, 8))
    return model, F.cross_entropy(model(torch.randn(2, 1, 8, 8, 8)), labels)


def dlrm():
    module = load("dlrm")
    model = module.build(tables=(50, 40, 30))
    logits = model(torch.randn(4, 13), torch.randint(30, (4, 3, 2)))
    return model, module.loss(logits, torch.randint(2, (4,)))


def frozen():
    model = load("frozen").build()
    return model, F.cross_entropy(model(torch.randn(2, 3, 32, 32)), torch.randint(10, (2,)))


def flip():
    module = load("flip")
    model = module.build()
    return model, module.loss(model(torch.randn(4, 3, 16, 16), torch.randint(64, (4, 8))))[0]


def hf_language(name, **args):
    model = getattr(load("hf_language"), f"build_{name}")(layers=2, **args)
    ids = torch.randint(64, (2, 8))
    return model, model(input_ids=ids, labels=ids).loss


def hf_images(name):
    model = getattr(load("hf_perception"), f"build_{name}")()
    return model, model(torch.randn(2, 3, 32, 32)[..., :16, :16], labels=torch.arange(2)).loss


def clip():
    module = load("hf_perception")
    model = module.build_clip()
    output = model(torch.randint(64, (4, 8)), torch.randn(4, 3, 16, 16))
    return model, module.clip_loss(output)


def whisper():
    model = load("hf_perception").build_whisper()
    return model, model(torch.randn(2, 8, 32), labels=torch.randint(64, (2, 8))).loss


HF = [
    *(partial(hf_language, name) for name in ("qwen3", "mixtral", "bert", "t5", "mamba")),
    *(partial(hf_images, name) for name in ("vit", "dinov2", "resnet")),
    clip,
    whisper,
]


@pytest.mark.parametrize("make", HF)
def test_models_of_transformers_are_small_and_finite(make):
    """Some hold parameters that no loss reaches, such as a mask's token."""
    torch.manual_seed(0)
    model, loss = make()
    assert sum(p.numel() for p in model.parameters()) < 300_000
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert torch.isfinite(loss)


def gpt2():
    model = load("hf").build_gpt2(layers=2, width=32, context=16)
    ids = tokens(2, 16)
    return model, model(input_ids=ids, labels=ids).loss


def llama():
    model = load("hf").build_llama(layers=2, width=32, context=16)
    ids = tokens(2, 16)
    return model, model(input_ids=ids, labels=ids).loss


def spiking():
    model = load("spiking").build(width=4, steps=2)
    return model, F.cross_entropy(model(torch.randn(2, 3, 16, 16)), torch.randint(10, (2,)))


def binary():
    model = load("binary").build(width=4)
    return model, F.cross_entropy(model(torch.randn(2, 3, 16, 16)), torch.randint(10, (2,)))


@pytest.mark.parametrize(
    "make", [gpt, lstm, resnet, unet3d, dlrm, frozen, spiking, binary, gpt2, llama, flip]
)
def test_model_is_small_and_every_trainable_parameter_gets_a_gradient(make):
    torch.manual_seed(0)
    model, loss = make()
    assert sum(p.numel() for p in model.parameters()) < 500_000
    assert torch.isfinite(loss)
    loss.backward()
    for name, p in model.named_parameters():
        assert (p.grad is not None) == p.requires_grad, name
        assert p.grad is None or p.grad.isfinite().all(), name
        assert p.grad is None or p.grad.any(), name


def test_untrained_language_models_are_indifferent():
    torch.manual_seed(0)
    for make in (gpt, lstm, gpt2, llama):
        assert abs(make()[1].item() - 5.545) < 0.1, make  # ln 256


def test_gpt_ties_its_head_on_request():
    build = load("gpt").build
    tied, untied = build(layers=1, width=32, tied=True), build(layers=1, width=32)
    assert tied.head.weight is tied.wte.weight
    assert untied.head.weight is not untied.wte.weight
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1


def test_gpt2_ties_its_head_and_llama_groups_its_queries():
    module = load("hf")
    model = module.build_gpt2(layers=1, width=32)
    assert model.lm_head.weight is model.transformer.wte.weight
    attention = (
        module.build_llama(layers=1, width=32, heads=4, kv_heads=2).model.layers[0].self_attn
    )
    assert attention.q_proj.out_features == 2 * attention.k_proj.out_features


def test_frozen_freezes_the_encoder_alone():
    model = load("frozen").build()
    trained = {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"head"}
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"encoder", "head"}


def test_unet3d_skips_matter():
    """Each decoder reads its encoder's output: without a skip the output is another."""
    torch.manual_seed(0)
    model, volumes = load("unet3d").build(width=4, levels=3), torch.randn(1, 1, 8, 8, 8)
    whole = model(volumes)
    for encoder in model.encoders:
        handle = encoder[-1].register_forward_hook(lambda _m, _i, out: torch.zeros_like(out))
        assert not torch.allclose(model(volumes), whole)
        handle.remove()


def draw(data, batch):
    """A batch of the spec's own data: field -> tensor."""
    if data.source == "text":
        return {name: tokens(batch, data.sequence) for name in ("tokens", "labels")}
    shapes = {
        name: field.shape if name in data.whole else (batch, *field.shape)
        for name, field in data.fields.items()
    }
    return {
        name: torch.randn(*shapes[name], dtype=getattr(torch, field.dtype))
        if field.high is None
        else torch.randint(field.low, field.high, shapes[name])
        for name, field in data.fields.items()
    }


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.yaml")), ids=lambda path: path.stem)
def test_spec_feeds_its_model_and_loss(path):
    """The shapes fit together, and the sizes are small enough for many runs on a CPU."""
    spec = load_spec(path)
    file, _, function = spec.model.factory.target.partition(":")
    module = load(Path(file).stem)
    args = {
        name: list(v) if isinstance(v, tuple) else v for name, v in spec.model.factory.args.items()
    }
    model, fields = getattr(module, function)(**args), draw(spec.data, 2)
    accepted = inspect.signature(model.forward).parameters
    inputs = spec.model.inputs or [(name, None) for name in fields if name in accepted]
    by_name = {name: fields[feed.field if feed else name] for name, feed in inputs if name}
    by_position = [fields[feed.field] for name, feed in inputs if name is None]
    output = model(*by_position, **by_name)
    if spec.model.loss == "output":
        loss = getattr(output, "loss", output)
    else:
        fed = {feed.field if feed else name for name, feed in inputs}
        name = spec.model.loss.rpartition(":")[2]
        function = getattr(module if ":" in spec.model.loss else F, name)
        if name == "cross_entropy":
            function = cross_entropy  # for classes in the last dimension, too
        loss = function(output, *(value for field, value in fields.items() if field not in fed))
        loss = loss[0] if isinstance(loss, tuple) else loss  # beside metrics
    assert loss.shape == ()
    loss.backward()
    assert sum(p.numel() for p in model.parameters()) < 1_000_000


def test_some_spec_divides_its_batch_unevenly_and_some_keeps_a_short_batch():
    specs = [load_spec(path) for path in SPECS.glob("*.yaml")]
    assert any(spec.train.global_batch % spec.parallel.microbatches for spec in specs)
    short = [s for s in specs if s.data.source == "random" and s.data.last_batch == "keep"]
    assert any(spec.data.samples % spec.train.global_batch for spec in short)


def test_no_model_knows_of_the_compiler():
    for path in MODELS.glob("*.py"):
        assert not re.search(r"\bppc\b", path.read_text()), path
