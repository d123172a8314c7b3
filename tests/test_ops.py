"""Each operation comes out as people write it, and computes the same."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from emitted import Emitted, emit
from jobs import make_spec

from ppc.emit.functional import signatures, usual
from ppc.frontend.capture.build import build_model

pytestmark = pytest.mark.torch

fields = {
    "x": {"shape": [4, 6]},
    "y": {"shape": [4, 6]},
    "n": {"shape": [4], "dtype": "int64", "low": 0, "high": 4},
}
case = """
class Case{number}(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.m = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6, 6))

    def forward(self, x, y, n):
        batch = x.shape[0]
        return {text}
"""
net = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.cases = nn.ModuleList([{cases}])

    def forward(self, x, y, n):
        x = x * self.scale
        total = x.sum()
        for case in self.cases:
            found = case(x, y, n)
            for tensor in found if isinstance(found, (tuple, list)) else [found]:
                total = total + tensor.double().abs().sum()
        return total

def build():
    return Net()
"""

written = """
x + y
x - y
x * y
x / y
x % y
x + 1
1 - x
x - 1
x * 0.5
-x
~(x > 0)
(x > 0) & (y > 0)
(x > 0) | (y > 0)
(x > 0) ^ (y > 0)
x == y
x != y
x < y
x <= 0.5
x > y
x >= y
x @ y.transpose(1, 2)
x @ self.m
-(x + y) * 2
x - (y - x)
x - y - x * (x + y)
x[:, 0]
x[0]
x[:, 1:3]
x[..., 2]
x[:, ::2]
x[:, -1]
x[..., :-1]
x[:, n[0]]
x[:, :, n[0]]
x.abs()
x.exp()
x.log1p()
x.sin()
x.tanh()
x.sigmoid()
x.erf()
x.floor()
x.sign()
x.pow(2)
x.pow(y)
x.square()
x.clamp(0, 1)
x.clamp(min=0)
x.clamp(max=1)
x.clamp_min(0)
x.sum()
x.sum(dim=-1)
x.sum(dim=(1, 2))
x.sum(dim=-1, keepdim=True)
x.mean()
x.mean(dim=1)
x.mean(dim=(1, 2), keepdim=True)
x.std(dim=1)
x.std(dim=1, unbiased=False)
x.var(dim=-1, correction=0)
x.max()
x.amax(dim=1)
x.argmax(dim=1)
x.softmax(dim=-1)
x.log_softmax(dim=-1)
x.logsumexp(dim=-1)
x.cumsum(dim=1)
x.cumprod(dim=1)
x.prod(dim=1)
x.argsort(dim=1)
x.flip(1)
x.flip(1, 2)
x.roll(1, dims=1)
x.roll((1, 2), dims=(1, 2))
x.view(-1, 6)
x.view(batch, -1)
x.flatten(1)
x.flatten(1, 2)
x.flatten(end_dim=1)
x.transpose(1, 2)
x.permute(0, 2, 1)
x.unsqueeze(1)
x.squeeze(1)
x.unsqueeze(1).expand(-1, 3, -1, -1)
x.repeat(1, 2, 1)
x.repeat_interleave(2, dim=1)
x.mT
x.swapaxes(1, 2)
x.movedim(1, 2)
x.unfold(1, 2, 1)
x.unflatten(-1, (2, 3))
x.tril()
x.triu(1)
x.diagonal(dim1=1, dim2=2)
x.to(torch.float64)
x.type_as(y)
x.masked_fill(x > 0, 0.0)
x.masked_fill(x > 0, float("-inf")).exp()
x.gather(1, n.unsqueeze(-1))
x.scatter(1, n.unsqueeze(-1), 1.0)
x.scatter_add(1, n.unsqueeze(-1), y)
x.index_add(1, n[0], y)
x.lerp(y, 0.5)
x.new_zeros(4, 6)
x.detach()
x.clone()
x.diff(dim=1)
x.addcmul(x, y, value=0.5)
x.add(y, alpha=2)
x.div(y, rounding_mode="floor")
torch.where(x > 0, x, y)
torch.where(x > 0, x, 0.0)
torch.cat((x, y), dim=1)
torch.cat((x, y))
torch.stack((x, y), dim=1)
torch.maximum(x, y)
torch.einsum("bij,bkj->bik", x, y)
torch.bmm(x, y.transpose(1, 2))
torch.addmm(self.w, x[:, 0], self.m)
torch.outer(self.w, self.w)
torch.kron(self.w, self.w)
torch.block_diag(self.m, self.m)
torch.cartesian_prod(self.w, self.w)
torch.zeros_like(x)
torch.full_like(x, 3.0)
torch.rand_like(x)
torch.cdist(x, y)
torch.polar(x, y).real
torch.complex(x, y).conj().imag
torch.view_as_real(torch.polar(x, y))
torch.linalg.vector_norm(x, dim=1)
torch.fft.irfft(torch.fft.rfft(x))
F.linear(x, self.m)
F.linear(x, self.m, self.w)
F.relu(x)
F.gelu(x)
F.gelu(x, approximate="tanh")
F.silu(x)
F.elu(x)
F.elu(x, alpha=0.5)
F.celu(x)
F.leaky_relu(x, negative_slope=0.2)
F.hardtanh(x)
F.hardshrink(x)
F.softshrink(x)
F.softplus(x, beta=2.0)
F.threshold(x, 0.1, 0.0)
F.logsigmoid(x)
F.glu(x)
F.glu(x, dim=1)
F.prelu(x, self.w[:1])
F.layer_norm(x, (6,))
F.layer_norm(x, (6,), self.w, self.w, eps=1e-06)
F.layer_norm(x, (6,), bias=self.w)
F.rms_norm(x, (6,), self.w)
F.group_norm(x, 2)
F.instance_norm(x)
F.batch_norm(x, None, None, training=self.training)
F.embedding(n, self.m)
F.embedding(n, self.m, padding_idx=0)
F.one_hot(n, 4)
F.conv1d(x, x.new_ones(3, 4, 2))
F.conv1d(x, x.new_ones(3, 4, 3), padding=1)
F.conv1d(x, x.new_ones(3, 4, 3), padding="same")
F.conv1d(x, x.new_ones(4, 1, 3), stride=2, groups=4)
F.conv1d(x, x.new_ones(6, 4, 1), self.w)
F.conv2d(x.unsqueeze(1), x.new_ones(3, 1, 2, 2), stride=(1, 2))
F.conv_transpose1d(x, x.new_ones(4, 3, 2), stride=2, output_padding=1)
F.max_pool1d(x, 3, stride=1, padding=1)
F.max_pool2d(x, 2)
F.avg_pool2d(x, 2, stride=1, count_include_pad=False)
F.adaptive_avg_pool1d(x, 3)
F.adaptive_avg_pool2d(x, (2, 3))
F.adaptive_max_pool1d(x, 3)
F.adaptive_max_pool2d(x, 3)
F.interpolate(x, scale_factor=2.0, mode="nearest")
F.interpolate(x, size=7, mode="linear", align_corners=True)
F.interpolate(x.unsqueeze(1), size=(8, 12), mode="bilinear", align_corners=False)
F.interpolate(x.unsqueeze(1), scale_factor=(2.0, 3.0), mode="nearest-exact")
F.pad(x, (1, 1))
F.pad(x, (0, 1), value=2.0)
F.pad(x, (1, 1), mode="reflect")
F.pixel_shuffle(x.unsqueeze(2), 2)
F.unfold(x.unsqueeze(1), (2, 3), padding=1, stride=2)
F.fold(F.unfold(x.unsqueeze(1), 2), (4, 6), 2)
F.dropout(x, 0.1, training=self.training)
F.alpha_dropout(x, 0.1, training=self.training)
F.dropout1d(x, 0.5, training=self.training)
F.dropout2d(x.unsqueeze(-1), 0.5, training=self.training)
F.scaled_dot_product_attention(x, y, y)
F.scaled_dot_product_attention(x, y, y, is_causal=True)
F.scaled_dot_product_attention(x, y, y, attn_mask=x @ y.mT, scale=0.5)
F.scaled_dot_product_attention(x, y, y, dropout_p=0.1 if self.training else 0.0)
F.cross_entropy(x.view(-1, 6), n.view(-1))
F.cross_entropy(x.view(-1, 6), n.view(-1), ignore_index=0)
F.cross_entropy(x.view(-1, 6), n.view(-1), reduction="sum", label_smoothing=0.1)
F.nll_loss(x.view(-1, 6), n.view(-1))
F.mse_loss(x, y)
F.mse_loss(x, y, reduction="none")
F.smooth_l1_loss(x, y, beta=0.5)
F.huber_loss(x, y, delta=0.5)
F.binary_cross_entropy(x.sigmoid(), y.sigmoid())
F.binary_cross_entropy_with_logits(x, y)
F.kl_div(x, y, reduction="sum", log_target=True)
F.cosine_similarity(x, y, dim=-1)
F.pairwise_distance(x, y)
F.cosine_embedding_loss(x[:, 0], y[:, 0], x.new_ones(batch))
F.triplet_margin_loss(x, y, x + y)
F.triplet_margin_loss(x, y, x + y, margin=0.5, swap=True, reduction="none")
F.hinge_embedding_loss(x, y)
F.margin_ranking_loss(x, y, y)
F.margin_ranking_loss(x, y, y, margin=0.5, reduction="sum")
F.multi_margin_loss(x[:, 0], n[:, 0])
F.poisson_nll_loss(x, y)
F.soft_margin_loss(x, y)
""".strip().splitlines()
"""Written as they are emitted."""

