"""An exported program -> ops of the graph, as traced: nothing is dropped or renamed here but what only
torch's bookkeeping needs."""

import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.export.graph_signature import InputKind
from torch.fx import Node

from ...errors import CaptureError, Location
from ...ir.graph import Arg, CallId, Items, Op, Ref, State, Statement, TensorMeta
from .arguments import dtype_name, spelling, to_arg
from .export import RawCall, Traced
from .private import inline_region
from .statements import Frame, frames, statement, users_frame
from .user import is_users, place

machine_flags = frozenset(("cudnn_enable", "cudnn_enabled"))
"""Torch passes what the machine has; the script's machine decides for itself."""


@dataclass
class Raw:
    """Ops as traced, with what later steps need to know about them. Built up, then read only."""

    ops: list[Op] = field(default_factory=list)
    values: dict[str, TensorMeta] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    states: dict[str, TensorMeta] = field(default_factory=dict)
    """Parameters and buffers, by the name that State gives them."""
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    """Literals of forward, by the name that State gives them."""
    output: Arg = None
    calls: dict[CallId, RawCall] = field(default_factory=dict)
    call_statements: dict[CallId, int] = field(default_factory=dict)
    parents: dict[CallId, CallId] = field(default_factory=dict)
    statements: dict[int, Statement] = field(default_factory=dict)


