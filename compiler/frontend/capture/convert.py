"""An exported program -> ops of the graph, as traced: nothing is dropped or renamed here but what
only torch's bookkeeping needs."""

import operator
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx import Node

from ...errors import CaptureError
from ...ir.graph import Arg, Items, Op, Ref, State, TensorMeta
from . import whole
from .applied import make_op
from .arguments import dtype_name, spelling, to_arg
from .export import RawCall, Traced
from .loss_state import Held, find_held
from .overloads import without_out
from .places import Places, module_calls, module_path, region_mark, users_location
from .private import OpOverload, schema_of
from .raw import Raw
from .registered import module_of
from .remedies import needs_values, other_way, refuse_sparse
from .schema import draws, dropped, given_positionals, is_default, running_statistics
from .statements import frames, users_frame
from .trees import tree_leaves
from .user import location

recurrent = frozenset(f"aten::{name}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))
"""Each kind of device, and each CPU, runs these in a way of its own."""


class Mode(NamedTuple):
    """What holds around an operation."""

    grad: bool
    autocast: str | None


class Converter:
    """Walks the traced nodes of one program in order."""

    def __init__(self, traced: Traced, folder: Path, taken: frozenset[str], held: Held) -> None:
        self.raw, self.held, self.traced = Raw(checkpoints=traced.checkpoints), held, traced
        self.folder = folder
        """Of the model's file."""
        self.taken = taken
        """Names of parameters and buffers: a value has none of them."""
        self.mode = Mode(grad=True, autocast=traced.autocast)
        self.outer: list[str | None] = []
        """The autocasts around the region at hand."""
        self.nodes: dict[Node, Arg] = {}
        """Traced node -> what it is in the graph."""
        self.names: dict[str, Arg] = {}
        """The same by the name that hooks saw."""
        self.places = Places(traced.keys)

    def convert(self) -> Raw:
        program = self.traced.program
        specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        for node in placeholders:
            self.placeholder(node, specs[node.name])
        self.walk(program.graph.nodes)
        traced = (n for n in placeholders if specs[n.name].kind != InputKind.CONSTANT_TENSOR)
        for index, node in enumerate(traced):  # constants are put in afterwards
            self.names[f"arg{index}_1"] = self.nodes[node]  # as hooks see it while tracing
        self.raw.calls = {
            call: RawCall(
                tuple((name, self.rename(value)) for name, value in noted.arguments),
                noted.positional, self.rename(noted.output),
            )
            for call, noted in self.traced.calls.items()
        }  # fmt: skip
        self.raw.ops = [self.leaf(op) if op.target == whole.target else op for op in self.raw.ops]
        self.raw.updates = {str(a) for n, a in self.names.items() if n in self.traced.assigned.late}
        self.refuse_assignments()
        self.raw.call_statements, self.raw.parents, self.raw.statements = (
            self.places.call_statements, self.places.parents, self.places.statements,
        )  # fmt: skip
        return self.raw

    def leaf(self, op: Op) -> Op:
        """The operation of a leaf, with all that its call was given."""
        call = self.raw.calls[op.call]
        return whole.with_call(op, call.arguments, call.positional)

    def placeholder(self, node: Node, spec: InputSpec) -> None:
        if spec.kind == InputKind.USER_INPUT:
            self.nodes[node] = Ref(node.name)
            self.raw.values[node.name] = meta_of(node.meta["val"])
            self.raw.inputs.append(node.name)
            return
        fqn = str(spec.target).removeprefix("model.")
        if spec.kind == InputKind.CUSTOM_OBJ:
            raise CaptureError(
                f"forward reads {fqn}, an object that no script has, like a torch.Generator",
                next(filter(None, map(users_location, node.users)), None),
                "torch.randn and its like without a generator: the spec's seed makes them repeat",
            )
        own, value = find_held(self.held, self.traced.program, str(spec.target))
        fqn = own or fqn
        self.nodes[node] = State(fqn)
        self.raw.states[fqn] = meta_of(node.meta["val"])
        if own or (spec.kind == InputKind.CONSTANT_TENSOR and "lifted_tensor" in fqn):
            self.raw.constants[fqn] = value  # type: ignore[assignment]  # it has one

    def refuse_assignments(self) -> None:
        """Raises CaptureError where forward assigns a tensor that it reads and is no buffer."""
        for fqn, name in self.traced.assigned.tensors.items():
            if fqn in self.raw.states:
                value = str(self.names.get(name))
                where = (op.where for op in self.raw.ops if value in op.outputs)
                raise CaptureError(
                    f"forward assigns {fqn}, which it also reads, and which is no buffer",
                    location(next(where, "")),
                    f'self.register_buffer("{fqn.rpartition(".")[2]}", ...) in __init__',
                )

    def walk(self, nodes: Iterable[Node]) -> None:
        """Add the ops of the graph; its placeholders are known already."""
        for node in nodes:
            if node.op == "call_function":
                mark = region_mark(node)
                if mark is not None:
                    self.change_mode(node, *mark)
                elif node.target is operator.getitem:
                    source, index = node.args
                    self.nodes[node] = self.names[node.name] = self.nodes[source][index]  # type: ignore[index]
                else:
                    self.op(node)
            elif node.op == "output":
                self.raw.output = self.rename_nodes(node.args[0])

    def change_mode(self, node: Node, what: str, value: Any) -> None:
        """Where a no_grad or autocast region begins or ends."""
        if what == "grad":
            self.mode = self.mode._replace(grad=value)
        elif what == "exit":
            self.mode = self.mode._replace(autocast=self.outer.pop())
        else:
            self.outer.append(self.mode.autocast)
            if value not in (None, "", "bfloat16"):
                raise CaptureError(
                    f"an autocast region in {value}: small gradients vanish in it unless the loss "
                    "is scaled, which scripts do not",
                    users_location(node),
                    "torch.bfloat16",
                )
            if value is not None:
                self.mode = self.mode._replace(autocast=value or None)

    def rename_nodes(self, value: object) -> Arg:
        """Nodes in a nest of arguments, as arguments of the graph."""
        return to_arg(value, lambda item: self.nodes[item] if isinstance(item, Node) else None)

    def rename(self, argument: Arg) -> Arg:
        """What hooks noted, under the graph's names for traced ones; None for what is lost."""
        if isinstance(argument, Ref):
            return self.names.get(argument.name)
        if isinstance(argument, tuple):
            return tuple(map(self.rename, argument))
        if isinstance(argument, Items):
            return Items(tuple((key, self.rename(value)) for key, value in argument.items))
        return argument

    def op(self, node: Node) -> None:
        target, where = node.target, users_location(node)
        if not isinstance(target, OpOverload):
            name = getattr(target, "__name__", str(target))
            transform = getattr(target, "__module__", "").startswith("torch._functorch")
            raise CaptureError(
                f"{'torch.vmap, or its like,' if transform else name} has no form in a script",
                where,
                other_way(name, transform=transform),
            )
        if target.namespace not in ("aten", "ppc"):
            module = module_of(target, self.folder, module_path(node), where)
            self.raw.registered[str(target)] = module
        if self.mode.autocast and schema_of(target).name in recurrent:
            message = f"what dtype {target} gives under autocast hangs on the machine"
            raise CaptureError(message, where, "precision: fp32")
        values = tree_leaves(node.meta.get("val"))
        if any(map(is_dynamic, values)):
            raise needs_values(where, [path for path, _ in module_calls(node)])
        refuse_sparse(values, where)
        out = node.kwargs.get("out")
        plain = without_out(target) if isinstance(out, Node) else None
        op = self.operation(node, plain or target)
        if target is torch.ops.ppc.apply.default:
            tensors, number = node.args
            given = [self.rename_nodes(tensor) for tensor in tensors]  # type: ignore[union-attr]
            op, function = make_op(op, self.traced.functions[number], given, self.folder)  # type: ignore[index]
            self.raw.functions[op.target] = function
            self.raw.registered |= {op.target: function.module} if function.module else {}
        self.raw.ops.append(op)
        if plain:
            self.write_out(op, node, self.rename_nodes(out))

    def operation(self, node: Node, target: OpOverload) -> Op:
        """A node as an op. `target`: its own, or that without `out`."""
        call, number = self.places.find(node)
        schema = schema_of(target)
        given = given_positionals(schema, node.args)
        said = {k: v for k, v in node.kwargs.items() if not dropped(schema, k, v)}
        outputs = self.outputs(node)
        frame = users_frame(frames(node.stack_trace))
        return Op(
            name=self.name(node),
            target=str(target),
            args=tuple(self.rename_nodes(a) for a in node.args[:given]),
            kwargs=tuple((k, self.rename_nodes(v)) for k, v in said.items()),
            arg_names=tuple(a.name for a in schema.arguments)[:given],
            outputs=outputs,
            call=call,
            mutates=self.aliased(node, write=True),
            views=self.aliased(node, write=False),
            random=draws(target, node.args, node.kwargs) or whole.draws(node),
            grad=self.mode.grad,
            autocast=self.mode.autocast,
            where=f"{frame.file}:{frame.line}" if frame else "",
            statement=number,
            at_default=frozenset(
                a.name
                for a, v in zip(schema.arguments, node.args, strict=False)
                if is_default(a, v)
            ),
            spelling=spelling(target),
        )

    def write_out(self, op: Op, node: Node, out: Arg) -> None:
        """What an op with `out` computed goes there, and whoever reads the op reads that."""
        written = (str(out),)
        name = f"{op.name}_out"
        self.raw.values[name] = self.raw.values[op.name]
        copy = replace(
            op, name=name, target="aten.copy_.default", args=(out, Ref(op.name)), kwargs=(),
            arg_names=("self", "src"), outputs=(name,), mutates=written, views=written,
            random=False, at_default=frozenset(), spelling="method",
        )  # fmt: skip
        self.raw.ops.append(copy)
        self.nodes[node] = self.names[node.name] = out

    def name(self, node: Node) -> str:
        """What the graph calls a node's value; torch numbers from 1 on."""
        return f"{node.name}_0" if node.name in self.taken else node.name

    def outputs(self, node: Node) -> tuple[str, ...]:
        """Name the op's values: the node's own name, or those of the nodes that pick from it."""
        value = node.meta.get("val")
        if not isinstance(value, list | tuple):
            name = self.name(node)
            self.nodes[node] = self.names[node.name] = Ref(name)
            if isinstance(value, torch.Tensor):
                self.raw.values[name] = meta_of(value)
            return (name,)
        picks = (user for user in node.users if user.target is operator.getitem)
        picked = {user.args[1]: self.name(user) for user in picks}
        names = tuple(picked.get(i, "") for i in range(len(value)))
        for name, tensor in zip(names, value, strict=True):
            if name:
                self.raw.values[name] = meta_of(tensor)
        self.nodes[node] = tuple(Ref(name) for name in names)
        return names

    def aliased(self, node: Node, *, write: bool) -> tuple[str, ...]:
        """Values and fqns that the op writes, or whose storage its outputs share."""
        schema = schema_of(node.target)
        shared = {s for r in schema.returns if r.alias_info for s in r.alias_info.before_set}
        found = []
        for value, argument in zip(node.args, schema.arguments, strict=False):
            alias = argument.alias_info
            if alias and (alias.is_write if write else shared & alias.before_set):
                found += [
                    str(self.nodes[n])
                    for n in (value if isinstance(value, list | tuple) else [value])
                    if isinstance(n, Node)
                ]
        if write:
            found += [str(self.nodes[n]) for n in running_statistics(node)]
        return tuple(found)


def is_dynamic(value: object) -> bool:
    """Whether a traced result is a number, or a tensor whose sizes are known only with the data."""
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return value is not None


def meta_of(value: torch.Tensor) -> TensorMeta:
    """Shape, dtype and order in memory of a traced tensor."""
    strides: tuple[int, ...] = value.stride()
    order = tuple(sorted(range(value.dim()), key=lambda dim: -strides[dim]))
    dense = value.permute(order).is_contiguous() and not value.is_contiguous()
    shape = tuple(int(size) for size in value.shape)
    return TensorMeta(shape, dtype_name(value.dtype), order=order if dense else ())
