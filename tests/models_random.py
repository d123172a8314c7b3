"""Random models as text: branches, skips, shared and tied modules, views, in-place operations,
dropout, frozen regions, loops over lists, several results, names that come again and again."""

from collections.abc import Iterator
from random import Random

width = 6
classes = """
import torch.nn.functional as F

class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, hidden), nn.Linear(hidden, 6)

    def forward(self, x):
        h = F.gelu(self.up(self.norm(x)))
        return x + self.down(h)

class Mix(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(6, 18)

    def forward(self, x, scale=None, *, bias=None):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q.view(x.shape[0], 4, self.heads, -1).transpose(1, 2)
        k = k.view(x.shape[0], 4, self.heads, -1).transpose(1, 2)
        v = v.view(x.shape[0], 4, self.heads, -1).transpose(1, 2)
        y = (q @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        y = y.transpose(1, 2).reshape(x.shape[0], 4, 6)
        if scale is not None:
            y = y * scale
        return y if bias is None else y + bias

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, y):
        return self.left(x) + y, torch.tanh(self.right(y))

class Noisy(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.dropout = nn.Dropout(p)
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("offset", torch.linspace(0, 1, 6))

    def forward(self, x):
        return self.dropout(x * self.weight) + self.offset
"""
names = ("x", "x", "y", "h", "skip", "out", "block", "loss", "step", "i", "stage", "key")