class Converter:
    """Walks the traced nodes of one program in order."""

    def __init__(self, traced: Traced) -> None:
        self.raw = Raw()
        self.traced = traced
        self.nodes: dict[str, Arg] = {}
        """Traced node -> what it is in the graph."""
        self.running: dict[CallId, tuple[tuple[str, int], int, frozenset[str]]] = {}
        """Call -> (its current statement, that statement's number, containers entered in it)."""

    def convert(self) -> Raw:
        program = self.traced.program
        specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        for node in placeholders:
            self.placeholder(node, specs[node.name])
        self.walk(program.graph.nodes, grad=True)
        for index, node in enumerate(placeholders):
            self.nodes[f"arg{index}_1"] = self.nodes[node.name]  # as hooks see it while tracing
        self.raw.calls = {
            call: RawCall(
                tuple((name, self.rename(value)) for name, value in noted.arguments), noted.positional,
                self.rename(noted.output),
            )
            for call, noted in self.traced.calls.items()
        }  # fmt: skip
        return self.raw

    def placeholder(self, node: Node, spec: torch.export.graph_signature.InputSpec) -> None:
        if spec.kind == InputKind.USER_INPUT:
            self.nodes[node.name] = Ref(node.name)
            self.raw.values[node.name] = meta_of(node.meta["val"])
            self.raw.inputs.append(node.name)
            return
        fqn = str(spec.target).removeprefix("model.")
        self.nodes[node.name] = State(fqn)
        self.raw.states[fqn] = meta_of(node.meta["val"])
        if spec.kind == InputKind.CONSTANT_TENSOR and "lifted_tensor" in fqn:
            self.raw.constants[fqn] = self.traced.program.constants[str(spec.target)]

    def walk(self, nodes: Iterable[Node], *, grad: bool) -> None:
        """Add the ops of a (sub)graph; its placeholders are known already."""
        for node in nodes:
            if node.op == "call_function":
                region = inline_region(node)
                if region is not None:
                    self.region(node, *region)
                elif node.target is operator.getitem:
                    source, index = node.args
                    self.nodes[node.name] = self.nodes[source.name][index]  # type: ignore[union-attr, index]
                else:
                    self.op(node, grad=grad)
            elif node.op == "output":
                self.raw.output = self.rename_nodes(node.args[0])

    def region(
        self,
        node: Node,
        graph: torch.fx.Graph,
        inputs: tuple[object, ...],
        grad: bool,
        autocast: str | None,
    ) -> None:
        """A no_grad region: its ops in place, marked."""
        if autocast is not None:
            raise CaptureError(
                "an autocast region inside forward is not supported yet",
                users_location(node),
                "leave it out; the whole model runs in the spec's precision",
            )
        outer = self.raw.output
        for inner, value in zip(
            (n for n in graph.nodes if n.op == "placeholder"), inputs, strict=True
        ):
            self.nodes[inner.name] = self.rename_nodes(value)
        self.walk(graph.nodes, grad=grad)
        self.nodes[node.name], self.raw.output = self.raw.output, outer

    def rename_nodes(self, value: object) -> Arg:
        """Nodes in a nest of arguments, as arguments of the graph."""
        return to_arg(value, lambda item: self.nodes[item.name] if isinstance(item, Node) else None)

    def rename(self, argument: Arg) -> Arg:
        """Traced names in what hooks noted, as the graph names them; None for what the trace lost."""
        if isinstance(argument, Ref):
            return self.nodes.get(argument.name)
        if isinstance(argument, tuple):
            return tuple(map(self.rename, argument))
        if isinstance(argument, Items):
            return Items(tuple((key, self.rename(value)) for key, value in argument.items))
        return argument

    def op(self, node: Node, *, grad: bool) -> None:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            raise CaptureError(f"{target} has no form in a script", users_location(node))
        call, number = self.place(node)
        schema = target._schema
        defaults = [is_default(a, v) for a, v in zip(schema.arguments, node.args, strict=False)]
        optional = [
            default and a.has_default_value()
            for a, default in zip(schema.arguments, defaults, strict=False)
        ]
        given = max((i + 1 for i, left_out in enumerate(optional) if not left_out), default=0)
        outputs = self.outputs(node)
        frame = users_frame(frames(node.stack_trace))
        op = Op(
            name=node.name,
            target=str(target),
            args=tuple(self.rename_nodes(a) for a in node.args[:given]),
            kwargs=tuple(
                (k, self.rename_nodes(v))
                for k, v in node.kwargs.items()
                if not dropped(schema, k, v)
            ),
            arg_names=tuple(a.name for a in schema.arguments)[:given],
            outputs=outputs,
            call=call,
            mutates=self.aliased(node, write=True),
            views=self.aliased(node, write=False),
            random=torch.Tag.nondeterministic_seeded in target.tags and draws(target, node),
            grad=grad,
            where=f"{frame.file}:{frame.line}" if frame else "",
            statement=number,
            at_default=frozenset(
                a.name for a, default in zip(schema.arguments, defaults, strict=False) if default
            ),
            spelling=spelling(target),
        )
        self.raw.ops.append(op)

    def outputs(self, node: Node) -> tuple[str, ...]:
        """Name the op's values: the node's own name, or those of the nodes that pick from it."""
        value = node.meta.get("val")
        if not isinstance(value, list | tuple):
            self.nodes[node.name] = Ref(node.name)
            if isinstance(value, torch.Tensor):
                self.raw.values[node.name] = meta_of(value)
            return (node.name,)
        picked = {user.args[1]: user.name for user in node.users if user.target is operator.getitem}
        names = tuple(picked.get(i, "") for i in range(len(value)))
        for name, tensor in zip(names, value, strict=True):
            if name:
                self.raw.values[name] = meta_of(tensor)
        self.nodes[node.name] = tuple(Ref(name) for name in names)
        return names

    def aliased(self, node: Node, *, write: bool) -> tuple[str, ...]:
        """Values and fqns that the op writes, or whose storage its outputs share."""
        schema = node.target._schema  # type: ignore[union-attr]
        shared = {s for r in schema.returns if r.alias_info for s in r.alias_info.before_set}
        found = []
        for value, argument in zip(node.args, schema.arguments, strict=False):
            alias = argument.alias_info
            if alias and (alias.is_write if write else shared & alias.before_set):
                found += [
                    str(self.nodes[n.name])
                    for n in (value if isinstance(value, list | tuple) else [value])
                    if isinstance(n, Node)
                ]
        if write:
            found += [str(self.nodes[n.name]) for n in running_statistics(node)]
        return tuple(found)

    def place(self, node: Node) -> tuple[CallId, int]:
        """The module call around a node, and the number of the statement it belongs to there."""
        stack = [
            (
                str(path).removeprefix("model").removeprefix("."),
                int((re.findall(r"@(\d+)$", key) or ["0"])[0]),
            )
            for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items()
        ][1:]  # the first is Training
        if not stack:
            return ("", 0), self.number(("", -1), Frame("", 0), "")  # the loss
        lines = frames(node.stack_trace)[1:]  # likewise
        aligned = len(lines) == len(stack)
        for depth, child in enumerate(stack[1:]):
            if child not in self.raw.call_statements:
                line = lines[depth] if aligned else None
                self.raw.parents[child] = stack[depth]
                self.raw.call_statements[child] = self.number(stack[depth], line, child[0])
        own = lines[-1] if aligned else users_frame(frames(node.stack_trace))
        return stack[-1], self.number(stack[-1], own, "")

    def number(self, call: CallId, frame: Frame | None, child: str) -> int:
        """The number of the statement that runs in a call: a new one whenever the statement changes,
        goes on to another child of the same container, or calls a child again (a loop)."""
        line, targets = statement(frame) if frame and frame.file else (0, ())
        targets = targets if frame and is_users(frame.file) else ()
        key = (frame.file, line) if frame else ("", 0)
        before, number, entered = self.running.get(call, (("", -1), 0, frozenset()))
        container = re.sub(r"\.\d+$", "", child) if re.search(r"\.\d+$", child) else ""
        if frame is None or key != before or {container, child} & entered:
            number, entered = len(self.raw.statements) + 1, frozenset()
            self.raw.statements[number] = Statement(f"{key[0]}:{key[1]}" if key[0] else "", targets)
        self.running[call] = (key, number, (entered | {container, child}) - {""})
        return number