rewritten = {
    "torch.ops.aten._to_copy(x, dtype=torch.float64)": "x.to(torch.float64)",
    "x ** 2": "x.pow(2)",
    "2 ** x": "torch.pow(2, x)",
    "1 + x": "x + 1",
    "2 / x": "x.reciprocal() * 2",
    "x[:, None]": "x.unsqueeze(1)",
    "x[:, :, 2:]": "x[..., 2:]",
    "x[:, :3, :3]": "x[:, :3][..., :3]",
    "x[:, [0, 2]]": "x[:, torch.tensor([0, 2], device=device)]",
    "x.numel() * x": "x * (24 * batch)",
    "torch.ones(batch, 4, 6) + x": "torch.ones((batch, 4, 6), device=device) + x",
    "torch.full((4, 6), 2.0)": "torch.full((4, 6), 2.0, device=device)",
    "torch.arange(1, 6, 2)": "torch.arange(1, 6, 2, device=device)",
    "torch.tensor([1.5, 2.0])": "torch.tensor([1.5, 2.0], dtype=torch.float32, device=device)",
    "torch.tensor([True, False])": "torch.tensor([True, False], device=device)",
    "x.double()": "x.to(torch.float64)",
    "x.long()": "x.to(torch.int64)",
    "x.norm(dim=1)": "torch.linalg.vector_norm(x, dim=1)",
    "torch.matmul(x, self.m)": "x @ self.m",
    "torch.max(x, y)": "x.max(y)",
    "torch.sqrt(x.abs() + 1e-05)": "(x.abs() + 1e-05).sqrt()",
    "torch.isnan(x)": "x.isnan()",
    "torch.any(x > 0)": "(x > 0).any()",
    "torch.tensordot(x, self.m, dims=1)": "torch.tensordot(x, self.m, dims=([-1], [0]))",
    "F.softmax(x, dim=-1)": "x.softmax(dim=-1)",
    "F.softsign(x)": "x / (x.abs() + 1)",
    "F.dropout(x, 0.5)": "F.dropout(x, 0.5, training=self.training)",
    "F.interpolate(x[:, None], size=8, mode='bicubic', antialias=True)": (
        "F.interpolate(\n    x.unsqueeze(1), "
        'size=8, mode="bicubic", align_corners=False, antialias=True\n)'
    ),
    "F.kl_div(x, y, reduction='batchmean')": 'F.kl_div(x, y, reduction="sum") / batch',
    "F.batch_norm(x, None, None, training=True, momentum=0.2)": (
        "F.batch_norm(x, None, None, training=self.training, momentum=0.2)"
    ),
    "torch.embedding_bag(self.m, n.view(-1), torch.arange(batch))[0]": (
        'F.embedding_bag(n.view(-1), self.m, torch.arange(batch, device=device), mode="sum")'
    ),
}

