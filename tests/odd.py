"""Odd models: what people write that a compiler may trip over, each as a few lines of a forward.

Each case makes x, float[batch, 4, 6], from x in `forward`, with what `init` holds. Between them
stands `self.mid`, a Linear at which tests cut, so that what was made before it goes over the cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import dedent, indent

imports = """
import dataclasses
import functools
import math
from collections import namedtuple
from typing import NamedTuple

import einops
import torch.nn.functional as F
from einops import einsum, rearrange, reduce, repeat
from einops.layers.torch import Rearrange, Reduce
from torch.nn.utils import parametrizations, parametrize, weight_norm
from torch.utils.checkpoint import checkpoint
"""


@dataclass(frozen=True)
class Odd:
    forward: str
    init: str = ""
    before: str = ""
    args: str = "x"
    """Of forward."""
    fields: tuple[str, ...] = ()
    """Of the data, beside x and y: those of `more` below."""


more = {
    "n": {"shape": [4], "dtype": "int64", "high": 5},
    "m": {"shape": [4], "dtype": "int64", "high": 2},
    "unread": {"shape": [3]},
}

einops_ = {
    "rearrange": Odd("""
        h = rearrange(x, "b (g k) c -> b g k c", g=2)
        x = self.mid(x)
        x = x + rearrange(h, "b g k c -> b (g k) c").flip(1)
    """),
    "reduce and repeat": Odd("""
        h = reduce(x, "b n c -> b c", "mean")
        x = self.mid(x) + repeat(h, "b c -> b n c", n=4) * reduce(x, "b n c -> b n 1", "max")
    """),
    "its layers": Odd(
        """
        h = self.gather(x)
        x = self.mid(x) + self.spread(h) + self.mean(x)
    """,
        """
        self.gather = nn.Sequential(Rearrange("b n c -> b (n c)"), nn.Linear(24, 24))
        self.spread = Rearrange("b (n c) -> b n c", n=4)
        self.mean = Reduce("b n c -> b n 1", "mean")
    """,
    ),
    "its einsum": Odd(
        """
        h = einsum(x, self.w, "b n c, c d -> b n d")
        x = self.mid(x) * einops.parse_shape(x, "b n c")["n"] + h
    """,
        "self.w = nn.Parameter(torch.randn(6, 6) / 6)",
    ),
}
gradients = {
    "checkpoint of a module": Odd(
        """
        x = checkpoint(self.block, x, use_reentrant=False)
        x = checkpoint(self.block2, self.mid(x), use_reentrant=False)
    """,
        """
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.5))
        self.block2 = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.5))
    """,
    ),
    "checkpoint of a function": Odd(
        """
        def body(h, scale):
            return torch.tanh(self.block(h)) * scale
        x = checkpoint(body, x, 2.0, use_reentrant=False)
        x = checkpoint(lambda h: self.mid(h).relu(), x, use_reentrant=True)
    """,
        "self.block = nn.Linear(6, 6)",
    ),
    "no_grad": Odd("""
        with torch.no_grad():
            scale = x.abs().mean(dim=-1, keepdim=True)
        x = self.mid(x / (1 + scale)) * scale
    """),
    "no_grad as a decorator": Odd(
        "x = self.mid(x) * self.scale(x)",
        """
        self.frozen = nn.Linear(6, 6)
    """,
        """
        class Net(Net):
            @torch.no_grad()
            def scale(self, x):
                return self.frozen(x).sigmoid()
    """,
    ),
    "detach": Odd("h = x.detach().sin()\nx = self.mid(x) + h * x.detach()"),
    "enable_grad in no_grad": Odd(
        """
        with torch.no_grad():
            h = x * 2
            with torch.enable_grad():
                g = self.inner(x)
        x = self.mid(x) + h + g
    """,
        "self.inner = nn.Linear(6, 6)",
    ),
    "a straight-through estimate": Odd("""
        h = x + (x.round() - x).detach()
        x = self.mid(h) + (h - x)
    """),
    "inference of a teacher": Odd(
        """
        with torch.no_grad():
            target = self.teacher(x).softmax(-1)
        x = self.mid(x)
        x = x - 0.1 * (x.softmax(-1) - target)
    """,
        "self.teacher = nn.Linear(6, 6).requires_grad_(False)",
    ),
}
in_place = {
    "add_": Odd("h = x * 1.5\nh.add_(1).mul_(2).sub_(x)\nx = self.mid(h)\nx += h\nx *= 0.5"),
    "masked_fill_": Odd("""
        h = self.mid(x) * 2
        h.masked_fill_(x > 0, 0.5)
        x = h + x
    """),
    "index_put_": Odd(
        """
        h = torch.zeros_like(x)
        h[torch.arange(len(x))[:, None], n.clamp(max=3)] = x
        x = self.mid(h) + h
    """,
        args="x, n",
        fields=("n",),
    ),
    "index_put_ accumulated": Odd(
        """
        h = torch.zeros_like(x)
        at = torch.arange(len(x), device=x.device)[:, None]
        h.index_put_((at, n.clamp(max=3)), x, accumulate=True)
        x = self.mid(h) + x
    """,
        args="x, n",
        fields=("n",),
    ),
    "a slice assigned": Odd("""
        h = x.clone()
        h[:, 1:3] = x[:, :2] * 2
        h[:, :, ::2] += 1
        h[..., -1] = 0
        x = self.mid(h)
        x[:, 0] = h[:, 1]
    """),
    "a slice over the cut": Odd("""
        out = x.new_zeros(x.shape[0], 4, 6)
        out[:, :2] = x[:, 2:]
        h = self.mid(x)
        out[:, 2:] = h[:, :2]
        x = out
    """),
    "filled by a loop": Odd(
        """
        out = torch.empty_like(x)
        for i in range(4):
            out[:, i] = self.parts[i](x[:, i])
        x = self.mid(out)
    """,
        "self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))",
    ),
    "by a mask": Odd("""
        h = self.mid(x)
        h[x > 0.5] = 0.25
        x = h
    """),
    "through a view": Odd("""
        h = x.sin()
        v = h.view(-1, 6)
        v.mul_(2)
        v[:, :3].clamp_(min=0)
        x = self.mid(h) + v.view(-1, 4, 6)
    """),
    "scatter_ and copy_": Odd(
        """
        h = x.detach().clone()
        h.scatter_(2, n.unsqueeze(-1), 1.0).copy_(h.flip(1).clone())
        x = self.mid(x) + h
    """,
        args="x, n",
        fields=("n",),
    ),
    "out of an op": Odd("""
        h = torch.empty_like(x)
        with torch.no_grad():
            torch.add(x, 1, out=h)
        x = self.mid(x) * h
    """),
    "an activation in place after the cut": Odd("""
        x = self.mid(F.relu(x * 2, inplace=True))
        x = F.leaky_relu_(x + 1, 0.1)
        x = F.dropout(x + 1, 0.3, self.training, inplace=True)
    """),
    "an index_add_ and index_copy_": Odd("""
        h = x.clone()
        rows = torch.tensor([0, 2], device=x.device)
        h.index_add_(1, rows, x[:, :2])
        h.index_copy_(1, rows, self.mid(x)[:, 2:])
        h.index_fill_(2, rows, 0.1)
        x = h
    """),
    "swapped in place": Odd("""
        h = x.clone()
        h.transpose_(1, 2).mul_(2)
        x = self.mid(h.transpose(1, 2)) + x.clone().unsqueeze_(0).squeeze_(0)
    """),
}
complex_ = {
    "rotary": Odd(
        """
        h = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2).contiguous())
        h = torch.view_as_real(h * self.freqs[: x.shape[1]]).flatten(-2).type_as(x)
        x = self.mid(h)
        h = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2))
        x = torch.view_as_real(h * self.freqs).flatten(2).type_as(x)
    """,
        """
        angles = torch.outer(torch.arange(4.0), 100 ** -torch.linspace(0, 1, 3))
        self.register_buffer("freqs", torch.polar(torch.ones_like(angles), angles), False)
    """,
    ),
    "rotary made in forward": Odd("""
        t = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        freqs = torch.outer(t, 1.0 / (10000 ** (torch.arange(0, 6, 2)[:3].float() / 6)))
        freqs = torch.polar(torch.ones_like(freqs), freqs)
        h = torch.view_as_complex(x.reshape(*x.shape[:-1], 3, 2)) * freqs[None]
        x = self.mid(torch.view_as_real(h).flatten(-2))
        x = x + torch.view_as_real(torch.view_as_complex(x.view(-1, 4, 3, 2)) * freqs).flatten(-2)
    """),
    "over the cut": Odd(
        """
        h = torch.view_as_complex(x.reshape(-1, 4, 3, 2)) * self.turn
        x = self.mid(x)
        h = h * h.conj()
        x = x + torch.view_as_real(h * 1j).flatten(2)
    """,
        "self.turn = nn.Parameter(torch.randn(3, dtype=torch.cfloat))",
    ),
    "stft": Odd("""
        window = torch.hann_window(8, dtype=x.dtype, device=x.device)
        h = torch.stft(x.flatten(1), 8, 4, window=window, return_complex=True)
        x = self.mid(x) + h.abs().mean(dim=(1, 2))[:, None, None]
    """),
    "fft": Odd(
        """
        h = torch.fft.fft2(x)
        x = self.mid(x) + torch.fft.ifft2(h * self.filter).real
        x = x + torch.fft.irfft(torch.fft.rfft(x, dim=1), n=4, dim=1).abs()
        x = x + torch.fft.fftshift(x, dim=2).roll(1, 2)
    """,
        "self.filter = nn.Parameter(torch.complex(torch.randn(4, 6), torch.randn(4, 6)))",
    ),
}
crossing = {
    "integers and booleans": Odd("""
        drawn = torch.rand_like(x)
        keep, level = drawn > 0.3, (drawn * 4).long()
        narrow, small = level.to(torch.int32), level.to(torch.uint8)
        x = self.mid(x)
        x = torch.where(keep, x, 0.0) + level + narrow * small
    """),
    "half floats": Odd("""
        h = torch.rand_like(x).half()
        b = x.bfloat16()
        x = self.mid(x) + h.to(x.dtype) + b.to(x.dtype)
    """),
    "indices of what was chosen": Odd("""
        _, at = x.abs().topk(2, dim=1)
        x = self.mid(x)
        x = x.scatter(1, at, x.gather(1, at) * 2)
    """),
    "None and numbers between modules": Odd(
        """
        x, state, note, size = self.one(x, None, flag=True, scale=2)
        x = self.mid(x)
        x, state, *_ = self.one(x, state, flag=False, scale=0.5, mode="add")
    """,
        "self.one = One()",
        """
        class One(nn.Module):
            def __init__(self):
                super().__init__()
                self.l = nn.Linear(6, 6)

            def forward(self, x, state=None, *, flag, scale=1, mode="mul"):
                h = self.l(x) if flag else x
                h = h * scale if mode == "mul" else h + scale
                if state is not None:
                    h = h + state
                return h, h.sin() if state is None else None, mode, x.shape[0]
    """,
    ),
    "an expanded value": Odd(
        """
        h = self.w.expand(x.shape[0], 4, 6)
        x = self.mid(x) * h + x[:, :1].expand_as(x)
    """,
        "self.w = nn.Parameter(torch.ones(6))",
    ),
    "a number of the batch": Odd("""
        scale = x.shape[0] / len(x) * x.size(1)
        x = self.mid(x) * scale + x.numel() / x.shape[0]
    """),
    "a transposed value": Odd("""
        h = x.transpose(1, 2)
        p = torch.rand_like(x.permute(1, 2, 0))
        x = self.mid(x) + h.transpose(1, 2) * p.permute(2, 0, 1)
    """),
    "a scalar": Odd(
        """
        total = self.w.sum().exp() * x.new_ones(())
        x = self.mid(x)
        x = x * total
    """,
        "self.w = nn.Parameter(torch.zeros(3))",
    ),
}
structure = {
    "module lists in loops": Odd(
        """
        for i, (norm, layer) in enumerate(zip(self.norms, self.layers)):
            x = x + layer(norm(x)) if i % 2 == 0 else layer(x)
        x = self.mid(x)
        for layer in reversed(self.layers):
            x = layer(x).tanh()
    """,
        """
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(3))
    """,
    ),
    "module dicts in loops": Odd(
        """
        outs = {name: layer(x) for name, layer in self.heads.items()}
        x = self.mid(x)
        for name in sorted(outs):
            x = x + outs[name] * self.scales[name]
        x = self.heads["b"](x)
    """,
        """
        self.heads = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(1)), "b": torch.ones(6)})
    """,
    ),
    "one module in two stages": Odd(
        """
        x = self.shared(x)
        x = self.shared(self.mid(x)) + self.shared[0](x)
    """,
        "self.shared = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU())",
    ),
    "a method that is no forward": Odd(
        "x = self.enc.decode(self.mid(self.enc.encode(x)))",
        """
        self.enc = Coder()
    """,
        """
        class Coder(nn.Module):
            def __init__(self):
                super().__init__()
                self.w, self.norm = nn.Linear(6, 6, bias=False), nn.LayerNorm(6)

            def encode(self, x):
                return self.norm(self.w(x))

            def decode(self, x):
                return x @ self.w.weight
    """,
    ),
    "nests": Odd(
        """
        out = self.inner({"pair": (x, [x.sin(), {"deep": x.cos()}])}, scale=(2.0, None))
        x = self.mid(out["sum"]) + out["parts"][1][0]
    """,
        "self.inner = Inner()",
        """
        class Inner(nn.Module):
            def __init__(self):
                super().__init__()
                self.l = nn.Linear(6, 6)

            def forward(self, tree, *, scale):
                a, (b, rest) = tree["pair"]
                h = self.l(a) * scale[0] + b + rest["deep"]
                return {"sum": h, "parts": (None, [h.tanh(), a])}
    """,
    ),
    "keyword-only and unread fields": Odd(
        "x = self.mid(x) + self.e(n)",
        """
        self.e = nn.Embedding(5, 6)
    """,
        args="*, n, x",
        fields=("n", "unread"),
    ),
    "optional fields": Odd(
        """
        x = self.mid(x)
        if m is not None:
            x = torch.where(m.bool()[..., None], x, -x)
        if z is not None:
            x = x + z
    """,
        args="x, m=None, z=None",
        fields=("m",),
    ),
    "a dataclass and a named tuple": Odd(
        """
        out = self.inner(x)
        both = Both(out.hidden, aux=out.aux)
        x = self.mid(both.first) + both.aux
    """,
        "self.inner = Inner()",
        """
        @dataclasses.dataclass
        class Result:
            hidden: torch.Tensor
            aux: torch.Tensor = None
            name: str = "result"

        class Both(NamedTuple):
            first: torch.Tensor
            aux: torch.Tensor

        class Inner(nn.Module):
            def __init__(self):
                super().__init__()
                self.l = nn.Linear(6, 6)

            def forward(self, x):
                return Result(self.l(x), aux=x.sin())
    """,
    ),
    "functools.partial": Odd(
        "x = self.block(self.mid(self.act(x)))",
        """
        make = functools.partial(nn.LayerNorm, eps=1e-3)
        self.act = functools.partial(F.gelu, approximate="tanh")
        prelu = functools.partial(nn.PReLU, init=0.1)
        self.block = nn.Sequential(nn.Linear(6, 6), make(6), prelu())
    """,
    ),
    "__getattr__": Odd(
        "x = self.wrapped(self.mid(x)) * self.wrapped.factor + self.wrapped.bias",
        """
        self.wrapped = Wrapped(nn.Linear(6, 6))
    """,
        """
        class Wrapped(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner, self.factor = inner, 3.0

            def __getattr__(self, name):
                try:
                    return super().__getattr__(name)
                except AttributeError:
                    return getattr(self.inner, name)

            def forward(self, x):
                return F.linear(x, self.weight, self.bias)
    """,
    ),
    "modules in plain containers of modules": Odd(
        """
        for name in ("left", "right"):
            x = getattr(self, name)(x)
        x = self.get_submodule("right")(self.mid(x))
    """,
        "self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)",
    ),
    "a property and a closure": Odd(
        "x = self.act(self.mid(x)) * self.scale",
        """
        factor = 0.5
        self.act = lambda h: torch.sigmoid(h * factor)
        self.log_scale = nn.Parameter(torch.zeros(6))
    """,
        """
        class Net(Net):
            @property
            def scale(self):
                return self.log_scale.exp()
    """,
    ),
    "hooks of forward": Odd(
        "x = self.mid(self.hooked(x))",
        """
        self.hooked = nn.Linear(6, 6)
        self.hooked.register_forward_hook(lambda m, args, out: out * 2 + args[0])
        self.mid.register_forward_pre_hook(lambda m, args: (args[0].tanh(),))
    """,
    ),
    "slices of lists of modules": Odd(
        """
        for layer in self.layers[1:]:
            x = layer(x)
        x = self.net[2:](self.mid(self.net[:2](x)))
    """,
        """
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.GELU())
    """,
    ),
    "TorchScript of a function": Odd(
        "x = self.mid(gated(x, 0.5)) + gated(x, 2.0)",
        before="""
        @torch.jit.script
        def gated(x, a: float):
            return x * torch.sigmoid(x) * a
    """,
    ),
    "functional_call": Odd(
        """
        halves = {name: p * 0.5 for name, p in self.inner.named_parameters()}
        x = self.mid(torch.func.functional_call(self.inner, halves, (x,))) + self.inner(x)
    """,
        "self.inner = nn.Linear(6, 6)",
    ),
    "a forward and a __call__ put in place": Odd(
        "x = self.mid(self.l(x)) + self.c(x)",
        """
        self.l, self.c = nn.Linear(6, 6), Called(6, 6)
        old = self.l.forward
        self.l.forward = lambda x: old(x).tanh()
    """,
        """
        class Called(nn.Linear):
            def __call__(self, x):
                return super().__call__(x) * 2
    """,
    ),
    "buffers called as values are": Odd(
        "x = self.mid(x + self.add) * self.mul + self.linear",
        """
        self.register_buffer("add", torch.ones(6))
        self.mul = nn.Parameter(torch.ones(6))
        self.register_buffer("linear", torch.zeros(6))
    """,
    ),
    "a loop to a depth": Odd(
        """
        for _ in range(3):
            x = x + 0.1 * self.cell(x)
        x = self.mid(x)
        while x.dim() < 4:
            x = x.unsqueeze(0)
        x = x.squeeze(0)
    """,
        "self.cell = nn.Linear(6, 6)",
    ),
}
parameters = {
    "torch.randn and torch.empty": Odd(
        "x = self.mid(x @ self.a) @ self.b + self.c * self.d",
        """
        self.a = nn.Parameter(torch.randn(6, 6) * 6 ** -0.5)
        self.b = nn.Parameter(torch.empty(6, 6))
        nn.init.xavier_uniform_(self.b, gain=0.5)
        self.c = nn.Parameter(torch.rand(6).mul_(2).sub_(1))
        self.register_parameter("d", nn.Parameter(torch.full((1, 4, 1), 0.1)))
        self.register_parameter("e", None)
    """,
    ),
    "inits": Odd(
        "x = self.mid(x @ self.a) @ self.b + x @ self.c @ self.d + self.e",
        """
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.empty(6, 6)) for _ in range(4))
        nn.init.orthogonal_(self.a)
        nn.init.kaiming_normal_(self.b, nonlinearity="relu")
        nn.init.trunc_normal_(self.c, std=0.3)
        nn.init.eye_(self.d)
        self.e = nn.Parameter(torch.empty(6))
        with torch.no_grad():
            self.e.copy_(torch.linspace(-1, 1, 6))
            self.mid.weight[:, 0] = 0.5
    """,
    ),
    "weight_norm, old": Odd(
        "x = self.mid(self.w(x))",
        """
        self.w = weight_norm(nn.Linear(6, 6))
        self.mid = weight_norm(self.mid, dim=None)
    """,
    ),
    "weight_norm": Odd(
        "x = self.mid(self.w(x)) + self.w(x)",
        """
        self.w = parametrizations.weight_norm(nn.Linear(6, 6))
        self.mid = parametrizations.weight_norm(self.mid, dim=1)
    """,
    ),
    "spectral_norm": Odd(
        "x = self.mid(self.w(x))",
        """
        self.w = parametrizations.spectral_norm(nn.Linear(6, 6), n_power_iterations=2)
        self.mid = parametrizations.spectral_norm(self.mid)
    """,
    ),
    "orthogonal": Odd(
        "x = self.mid(self.w(x)) + self.v(x)",
        """
        self.w = parametrizations.orthogonal(nn.Linear(6, 6), orthogonal_map="cayley")
        self.v = parametrizations.orthogonal(nn.Linear(6, 6), orthogonal_map="matrix_exp")
    """,
    ),
    "orthogonal by householder": Odd(
        "x = self.mid(self.w(x))",
        """
        self.w = parametrizations.orthogonal(nn.Linear(6, 6), orthogonal_map="householder")
    """,
    ),
    "parametrizations of one's own": Odd(
        "x = self.mid(self.w(x)) + x @ self.w.weight",
        """
        self.w = nn.Linear(6, 6)
        parametrize.register_parametrization(self.w, "weight", Symmetric())
        parametrize.register_parametrization(self.w, "weight", Scaled(6))
        parametrize.register_parametrization(self.mid, "bias", Scaled(6))
    """,
        """
        class Symmetric(nn.Module):
            def forward(self, w):
                return w.triu() + w.triu(1).transpose(-1, -2)

        class Scaled(nn.Module):
            def __init__(self, size):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(size))

            def forward(self, w):
                return w * self.scale
    """,
    ),
    "a weight computed in forward": Odd(
        """
        weight = F.normalize(self.v, dim=1) * self.g
        x = self.mid(F.linear(x, weight))
        x = F.linear(x, weight)
    """,
        "self.v, self.g = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.ones(6, 1))",
    ),
}
state = {
    "a counter": Odd(
        """
        self.steps += 1
        x = self.mid(x) / (1 + 0.1 * self.steps)
    """,
        'self.register_buffer("steps", torch.tensor(0))',
    ),
    "an average": Odd(
        """
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(dim=(0, 1)), alpha=0.1)
            self.var = 0.9 * self.var + 0.1 * x.var(dim=(0, 1))
        x = self.mid((x - self.mean) / (self.var + 1e-3).sqrt())
    """,
        """
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))
    """,
    ),
    "an average behind the cut": Odd(
        """
        x = self.mid(x)
        if self.training:
            self.mean.lerp_(x.detach().mean(dim=(0, 1)), 0.1)
        x = x - self.mean
    """,
        'self.register_buffer("mean", torch.zeros(6), persistent=False)',
    ),
    "a codebook": Odd(
        """
        flat = x.reshape(-1, 6)
        far = (flat[:, None] - self.codes).square().sum(-1)
        at = far.argmin(dim=1)
        near = self.codes[at].view_as(x)
        if self.training:
            with torch.no_grad():
                hits = F.one_hot(at, 5).to(flat.dtype)
                self.count.mul_(0.9).add_(hits.sum(0), alpha=0.1)
                self.total.mul_(0.9).add_(hits.t() @ flat, alpha=0.1)
                self.codes.copy_(self.total / (self.count[:, None] + 1e-2))
        h = x + (near - x).detach()
        x = self.mid(h)
    """,
        """
        codes = torch.randn(5, 6)
        self.register_buffer("codes", codes)
        self.register_buffer("total", codes.clone())
        self.register_buffer("count", torch.ones(5))
    """,
    ),
    "a queue": Odd(
        """
        h = F.normalize(x.mean(dim=1), dim=-1)
        x = self.mid(x) + (h @ self.queue.clone().t() @ self.queue.clone())[:, None]
        with torch.no_grad():
            self.queue.copy_(torch.cat([h.mean(0, keepdim=True), self.queue[:-1]]))
    """,
        'self.register_buffer("queue", F.normalize(torch.randn(7, 6), dim=1))',
    ),
    "a moving teacher": Odd(
        """
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.student.parameters()):
                mine.mul_(0.99).add_(theirs, alpha=0.01)
            target = self.teacher(x)
        x = self.mid(self.student(x)) - target
    """,
        """
        self.student, self.teacher = nn.Linear(6, 6), nn.Linear(6, 6)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
    """,
    ),
}
random = {
    "masking": Odd(
        """
        mask = torch.rand(x.shape[:2], device=x.device) < 0.5
        x = torch.where(mask[..., None], self.token, x)
        x = self.mid(x) * mask.unsqueeze(-1)
    """,
        "self.token = nn.Parameter(torch.zeros(6))",
    ),
    "a permutation of patches": Odd(
        """
        order = torch.rand(x.shape[0], 4, device=x.device).argsort(dim=1)
        back = order.argsort(dim=1)
        kept = x.gather(1, order[:, :2, None].expand(-1, -1, 6))
        kept = self.mid(kept)
        full = torch.cat([kept, self.token.expand(x.shape[0], 2, -1)], dim=1)
        x = full.gather(1, back[..., None].expand(-1, -1, 6))
    """,
        "self.token = nn.Parameter(torch.zeros(1, 1, 6))",
    ),
    "randperm": Odd("""
        order = torch.randperm(4, device=x.device)
        x = self.mid(x[:, order])
        x = x[:, order.argsort()]
    """),
    "multinomial": Odd("""
        at = torch.multinomial(x.mean(1).softmax(-1), 3)
        x = self.mid(x)
        x = x + F.one_hot(at, 6).sum(1).to(x.dtype)[:, None]
    """),
    "bernoulli": Odd("""
        keep = torch.bernoulli(torch.full_like(x[..., :1], 0.7))
        x = self.mid(x) * keep + torch.empty_like(keep).bernoulli_(0.5)
    """),
    "randint and normal": Odd(
        """
        t = torch.randint(0, 5, (x.shape[0],), device=x.device)
        noise = torch.normal(0.0, 1.0, size=x.shape, device=x.device, dtype=x.dtype)
        x = self.mid(x + 0.1 * noise) + self.e(t)[:, None] + x.new_empty(6).uniform_(-1, 1)
    """,
        "self.e = nn.Embedding(5, 6)",
    ),
    "noise of torch.distributions": Odd("""
        mean, scale = x, F.softplus(x)
        x = self.mid(torch.distributions.Normal(mean, scale).rsample())
        x = x + torch.distributions.Bernoulli(logits=x.detach()).sample()
    """),
    "gumbel": Odd("""
        h = F.gumbel_softmax(x, tau=0.5, hard=True)
        x = self.mid(h) + F.gumbel_softmax(x, dim=1)
    """),
    "stochastic depth": Odd("""
        keep = torch.rand(x.shape[0], 1, 1, device=x.device, dtype=x.dtype).add_(0.8).floor_()
        x = x + self.mid(x).div(0.8) * keep
    """),
    "functional dropouts": Odd(
        """
        x = F.dropout(x, 0.2, training=self.training)
        x = self.mid(F.feature_alpha_dropout(x, 0.2, training=self.training))
        x = F.dropout1d(x, 0.2, self.training) + self.d(x)
    """,
        "self.d = nn.Dropout1d(0.3)",
    ),
}
operations = {
    "scans": Odd("""
        h = x.cumsum(dim=1).tanh()
        x = self.mid(h) + torch.cummax(x, dim=1).values + x.logcumsumexp(2)
        x = x + torch.cumprod(x.sigmoid(), dim=-1)
    """),
    "a scan in a loop": Odd(
        """
        h, out = x.new_zeros(x.shape[0], 6), []
        for t in range(x.shape[1]):
            h = torch.tanh(self.step(x[:, t]) + 0.5 * h)
            out.append(h)
        x = self.mid(torch.stack(out, dim=1))
    """,
        "self.step = nn.Linear(6, 6)",
    ),
    "where with scalars": Odd("""
        h = torch.where(x > 0, 1.0, x)
        x = self.mid(torch.where(x < -1, torch.tensor(-1.0), h))
        x = torch.where(x.isfinite() & (x != 0), x, 0.5) + torch.where(x > 0, 2, 1)
    """),
    "attention with masks": Odd(
        """
        q = x.unsqueeze(1)
        causal = torch.ones(4, 4, dtype=torch.bool, device=x.device).tril()
        pad = torch.zeros(x.shape[:2], dtype=x.dtype).masked_fill(m == 0, -1e4)
        h = F.scaled_dot_product_attention(q, q, q, attn_mask=causal)
        x = self.mid(x + h.squeeze(1))
        q = x.view(-1, 4, 2, 3).transpose(1, 2)
        h = F.scaled_dot_product_attention(q, q, q, attn_mask=pad[:, None, None])
        x = x + h.transpose(1, 2).flatten(2)
        x = x + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
    """,
        args="x, m",
        fields=("m",),
    ),
    "einsum": Odd(
        """
        h = torch.einsum("bnc,cd->bnd", x, self.w)
        x = self.mid(h) + torch.einsum("bnc,bmc,bmd->bnd", x, x, h)
        x = x + torch.einsum("...i,...i->...", x, h)[..., None]
    """,
        "self.w = nn.Parameter(torch.randn(6, 6) / 6)",
    ),
    "sort, topk, gather, scatter": Odd("""
        values, at = x.sort(dim=-1, descending=True)
        top = x.topk(3, dim=1, sorted=True)
        x = self.mid(x)
        x = torch.zeros_like(x).scatter_add(2, at, values * x)
        x = x + F.pad(top.values.gather(1, top.indices.clamp(max=2)), (0, 0, 0, 1))
        x = x + x.kthvalue(2, dim=2, keepdim=True).values + x.median(dim=1, keepdim=True)[0]
        x = x + torch.searchsorted(values.flip(-1).detach().contiguous(), x.detach()).to(x.dtype)
    """),
    "take_along_dim and bucketize": Odd(
        """
        at = x.argsort(dim=1)
        x = self.mid(torch.take_along_dim(x, at, dim=1))
        bins = torch.tensor([-1.0, 0.0, 1.0], device=x.device, dtype=x.dtype)
        x = x + self.e(torch.bucketize(x.detach()[..., 0], bins))
    """,
        "self.e = nn.Embedding(4, 6)",
    ),
    "interpolate": Odd("""
        h = F.interpolate(x.unsqueeze(1), scale_factor=2, mode="bilinear", align_corners=False)
        x = self.mid(F.avg_pool2d(h, 2).squeeze(1))
        x = x + F.interpolate(x, size=6, mode="nearest") + F.interpolate(x, 3).repeat(1, 1, 2)
    """),
    "grid_sample": Odd(
        """
        grid = F.affine_grid(self.theta.expand(x.shape[0], 2, 3), (x.shape[0], 1, 4, 6),
                             align_corners=False)
        h = F.grid_sample(x[:, None], grid, padding_mode="border", align_corners=False)
        x = self.mid(h.squeeze(1)) + x
    """,
        "self.theta = nn.Parameter(torch.eye(2, 3) + 0.1)",
    ),
    "convolutions": Odd(
        """
        h = self.up(x[:, None])
        x = self.mid(self.down(h).squeeze(1)) + self.one(x)
        x = x + F.conv_transpose1d(x, self.w, padding=1)
    """,
        """
        self.up = nn.ConvTranspose2d(1, 2, 2, stride=2)
        self.down = nn.Conv2d(2, 1, 2, stride=2, padding_mode="zeros")
        self.one = nn.Conv1d(4, 4, 3, padding="same", padding_mode="circular", groups=2)
        self.w = nn.Parameter(torch.randn(4, 4, 3) / 4)
    """,
    ),
    "pools with indices": Odd(
        """
        h, at = self.pool(x[:, None])
        x = self.mid(x)
        x = x + self.unpool(h, at).squeeze(1)
        v, i = F.max_pool1d(x, 2, return_indices=True)
        x = x + F.max_unpool1d(v, i, 2) + F.adaptive_max_pool1d(x, 6)
        x = x + F.lp_pool1d(x.abs() + 1, 2, 1) + self.frac(x[:, None]).mean()
    """,
        """
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.unpool = nn.MaxUnpool2d(2)
        self.frac = nn.AdaptiveAvgPool2d((2, None))
    """,
    ),
    "embedding bags": Odd(
        """
        flat, offsets = n.flatten(), torch.arange(0, n.numel(), 4, device=n.device)
        h = self.bag(flat, offsets)
        x = self.mid(x) + h[:, None] + self.bag2(n)[:, None]
        x = x + self.bag3(n, per_sample_weights=x[..., 0])[:, None]
    """,
        """
        self.bag = nn.EmbeddingBag(5, 6, mode="mean")
        self.bag2 = nn.EmbeddingBag(5, 6, mode="max")
        self.bag3 = nn.EmbeddingBag(5, 6, mode="sum", padding_idx=0)
    """,
        args="x, n",
        fields=("n",),
    ),
    "recurrent layers with states": Odd(
        """
        h0 = x.new_zeros(2, x.shape[0], 3)
        out, hn = self.gru(x, h0)
        x = self.mid(out)
        out, (hn, cn) = self.lstm(x, (hn.repeat(1, 1, 2)[:1], x.new_ones(1, x.shape[0], 6)))
        out, hn = self.rnn(out.transpose(0, 1), hn)
        cell = self.cell(out[0], hn[0])
        h, c = self.lstm_cell(cell, (cell, cn[0]))
        x = out.transpose(0, 1) + h[:, None]
    """,
        """
        self.gru = nn.GRU(6, 3, batch_first=True, bidirectional=True)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.rnn = nn.RNN(6, 6, nonlinearity="relu")
        self.cell, self.lstm_cell = nn.GRUCell(6, 6), nn.LSTMCell(6, 6)
    """,
    ),
    "MultiheadAttention": Odd(
        """
        h, weights = self.att(x, x, x, key_padding_mask=m == 2)
        x = self.mid(x + h) + weights.sum(dim=-1, keepdim=True)
        mask = nn.Transformer.generate_square_subsequent_mask(4)
        h, _ = self.cross(x, h, h, attn_mask=mask, need_weights=False)
        x = x + h
    """,
        """
        self.att = nn.MultiheadAttention(6, 2, batch_first=True, dropout=0.1)
        self.cross = nn.MultiheadAttention(6, 3, batch_first=True, add_zero_attn=True, bias=False)
    """,
        args="x, m",
        fields=("m",),
    ),
    "TransformerEncoder": Odd(
        "x = self.mid(self.enc(x, src_key_padding_mask=m == 2))",
        """
        layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(6), enable_nested_tensor=False)
    """,
        args="x, m",
        fields=("m",),
    ),
    "TransformerEncoder with nested tensors on": Odd(
        """
        x = self.mid(self.enc(x, mask=torch.zeros(4, 4), src_key_padding_mask=m == 2))
    """,
        """
        layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True, activation="gelu")
        self.enc = nn.TransformerEncoder(layer, 2)
    """,
        args="x, m",
        fields=("m",),
    ),
    "Transformer": Odd(
        """
        mask = self.t.generate_square_subsequent_mask(4)
        x = self.mid(self.t(x, x.flip(1), tgt_mask=mask, tgt_is_causal=True))
    """,
        "self.t = nn.Transformer(6, 2, 2, 2, 12, batch_first=True)",
    ),
    "norms": Odd(
        """
        x = self.mid(self.bn(x)) + self.group(x)
        x = self.rms(x) + self.inst(x) + F.normalize(x, p=1, dim=2)
        x = F.layer_norm(x, x.shape[1:]) + self.local(x[..., None]).squeeze(-1)
    """,
        """
        self.bn, self.group = nn.BatchNorm1d(4), nn.GroupNorm(2, 4)
        self.rms, self.inst = nn.RMSNorm(6), nn.InstanceNorm1d(4, affine=True)
        self.local = nn.LocalResponseNorm(2)
    """,
    ),
    "linear algebra": Odd("""
        g = x @ x.mT + 4 * torch.eye(4, device=x.device, dtype=x.dtype)
        x = self.mid(torch.linalg.solve(g, x))
        x = x + torch.linalg.cholesky(g) @ x + torch.linalg.inv(g) @ x
        x = x * torch.linalg.det(g).log()[:, None, None] + torch.baddbmm(x, g, x, beta=0.5)
        x = x + torch.linalg.norm(x, dim=-1, keepdim=True) + torch.cdist(x, x).sum(-1)[..., None]
    """),
    "statistics": Odd("""
        mean, std = torch.std_mean(x, dim=2, keepdim=True)
        x = self.mid((x - mean) / (std + 1e-3)) + torch.var_mean(x, dim=1, keepdim=True)[0]
        x = x + x.quantile(0.5, dim=1, keepdim=True) + x.amin(dim=2, keepdim=True)
        x = x + torch.aminmax(x, dim=1, keepdim=True).max + x.nanmean(dim=1, keepdim=True)
        x = x + torch.logsumexp(x, (1, 2), keepdim=True) + x.norm(dim=2, keepdim=True)
    """),
    "unfold, fold and windows": Odd("""
        h = F.unfold(x[:, None], (2, 3), stride=(2, 3))
        x = self.mid(F.fold(h, (4, 6), (2, 3), stride=(2, 3)).squeeze(1))
        x = x + F.pad(x.unfold(2, 3, 1).mean(-1), (1, 1), mode="replicate")
        x = x + torch.as_strided(x.contiguous(), (x.shape[0], 4, 6), (24, 6, 1))
        x = x + F.pixel_unshuffle(F.pixel_shuffle(x[:, :, :, None], 2), 2).squeeze(-1)
    """),
    "stacks and splits": Odd("""
        a, b, c = x.split([1, 2, 3], dim=-1)
        u, v = x.unbind(1)[:2]
        x = self.mid(torch.cat([c, b, a], dim=-1)) + torch.stack([u, v], 1).repeat(1, 2, 1)
        top, bottom = torch.tensor_split(x, 2, dim=1)
        x = torch.hstack([bottom, top]) + torch.column_stack([u, v]).view(-1, 2, 6).sum(1)[:, None]
        x = x + torch.roll(torch.meshgrid(x[0, :, 0], x[0, 0], indexing="ij")[0], 1, 0)
    """),
    "bits and comparisons": Odd("""
        code = (x.detach() > 0).long()
        bits = (code << 2) | (code & 1) ^ 3
        x = self.mid(x) + bits % 5 + bits // 2 - (~code).float() + code.bool().logical_not()
        x = x + torch.isclose(x, x.round()).to(x.dtype) + x.sign() * (bits.bitwise_and(2) == 2)
    """),
    "lookups and constants of the file": Odd(
        """
        x = self.mid(x) + TABLE[n][..., None]
        x = x + torch.as_tensor([0.5, 1.5], dtype=x.dtype)[m][..., None]
    """,
        before="TABLE = torch.linspace(0, 1, 5)",
        args="x, n, m",
        fields=("n", "m"),
    ),
    "attention written out": Odd(
        """
        q, k, v = (w(x).view(-1, 4, 2, 3).transpose(1, 2) for w in (self.q, self.k, self.v))
        score = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1)) + self.bias[:, :4, :4]
        score = score.masked_fill(self.mask[:4, :4] == 0, float("-inf"))
        x = self.mid((score.softmax(-1) @ v).transpose(1, 2).contiguous().view(-1, 4, 6))
    """,
        """
        self.q, self.k, self.v = (nn.Linear(6, 6, bias=False) for _ in range(3))
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)))
        self.bias = nn.Parameter(torch.zeros(2, 8, 8))
    """,
    ),
}
groups = {
    "einops": einops_,
    "gradients": gradients,
    "in place": in_place,
    "complex": complex_,
    "crossing": crossing,
    "structure": structure,
    "parameters": parameters,
    "state": state,
    "random": random,
    "operations": operations,
}


def code_of(odd: Odd) -> str:
    """The text of a model."""
    own = dedent(odd.before).strip("\n")
    model = f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mid, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
{indent(dedent(odd.init).strip(chr(10)), 8 * " ")}

    def forward(self, {odd.args}):
        x = torch.tanh(self.first(x))
{indent(dedent(odd.forward).strip(chr(10)), 8 * " ")}
        return self.last(x).mean(dim=1)
"""
    parts = [
        imports,
        *([model, own] if stands_alone(odd) else [own, model]),
        "def build():\n    return Net()\n",
    ]
    return "\n\n".join(parts)


