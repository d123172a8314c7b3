"""How models are put together."""

from odd_case import Odd

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
