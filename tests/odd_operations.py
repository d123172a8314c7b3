"""Operations of torch that few models call."""

from odd_case import Odd

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
