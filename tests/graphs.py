"""Small graphs made by hand, as capture would give them, and the specs to plan them."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

from ppc.errors import Location
from ppc.ir.cluster import Cluster, Device, Link, Links
from ppc.ir.graph import (
    Amount,
    Arg,
    Call,
    CallId,
    Constructor,
    Dim,
    Graph,
    Input,
    Module,
    Op,
    Parameter,
    Ref,
    State,
    TensorMeta,
)
from ppc.ir.spec import (
    Data,
    Factory,
    Model,
    Optimizer,
    Parallel,
    Random,
    Spec,
    Train,
)

BATCH = Dim()


class Builder:
    """Ops in the order in which they run; names, metas and modules are filled in."""

    def __init__(self) -> None:
        self.inputs: list[Input] = []
        self.parameters: dict[str, Parameter] = {}
        self.modules: dict[str, Module] = {}
        self.calls: dict[CallId, Call] = {}
        self.ops: list[Op] = []
        self.values: dict[str, TensorMeta] = {}
        self.module("", "Model")

    def input(self, name: str, *shape: int | Dim, dtype: str = "float32") -> Ref:
        meta = TensorMeta((BATCH, *shape), dtype)
        self.inputs.append(Input(name, name, meta))
        self.values[name] = meta
        return Ref(name)

    def module(
        self,
        path: str,
        cls: str,
        children: Sequence[str] = (),
        *,
        leaf: bool = False,
        indexed: bool = False,
    ) -> str:
        constructor = Constructor(f"nn.{cls}", (), ()) if leaf else None
        self.modules[path] = Module(
            path, cls, "", tuple(children), (), (), constructor, indexed=indexed
        )
        return path

    def call(self, path: str, number: int = 0, parent: CallId | None = None) -> None:
        """Enter a call, by default one that the first call of the module above it makes."""
        if path and parent is None:
            above = path.rpartition(".")[0]
            if above in self.modules and self.modules[above].cls in ("ModuleList", "ModuleDict"):
                above = above.rpartition(".")[0]  # these are never called
            self.call(above)
            parent = (above, 0)
        self.calls.setdefault((path, number), Call(path, number, (), 0, None, parent=parent))

    def parameter(
        self,
        fqn: str,
        *shape: int,
        trainable: bool = True,
        buffer: bool = False,
        aliases: Sequence[str] = (),
    ) -> State:
        meta = TensorMeta(shape, "float32", trainable and not buffer)
        self.parameters[fqn] = Parameter(fqn, meta, aliases=tuple(aliases), buffer=buffer)
        return State(fqn)

    def op(
        self,
        target: str,
        *args: Arg,
        call: str | CallId = "",
        shape: Sequence[int | Dim] | None = None,
        dtype: str = "float32",
        flops: int = 0,
        saved: int = 0,
        random: bool = False,
        views: Sequence[str] = (),
        mutates: Sequence[str] = (),
    ) -> Ref:
        """An op with one output, by default of the first operand's shape; amounts by sample."""
        call = call if isinstance(call, tuple) else (call, 0)
        operands = [a for a in args if isinstance(a, Ref | State)]
        metas = [
            self.parameters[o.fqn].meta if isinstance(o, State) else self.values[o.name]
            for o in operands
            if isinstance(o, Ref) or o.fqn in self.parameters
        ]
        name = f"v{len(self.ops)}"
        gradient = dtype.startswith("float") and any(m.requires_grad for m in metas)
        shape = tuple(shape) if shape is not None else metas[0].shape
        self.values[name] = TensorMeta(shape, dtype, gradient)
        self.call(*call)
        self.ops.append(
            Op(
                name=name,
                target=f"aten.{target}.default",
                args=args,
                kwargs=(),
                arg_names=(),
                outputs=(name,),
                call=call,
                mutates=tuple(mutates),
                views=tuple(views),
                random=random,
                flops=Amount(0, flops),
                saved_bytes=Amount(0, saved),
            )
        )
        return Ref(name)

    def linear(self, path: str, x: Ref, width_in: int, width: int, *, number: int = 0) -> Ref:
        """A leaf nn.Linear; its parameter is made at the first call."""
        self.module(path, "Linear", leaf=True)
        weight = State(f"{path}.weight")
        if weight.fqn not in self.parameters:
            self.parameter(weight.fqn, width, width_in)
        *shape, _ = self.values[x.name].shape
        count = elements(shape)
        return self.op(
            "linear",
            x,
            weight,
            call=(path, number),
            shape=(*shape, width),
            flops=2 * count * width * width_in,
            saved=4 * count * width_in,
        )

    def graph(self, loss: Ref) -> Graph:
        return Graph(
            model="Model",
            inputs=tuple(self.inputs),
            parameters=self.parameters,
            modules=self.modules,
            calls=self.calls,
            ops=tuple(self.ops),
            values=self.values,
            outputs=(("loss", loss.name),),
        )


def elements(shape: Sequence[int | Dim]) -> int:
    """Elements of one sample."""
    count = 1
    for size in shape:
        count *= size.coefficient if isinstance(size, Dim) else size
    return count


def mlp(widths: Sequence[int]) -> Graph:
    """A Sequential of linear layers, `net.0`, `net.1`, ...; the loss is the mean of the last."""
    b = Builder()
    x = b.input("x", widths[0])
    b.module("net", "Sequential", [str(i) for i in range(len(widths) - 1)], indexed=True)
    for i, (width_in, width) in enumerate(pairwise(widths)):
        x = b.linear(f"net.{i}", x, width_in, width)
    return b.graph(b.op("mean", x, shape=()))


