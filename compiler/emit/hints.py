"""What to call a value outside of the statement that makes it: as the user's code does there."""

from collections.abc import Mapping

from ..ir.graph import Arg, Graph, Op, Ref, Statement, references


def name_values(graph: Graph) -> dict[str, str]:
    """The name that the outermost statement assigns through which a value passes, for each value
    that has one; for one inside a call, the name that the call's result gets."""
    names = {
        name: around
        for op in graph.ops
        if (around := name_around(graph, op))
        for name in op.outputs
    }
    names |= name_inside(graph)
    for call in reversed(list(graph.calls.values())):  # inner calls before those around them
        names |= assigned_by_call(graph.statements.get(call.statement), call.output)
    return names_in_sequence(graph, names) | names | dict(graph.names)


def names_in_sequence(graph: Graph, names: Mapping[str, str]) -> dict[str, str]:
    """What goes through an nn.Sequential keeps the name with which it came, as in a loop."""
    found = {i.name: i.name for i in graph.inputs} | dict(names)
    for call in sorted(graph.calls.values(), key=lambda call: call.path.count(".")):  # outer first
        around = graph.calls.get(call.parent) if call.parent else None
        if around is None or not graph.modules[around.path].sequential:
            continue
        given = elements(tuple(value for _, value in around.arguments))[0]
        if isinstance(call.output, Ref) and given in found:
            found.setdefault(call.output.name, found[given])
    return found


def name_inside(graph: Graph) -> dict[str, str]:
    """The name that the statement assigns that makes a value, for each value that has one."""
    names: dict[str, str] = {}
    for op in graph.ops:
        names |= assigned(graph.statements.get(op.statement), op.outputs)
    return names


def name_around(graph: Graph, op: Op) -> str:
    """The one name for the result of the innermost call around an op of which that is known."""
    call = graph.calls.get(op.call)
    while call is not None:
        if name := single_target(graph, call.statement):
            return name
        call = graph.calls.get(call.parent) if call.parent else None
    return ""


def single_target(graph: Graph, number: int) -> str:
    """The one name that a statement assigns, or ""."""
    statement = graph.statements.get(number)
    return statement.targets[0] if statement and len(statement.targets) == 1 else ""


def assigned(statement: Statement | None, values: tuple[str, ...]) -> Mapping[str, str]:
    """The names that a statement gives to the values of its right side."""
    if statement is None or len(statement.targets) != len(values):
        return {}
    return {value: name for value, name in zip(values, statement.targets, strict=True) if value}


def assigned_by_call(statement: Statement | None, output: Arg) -> Mapping[str, str]:
    """The names that a statement gives to what a call returns; all of a tuple has its one name."""
    parts = output if isinstance(output, tuple) else (output,)
    if statement is None or len(statement.targets) != len(parts):
        return {}
    inner = {
        ref.name: name
        for part, name in zip(parts, statement.targets, strict=True)
        for ref in references(part)
        if isinstance(part, tuple) and isinstance(ref, Ref) and name != "_"
    }
    return {**inner, **assigned(statement, elements(output))}


def elements(output: Arg) -> tuple[str, ...]:
    """The values of a call's output, "" for those that are none."""
    parts = output if isinstance(output, tuple) else (output,)
    return tuple(part.name if isinstance(part, Ref) else "" for part in parts)