several = {
    "x.max(dim=1)": "values, indices = x.max(dim=1)",
    "x.max(dim=1).values": "values, _ = x.max(dim=1)",
    "x.sort(dim=1)[1]": "_, indices = x.sort(dim=1)",
    "x.split(2, dim=1)": "part, part_2 = x.split(2, dim=1)",
    "x.split([1, 3], dim=1)": "part, part_2 = x.split((1, 3), dim=1)",
    "x.split(4, dim=1)": "(part,) = x.split(4, dim=1)",
    "x.chunk(2, dim=-1)[1]": "_, part = x.chunk(2, dim=-1)",
    "F.max_pool1d(x, 2, return_indices=True)": (
        "values, indices = F.max_pool1d(x, 2, return_indices=True)"
    ),
}
"""Operations that give several values, and the statement that takes them."""

cases = [*written, *rewritten, *several]


groups = [cases[start : start + 40] for start in range(0, len(cases), 40)]


@pytest.fixture(scope="module")
def emitted(tmp_path_factory) -> dict[str, Emitted]:
    """Models with a module for each case, by case."""
    found = {}
    for group in groups:
        code = "".join(case.format(number=cases.index(text), text=text) for text in group)
        modules = ", ".join(f"Case{cases.index(text)}()" for text in group)
        spec = make_spec(
            tmp_path_factory.mktemp("ops"),
            f"import torch.nn.functional as F\n{code}{net.format(cases=modules)}",
            model={"loss": "output"},
            data={"source": "random", "samples": 8, "fields": fields, "last_batch": "drop"},
            train={"global_batch": 8},
            parallel={"microbatches": 1},
        )
        found |= dict.fromkeys(group, emit(spec))
    return found


