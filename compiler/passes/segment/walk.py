"""The walk over the module calls, from the root down."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ...ir.graph import CallId, Graph

ROOT: CallId = ("", 0)
ELEMENT_SHARE, CALL_SHARE = 4, 16
"""An element of a container is a layer up to 1/4 of the model, any other call up to 1/16."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive ops, `start` to before `stop`: a whole module call, or loose ops of `owner`."""

    owner: CallId
    whole: bool
    start: int
    stop: int


def walk(graph: Graph, weights: Sequence[int]) -> list[Run]:
    """The runs of the graph, in op order. `weights` has the size of each op."""
    chains = tuple(enclosing_calls(graph, op.call) for op in graph.ops)
    sizes = Counter(call for chain in chains for call in chain)
    return list(Walk(graph, chains, sizes, weights).runs(ROOT, 1, 0, len(graph.ops)))


def enclosing_calls(graph: Graph, call: CallId) -> tuple[CallId, ...]:
    """A call and those around it, the root first."""
    chain = [call]
    while chain[-1] != ROOT:
        made = graph.calls.get(chain[-1])
        chain.append(made.parent if made and made.parent else ROOT)
    return tuple(reversed(chain))


@dataclass(frozen=True, slots=True)
class Walk:
    """What the walk looks at."""

    graph: Graph
    chains: tuple[tuple[CallId, ...], ...]
    """The calls around each op."""
    sizes: Counter[CallId]
    """How many ops each call has."""
    weights: Sequence[int]

    def runs(self, call: CallId, depth: int, start: int, stop: int) -> Iterator[Run]:
        """The runs of a call, `depth` deep in the chains, that becomes several layers.

        A call whose ops do not follow each other makes several runs, none of them whole.
        """
        for inner, group in groupby(range(start, stop), lambda at: self.inner(at, depth)):
            ops = list(group)
            first, end = ops[0], ops[-1] + 1
            if inner is None:
                yield Run(call, whole=False, start=first, stop=end)
            elif self.is_layer(inner, depth + 1, first, end):
                yield Run(inner, whole=len(ops) == self.sizes[inner], start=first, stop=end)
            else:
                yield from self.runs(inner, depth + 1, first, end)

    def inner(self, at: int, depth: int) -> CallId | None:
        """The call around an op at a depth, None for an op that is not so deep."""
        return self.chains[at][depth] if len(self.chains[at]) > depth else None

    def is_layer(self, call: CallId, depth: int, start: int, stop: int) -> bool:
        """The rule of the pass."""
        path, _ = call
        module = self.graph.modules.get(path)
        if (module is not None and module.constructor is not None) or all(
            self.inner(at, depth) is None for at in range(start, stop)
        ):
            return True
        parent = self.graph.modules.get(path.rpartition(".")[0])
        element = parent is not None and parent.indexed and len(parent.children) > 1
        share = sum(self.weights[start:stop]) * (ELEMENT_SHARE if element else CALL_SHARE)
        return share <= sum(self.weights)