class Writer:
    """Writes one model."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.init: list[str] = []
        self.lines: list[str] = []
        self.values = ["x"]
        self.modules: list[str] = []

    def value(self) -> str:
        """A value there is, a late one more often."""
        if self.random.random() < 0.6:
            return (self.values or ["x"])[-1]
        return self.random.choice(self.values or ["x"])

    def target(self) -> str:
        name = self.random.choice(names)
        self.values = [v for v in self.values if v != name]
        return name

    def assign(self, text: str) -> None:
        name = self.target()
        self.lines.append(f"{name} = {text}")
        self.values.append(name)

    def module(self, text: str) -> str:
        name = f"{self.random.choice(['part', 'layer', 'mod'])}{len(self.init)}"
        self.init.append(f"self.{name} = {text}")
        return f"self.{name}"

    def single(self) -> str:
        """A module from one value to another, new or one that was there before."""
        if self.modules and self.random.random() < 0.25:
            return self.random.choice(self.modules)
        dropout = f"nn.Dropout({self.random.choice([0.1, 0.5])})"
        text = self.random.choice(
            [
                "nn.Linear(6, 6)",
                f"Block({self.random.choice([4, 8])})",
                f"Noisy({self.random.choice([0.0, 0.5])})",
                f"nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), {dropout})",
                f"nn.Sequential(Block(4), {dropout}, nn.LayerNorm(6))",
                dropout,
                "nn.ReLU(inplace=True)",
            ]
        )
        self.modules.append(self.module(text))
        return self.modules[-1]

    def statement(self) -> None:
        self.random.choice(
            [self.call, self.call, self.call, self.add, self.join, self.mix, self.pair, self.loop,
             self.plain, self.in_place, self.frozen, self.views, self.functional, self.kept]
        )()  # fmt: skip

    def call(self) -> None:
        value = self.value()
        self.assign(f"{self.single()}({value})")

    def add(self) -> None:
        operator = self.random.choice(["+", "-", "*"])
        self.assign(f"{self.value()} {operator} {self.value()}")

    def join(self) -> None:
        parts = [self.value() for _ in range(self.random.choice([2, 3]))]
        linear = self.module(f"nn.Linear({6 * len(parts)}, 6)")
        self.assign(f"{linear}(torch.cat([{', '.join(parts)}], dim=-1))")

    def mix(self) -> None:
        mix = self.module(f"Mix({self.random.choice([1, 2, 3])})")
        extra = self.random.choice(["", f", {self.value()}", f", bias={self.value()}"])
        self.assign(f"{mix}({self.value()}{extra})")

    def pair(self) -> None:
        arguments = f"({self.value()}, y={self.value()})"
        pair, one = self.module("Pair()"), self.target()
        self.values.append(one)
        other = self.random.choice([n for n in names if n != one] + ["_"])
        self.lines.append(f"{one}, {other} = {pair}{arguments}")
        self.values = [v for v in self.values if v != other] + ([other] if other != "_" else [])

    def loop(self) -> None:
        count = self.random.choice([2, 3, 4])
        text = self.random.choice(["Block(4)", "nn.Linear(6, 6)", "Noisy(0.5)", "nn.Dropout(0.2)"])
        blocks = self.module(f"nn.ModuleList({text} for _ in range({count}))")
        value = self.value()
        name = self.target()
        self.lines += [f"{name} = {value}"] if name != value else []
        self.lines += [f"for element in {blocks}:", f"    {name} = element({name})"]
        self.values.append(name)

    def kept(self) -> None:
        """A loop whose values are read afterwards."""
        blocks = self.module("nn.ModuleList(Block(4) for _ in range(3))")
        value = self.value()
        self.lines += [f"many = [{value}]", f"for element in {blocks}:"]
        self.lines.append("    many.append(element(many[-1]))")
        self.assign("torch.stack(many).sum(dim=0) + many[1]")

    def plain(self) -> None:
        weight = self.module("nn.Parameter(torch.ones(6))")
        self.assign(f"{self.value()} * {weight}")

    def in_place(self) -> None:
        """On a value of its own, or on a part of one."""
        self.assign(f"{self.value()} + 0.5")
        name = self.values[-1]
        change = [f"{name} += 1", f"{name}.mul_(0.5)", f"{name}[:, 1:] *= 2", f"F.relu_({name})"]
        self.lines.append(self.random.choice(change))

    def frozen(self) -> None:
        block, value = self.module("Block(4)"), self.value()
        name = self.target()
        self.lines += ["with torch.no_grad():", f"    {name} = {block}({value}) + 1"]
        self.assign(f"{name} + {self.value()}")

    def views(self) -> None:
        self.assign(
            self.random.choice(
                [
                    f"{self.value()}.transpose(1, 2).flip(1).transpose(1, 2)",
                    f"{self.value()}.view(-1, 6).reshape({self.value()}.shape)",
                    f"{self.value()}.mean(dim=1, keepdim=True).expand(-1, 4, -1)",
                    f"torch.stack({self.value()}.unbind(dim=1), dim=1)",
                    f"{self.value()}[:, torch.tensor([3, 1, 2, 0])]",
                ]
            )
        )

    def functional(self) -> None:
        self.assign(
            self.random.choice(
                [
                    f"F.dropout({self.value()}, 0.5, self.training)",
                    f"torch.where({self.value()} > 0, {self.value()}, {self.value()}.detach())",
                    f"F.layer_norm({self.value()}, (6,))",
                    f"{self.value()} * torch.arange(4.0)[:, None] / 4",
                    f"{self.value()} + torch.ones({self.value()}.shape[0], 4, 1)",
                ]
            )
        )

    def tie(self) -> None:
        linears = [line.split(" = ")[0] for line in self.init if line.endswith("nn.Linear(6, 6)")]
        if len(linears) > 1 and self.random.random() < 0.5:
            first, other = self.random.sample(linears, 2)
            self.init.append(f"{other}.weight = {first}.weight")

    def code(self) -> str:
        for _ in range(self.random.randint(3, 9)):
            self.statement()
        self.tie()
        trained = self.module("nn.Linear(6, 1)")
        total = " + ".join(sorted(set(self.values[-3:]))) or "x"
        body = [*self.lines, f"return {trained}({total}).square().mean()"]
        return "\n".join(
            [
                classes,
                "class Net(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *(f"        {line}" for line in self.init),
                "",
                "    def forward(self, x):",
                *(f"        {line}" for line in body),
                "",
                "def build():",
                "    return Net()",
            ]
        )


def random_model(seed: int) -> str:
    """Text with a function `build`: a model from x, [batch, 4, 6], to its loss."""
    return Writer(seed).code()


def random_cuts(layers: list[str], seed: int) -> Iterator[list[str]]:
    """Some ways to cut a model between its layers."""
    random = Random(seed)
    for stages in {1, 2, random.randint(2, 4), random.randint(3, 5)}:
        if stages <= len(layers):
            yield [layers[i] for i in sorted(random.sample(range(1, len(layers)), stages - 1))]
