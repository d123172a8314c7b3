"""What forwards do with tensors: einops, writes in place, complex numbers, what crosses a cut."""

from odd_case import Odd

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