def gpt(
    layers: int = 4,
    width: int = 32,
    vocab: int = 64,
    time: int = 16,
    *,
    tied: bool = False,
    dropout: bool = False,
) -> Graph:
    """specs/models/gpt.py with cross entropy on its logits."""
    b = Builder()
    tokens = b.input("tokens", time, dtype="int64")
    labels = b.input("labels", time, dtype="int64")
    b.module("blocks", "ModuleList", [str(i) for i in range(layers)], indexed=True)
    for path, cls in (("wte", "Embedding"), ("wpe", "Embedding"), ("drop", "Dropout")):
        b.module(path, cls, leaf=True)
    wte = b.parameter("wte.weight", vocab, width, aliases=["head.weight"] if tied else [])
    positions = b.op("arange", time, shape=(time,), dtype="int64")
    x = b.op("embedding", wte, tokens, call="wte", shape=(BATCH, time, width))
    wpe = b.parameter("wpe.weight", time, width)
    x = b.op("add", x, b.op("embedding", wpe, positions, call="wpe", shape=(time, width)))
    if dropout:
        x = b.op("dropout", x, 0.1, call="drop", random=True, saved=4 * time * width)
    for i in range(layers):
        x = block(b, f"blocks.{i}", x, width, time)
    b.module("ln_f", "LayerNorm", leaf=True)
    scale = b.parameter("ln_f.weight", width)
    x = b.op("layer_norm", x, scale, call="ln_f", saved=4 * time * width)
    b.module("head", "Linear", leaf=True)
    head = State("head.weight") if tied else b.parameter("head.weight", vocab, width)
    logits = b.op(
        "linear",
        x,
        head,
        call="head",
        shape=(BATCH, time, vocab),
        flops=2 * time * width * vocab,
        saved=4 * time * width,
    )
    flat = b.op("view", logits, shape=(Dim(time), vocab), views=[logits.name])
    loss = b.op("cross_entropy", flat, labels, shape=(), saved=4 * time * vocab)
    return b.graph(loss)


def block(b: Builder, path: str, x: Ref, width: int, time: int) -> Ref:
    """A transformer block: norm, attention, norm, MLP, each half added to its input."""
    b.module(path, "Block", ["ln_1", "attn", "ln_2", "mlp"])
    b.module(f"{path}.attn", "Attention", ["qkv", "proj"])
    b.module(f"{path}.mlp", "Sequential", ["0", "1", "2"], indexed=True)
    for norm in ("ln_1", "ln_2"):
        b.module(f"{path}.{norm}", "LayerNorm", leaf=True)
    scale = b.parameter(f"{path}.ln_1.weight", width)
    y = b.op("layer_norm", x, scale, call=f"{path}.ln_1", saved=4 * time * width)
    y = b.linear(f"{path}.attn.qkv", y, width, 3 * width)
    heads = [
        b.op("slice", y, i, call=f"{path}.attn", shape=(BATCH, time, width), views=[y.name])
        for i in range(3)
    ]
    flops = 4 * time * time * width
    y = b.op("sdpa", *heads, call=f"{path}.attn", flops=flops, saved=16 * time * width)
    y = b.linear(f"{path}.attn.proj", y, width, width)
    x = b.op("add", x, y, call=path)
    scale = b.parameter(f"{path}.ln_2.weight", width)
    y = b.op("layer_norm", x, scale, call=f"{path}.ln_2", saved=4 * time * width)
    y = b.linear(f"{path}.mlp.0", y, width, 4 * width)
    b.module(f"{path}.mlp.1", "GELU", leaf=True)
    y = b.op("gelu", y, call=f"{path}.mlp.1", saved=16 * time * width)
    y = b.linear(f"{path}.mlp.2", y, 4 * width, width)
    return b.op("add", x, y, call=path)


def make_spec(
    pipeline: int = 2,
    microbatches: int = 4,
    *,
    schedule: Literal["gpipe", "1f1b"] = "1f1b",
    cuts: tuple[str, ...] | Literal["auto"] = "auto",
    global_batch: int = 8,
    memory: int = 2**40,
    nodes: int = 1,
    devices_per_node: int = 16,
    optimizer: Optimizer | None = None,
    data: Data | None = None,
) -> Spec:
    """A spec on devices of 1e12 FLOP/s and 1e11 bytes/s."""
    link = Link(bandwidth=1e10, latency=1e-5)
    return Spec(
        name="small",
        path=Path("small.yaml"),
        model=Model(factory=Factory(target="model.py:build")),
        data=data or Random(samples=64, fields={}),
        train=Train(global_batch=global_batch, optimizer=optimizer or Optimizer()),
        cluster=Cluster(
            nodes=nodes,
            devices_per_node=devices_per_node,
            device=Device(
                kind="cpu",
                memory=memory,
                flops={"fp32": 1e12, "fp64": 5e11, "bf16": 2e12},
                memory_bandwidth=1e11,
            ),
            links=Links(intra_node=link, inter_node=Link(bandwidth=1e9, latency=1e-4)),
        ),
        parallel=Parallel(
            pipeline=pipeline, schedule=schedule, microbatches=microbatches, cuts=cuts
        ),
        locations={
            name: Location("small.yaml", line, 1)
            for line, name in enumerate(
                (
                    "parallel.pipeline",
                    "parallel.cuts",
                    "parallel.cuts[0]",
                    "parallel.cuts[1]",
                    "parallel.microbatches",
                    "parallel.schedule",
                    "cluster.device",
                ),
                1,
            )
        },
    )
