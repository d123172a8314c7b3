"""The tree of a valid spec -> Spec, with every default filled in.

Most defaults are those of the dataclasses; the ones that depend on other keys are computed here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import Location
from ..ir.cluster import Cluster, Device, Link, Links
from ..ir.spec import (
    Arrays,
    Checkpoint,
    Data,
    Dataset,
    Factory,
    Group,
    InputSpec,
    LrSchedule,
    Model,
    Optimizer,
    Option,
    Parallel,
    Random,
    RandomField,
    Spec,
    Text,
    Tokens,
    Train,
    Value,
    Weight,
)
from .devices import known, unknown_gpu_links
from .optimizers import classes, defaults, frozen
from .quantity import (
    bandwidth_units,
    bytes_units,
    duration_units,
    flops_units,
    parse_quantity,
)

Tree = Mapping[str, Any]


def build(tree: Tree, path: Path, locations: Mapping[str, Location]) -> Spec:
    """The Spec. A section that the tree lacks is None: `load` never lets such a Spec out."""
    sections: dict[str, Any] = dict.fromkeys(("model", "data", "cluster"))
    for name, make in (("model", build_model), ("cluster", build_cluster)):
        if name in tree:
            sections[name] = make(tree[name])
    if "data" in tree:
        sections["data"] = build_data(tree["data"], sections["model"])
    train = build_train(tree.get("train", {}))
    parallel = build_parallel(tree.get("parallel", {}), train, sections["cluster"])
    return Spec(
        name=tree.get("name", path.stem),
        train=train,
        parallel=parallel,
        checkpoint=Checkpoint(**tree["checkpoint"]) if "checkpoint" in tree else None,
        path=path,
        locations=locations,
        **sections,
    )


def build_model(tree: Tree) -> Model:
    inputs = tree.get("inputs", {})
    named = [(None, field) for field in inputs] if isinstance(inputs, list) else inputs.items()
    return Model(
        factory=Factory(target=tree["factory"], args=build_arguments(tree.get("args", {}))),
        inputs=tuple((name, build_input(name, feed)) for name, feed in named),
        weight=build_weight(tree.get("weight", {})),
        leaf=tuple(tree.get("leaf", ())),
        **pick(tree, "loss", "coupled"),
    )


def build_weight(tree: Any) -> Weight:
    return Weight(kind=tree) if isinstance(tree, str) else Weight(**tree)


def build_input(name: str | None, feed: Any) -> InputSpec:
    if isinstance(feed, str):
        return InputSpec(field=feed)
    shape = tuple(feed["shape"]) if "shape" in feed else None
    return InputSpec(field=feed.get("field", name), shape=shape, dtype=feed.get("dtype"))


def build_arguments(tree: Tree) -> dict[str, Value]:
    return {name: build_value(value) for name, value in tree.items()}


def build_value(tree: Any) -> Value:
    if isinstance(tree, list):
        return tuple(map(build_value, tree))
    if isinstance(tree, Mapping) and "factory" in tree:
        return Factory(target=tree["factory"], args=build_arguments(tree.get("args", {})))
    if isinstance(tree, Mapping):
        return build_arguments(tree)
    value: Value = tree
    return value


def build_data(tree: Tree, model: Model | None) -> Data:
    last_batch = pick(tree, "last_batch")
    whole = tuple(tree.get("whole", ()))
    if tree["source"] in ("text", "tokens"):
        files, rest = tree["files"], pick(tree, "dtype", "sequence")
        patterns = (files,) if isinstance(files, str) else tuple(files)
        form: Any = Text if tree["source"] == "text" else Tokens
        made: Data = form(files=patterns, **rest, **last_batch)
        return made
    if tree["source"] == "arrays":
        return Arrays(files=tree["files"], whole=whole, **last_batch)
    if tree["source"] == "random":
        fields = {**shaped_inputs(model), **tree.get("fields", {})}
        forms = {name: build_random_field(field) for name, field in fields.items()}
        return Random(samples=tree["samples"], fields=forms, whole=whole, **last_batch)
    return Dataset(
        source=tree["source"],
        args=build_arguments(tree.get("args", {})),
        fields=tuple(tree.get("fields", ())),
        **pick(tree, "workers", "pad", "length"),
        whole=whole,
        **last_batch,
    )


def shaped_inputs(model: Model | None) -> dict[str, Tree]:
    """Random fields that model.inputs gives the shape of."""
    inputs = model.inputs if model else ()
    return {
        feed.field: {"shape": feed.shape[1:], **({"dtype": feed.dtype} if feed.dtype else {})}
        for _, feed in inputs
        if feed.shape
    }


def build_random_field(tree: Tree) -> RandomField:
    return RandomField(shape=tuple(tree.get("shape", ())), **pick(tree, "dtype", "low", "high"))


def build_train(tree: Tree) -> Train:
    names = (
        "global_batch", "steps", "epochs", "clip_norm", "clip_value", "after_step", "precision",
        "compile", "seed",
    )  # fmt: skip
    given = pick(tree, *names)
    if "epochs" in given:
        given["steps"] = None
    if "optimizer" in tree:
        given["optimizer"] = build_optimizer(tree["optimizer"])
    if "lr_schedule" in tree:
        course = tree["lr_schedule"]
        given["lr_schedule"] = LrSchedule(
            **({"name": course} if isinstance(course, str) else course)
        )
    if "timeout" in tree:
        given["timeout"] = parse_quantity(tree["timeout"], duration_units)
    return Train(**given)


def build_optimizer(tree: Any) -> Optimizer:
    """Only arguments that say something: what equals torch's default is left out."""
    given: Tree = {"name": tree} if isinstance(tree, str) else tree
    usual = defaults(given["name"])
    options = {key: frozen(given.get(key, value)) for key, value in usual.items()}
    groups = tuple(build_group(group, options) for group in given.get("groups", ()))
    lr: Any = options.pop("lr")
    made = differing(options, usual)
    return Optimizer(name=classes[given["name"]], lr=lr, options=made, groups=groups)