def text_of(emitted: dict[str, Emitted], text: str) -> str:
    """What a case's forward returns, without the line that sizes it."""
    lines = emitted[text].forward(f"Case{cases.index(text)}")
    return "\n".join(line for line in lines if not line.startswith("batch = "))


@pytest.mark.parametrize("text", written)
def test_written_as_people_write_it(emitted, text):
    assert text_of(emitted, text) == f"return {text}"


@pytest.mark.parametrize("text", rewritten)
def test_written_otherwise(emitted, text):
    assert text_of(emitted, text) == f"return {rewritten[text]}"


@pytest.mark.parametrize("text", several)
def test_several_values(emitted, text):
    assert text_of(emitted, text).split("\n")[0] == several[text]


def test_none_is_called_through_torch_ops(emitted):
    assert [text for text in cases if "torch.ops" in text_of(emitted, text)] == []


@pytest.mark.parametrize("group", groups, ids=lambda group: group[0])
def test_each_computes_the_same(emitted, group):
    compiled = emitted[group[0]]
    model, stage = build_model(compiled.spec), compiled.stage()
    stage.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(0)
    values = {
        "x": torch.rand(8, 4, 6, generator=generator),
        "y": torch.rand(8, 4, 6, generator=generator),
        "n": torch.randint(0, 4, (8, 4), generator=generator),
    }
    for text, one, other in zip(group, model.cases, stage.cases, strict=True):
        wanted = inspect.signature(other.forward).parameters
        torch.manual_seed(0)
        expected = one(**values)
        torch.manual_seed(0)
        found = other(**{name: values[name] for name in wanted})
        assert [t.tolist() for t in listed(found)] == [t.tolist() for t in listed(expected)], text


def listed(found):
    return found if isinstance(found, tuple | list) else (found,)


@pytest.mark.parametrize("name", sorted(signatures))
def test_what_f_takes_by_default_is_the_schemas(name):
    form = signatures[name]
    schemas = [
        getattr(getattr(torch.ops.aten, name), overload)._schema
        for overload in getattr(torch.ops.aten, name).overloads()
    ]
    schema = next(s for s in schemas if s.arguments[0].name == form.positional[0] or len(schemas))
    schema_names = {a.name for s in schemas for a in s.arguments}
    assert {*form.positional, *form.keywords} <= schema_names
    try:
        parameters = inspect.signature(getattr(F, form.name)).parameters
    except ValueError:
        return  # written in C, with the schema's own defaults
    for argument in schema.arguments:
        shown = form.keywords.get(argument.name, argument.name)
        if argument.name in usual.get(form.name, {}) or argument.name not in form.keywords:
            continue
        if "kwargs" in parameters:
            continue  # takes indices or not: these have the schema's defaults
        assert shown in parameters
        if argument.has_default_value():
            compare_defaults(argument.default_value, parameters[shown].default, shown)


def compare_defaults(schema, functional, name):
    if name == "reduction":
        assert functional == ("none", "mean", "sum")[schema]
    elif schema in ([], -1) and functional is None:  # stride, padding_idx: None says the same
        return
    else:
        assert functional == (schema[0] if isinstance(schema, list) else schema)