case_text = """
def case_{number}():
{before}

    class Case{number}(nn.Module):
        def __init__(self):
            super().__init__()
            self.mid = nn.Linear(6, 6)
{init}

        def forward(self, {args}):
{forward}
            return x

    return Case{number}()
"""
net_text = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        self.cases = nn.ModuleList([{cases}])

    def forward(self, {fields}):
        x = torch.tanh(self.first(x))
{calls}
        return self.last(x).mean(dim=1)


def build():
    return Net()
"""


def stands_alone(odd: Odd) -> bool:
    """Whether a case is more than a block of a model."""
    return "(Net)" in odd.before


def taken(odd: Odd) -> list[str]:
    """The fields that a case takes beside x."""
    return [name for name in odd.fields if name in odd.args]


def joined(cases: Sequence[Odd]) -> str:
    """The text of a model that runs cases one after the other."""
    texts = [
        case_text.format(
            number=i,
            before=indent(dedent(odd.before).strip("\n") or "pass", 4 * " "),
            init=indent(dedent(odd.init).strip("\n"), 12 * " "),
            args=odd.args,
            forward=indent(dedent(odd.forward).strip("\n"), 12 * " "),
        )
        for i, odd in enumerate(cases)
    ]
    given = [", ".join(["x=x", *(f"{n}={n}" for n in taken(odd))]) for odd in cases]
    calls = [f"        x = torch.tanh(self.cases[{i}]({names}))" for i, names in enumerate(given)]
    made = ", ".join(f"case_{i}()" for i in range(len(cases)))
    fields = dict.fromkeys(["x", *(name for odd in cases for name in taken(odd))])
    net = net_text.format(cases=made, fields=", ".join(fields), calls="\n".join(calls))
    return "\n".join([imports, *texts, net])