def build_group(tree: Tree, usual: Mapping[str, Option]) -> Group:
    """`usual`: all arguments of the optimizer's."""
    names = tree["params"]
    given = {key: frozen(tree[key]) for key in usual if key in tree}
    return Group(
        params=(names,) if isinstance(names, str) else tuple(names),
        options=differing(given, usual),
    )


def differing(options: Mapping[str, Option], usual: Mapping[str, Option]) -> dict[str, Option]:
    return {key: value for key, value in options.items() if value != usual[key]}


def build_cluster(tree: Tree) -> Cluster:
    device, usual = build_device(tree["device"])
    given = tree.get("links", {})
    links = Links(
        intra_node=build_link(given.get("intra_node", {}), usual.intra_node),
        inter_node=build_link(given.get("inter_node", {}), usual.inter_node),
    )
    return Cluster(device=device, links=links, **pick(tree, "nodes", "devices_per_node"))


def build_device(tree: Any) -> tuple[Device, Links]:
    """The device and the links usual with it."""
    if isinstance(tree, str):
        return known[tree]
    device, links = known["cpu"]
    memory, flops, bandwidth = device.memory, dict(device.flops), device.memory_bandwidth
    if "memory" in tree:
        memory = int(parse_quantity(tree["memory"], bytes_units))
    if "flops" in tree:
        flops = {name: parse_quantity(rate, flops_units) for name, rate in tree["flops"].items()}
        flops = {"fp64": flops["fp32"] / 2, "bf16": flops["fp32"]} | flops
    if "memory_bandwidth" in tree:
        bandwidth = parse_quantity(tree["memory_bandwidth"], bandwidth_units)
    made = Device(kind=tree["kind"], memory=memory, flops=flops, memory_bandwidth=bandwidth)
    return made, links if made.kind == "cpu" else unknown_gpu_links


def build_link(tree: Tree, usual: Link) -> Link:
    return Link(
        bandwidth=parse_quantity(tree.get("bandwidth", usual.bandwidth), bandwidth_units),
        latency=parse_quantity(tree.get("latency", usual.latency), duration_units),
    )


def build_parallel(tree: Tree, train: Train, cluster: Cluster | None) -> Parallel:
    """`auto` degrees become numbers here; where to cut is left to the planner."""
    data, cuts = tree.get("data", 1), tree.get("cuts", "auto")
    recompute = tree.get("recompute", "none")
    pipeline: Any = tree.get("pipeline", "auto")
    if pipeline == "auto" and isinstance(cuts, list):
        pipeline = len(cuts) + 1
    elif pipeline == "auto":
        pipeline = max(1, cluster.num_devices // data) if cluster else 1
    microbatches = tree.get("microbatches", "auto")
    if microbatches == "auto":
        microbatches = max(1, min(4 * pipeline, train.global_batch // data))
    schedule: Any = tree.get("schedule", "1f1b")
    return Parallel(
        pipeline=pipeline,
        data=data,
        schedule=schedule["kind"] if isinstance(schedule, dict) else schedule,
        microbatches=microbatches,
        cuts=tuple(cuts) if isinstance(cuts, list) else cuts,
        recompute=tuple(recompute) if isinstance(recompute, list) else recompute,
        sync_batch_norm=tree.get("sync_batch_norm", False),
    )


def pick(tree: Tree, *names: str) -> dict[str, Any]:
    """Those of the keys that are given."""
    return {name: tree[name] for name in names if name in tree}