def running_statistics(node: Node) -> list[Node]:
    """Buffers that a norm writes in training, which its schema keeps quiet about."""
    arguments = {a.name: v for a, v in zip(node.target._schema.arguments, node.args, strict=False)}  # type: ignore[union-attr]
    if not (arguments.get("training") or arguments.get("use_input_stats")):
        return []
    found = (arguments.get(name) for name in ("running_mean", "running_var"))
    return [value for value in found if isinstance(value, Node)]


def is_default(argument: torch._C.Argument, value: object) -> bool:
    """Whether a value is what the schema takes anyway; flags of the machine count as such."""
    if argument.name in machine_flags:
        return True
    return (
        argument.has_default_value()
        and type(argument.default_value) is type(value)
        and argument.default_value == value
    )


def dropped(schema: torch._C.FunctionSchema, name: str, value: object) -> bool:
    """Whether a keyword argument says nothing."""
    argument = next(a for a in schema.arguments if a.name == name)
    return name in ("pin_memory", "layout") or is_default(argument, value)


def draws(target: torch._ops.OpOverload, node: Node) -> bool:
    """Whether an op that can draw random numbers does: not dropout with p = 0, say."""
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if given.get("train", True) is False or given.get("training", True) is False:
        return False
    if "dropout_p" in names and "dropout_p" not in given:
        return False
    return all(given.get(name, 1) != 0 for name in ("p", "dropout_p", "dropout"))


def users_location(node: Node) -> Location | None:
    frame = users_frame(frames(node.stack_trace))
    return place(frame.file, frame.line) if frame else None


def meta_of(value: torch.Tensor) -> TensorMeta:
    """Shape, dtype and order in memory of a traced tensor."""
    strides: tuple[int, ...] = value.stride()
    order = tuple(sorted(range(value.dim()), key=lambda dim: -strides[dim]))
    dense = value.permute(order).is_contiguous() and not value.is_contiguous()
    shape = tuple(int(size) for size in value.shape)
    return TensorMeta(shape, dtype_name(value.dtype), order=order if dense else ())
