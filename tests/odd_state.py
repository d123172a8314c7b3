"""Gradients, weights made by other means, state and randomness in forward."""

from odd_case import Odd

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
