"""Odd models: what people write that a compiler may trip over, each as a few lines of a forward.

Each case makes x, float[batch, 4, 6], from x in `forward`, with what `init` holds. Between them
stands `self.mid`, a Linear at which tests cut, so that what was made before it goes over the cut.
"""

from collections.abc import Sequence
from textwrap import dedent, indent

from odd_case import Odd
from odd_modules import structure
from odd_operations import operations
from odd_state import gradients, parameters, random, state
from odd_tensors import complex_, crossing, einops_, in_place

imports = """
import dataclasses
import functools
import math
from collections import namedtuple
from typing import NamedTuple

import einops
import torch.nn.functional as F
from einops import einsum, rearrange, reduce, repeat
from einops.layers.torch import Rearrange, Reduce
from torch.nn.utils import parametrizations, parametrize, weight_norm
from torch.utils.checkpoint import checkpoint
"""

more = {
    "n": {"shape": [4], "dtype": "int64", "high": 5},
    "m": {"shape": [4], "dtype": "int64", "high": 2},
    "unread": {"shape": [3]},
}

groups = {
    "einops": einops_,
    "gradients": gradients,
    "in place": in_place,
    "complex": complex_,
    "crossing": crossing,
    "structure": structure,
    "parameters": parameters,
    "state": state,
    "random": random,
    "operations": operations,
}


def code_of(odd: Odd) -> str:
    """The text of a model."""
    own = dedent(odd.before).strip("\n")
    model = f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mid, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
{indent(dedent(odd.init).strip(chr(10)), 8 * " ")}

    def forward(self, {odd.args}):
        x = torch.tanh(self.first(x))
{indent(dedent(odd.forward).strip(chr(10)), 8 * " ")}
        return self.last(x).mean(dim=1)
"""
    parts = [
        imports,
        *([model, own] if stands_alone(odd) else [own, model]),
        "def build():\n    return Net()\n",
    ]
    return "\n\n".join(parts)


case_text = """
def case_{number}():
{before}

    class Case{number}(nn.Module):
        def __init__(self):
            super().__init__()
            self.mid = nn.Linear(6, 6)
{init}

        def forward(self, {args}):
{forward}
            return x

    return Case{number}()
"""
net_text = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        self.cases = nn.ModuleList([{cases}])

    def forward(self, {fields}):
        x = torch.tanh(self.first(x))
{calls}
        return self.last(x).mean(dim=1)


def build():
    return Net()
"""


def stands_alone(odd: Odd) -> bool:
    """Whether a case is more than a block of a model."""
    return "(Net)" in odd.before


def taken(odd: Odd) -> list[str]:
    """The fields that a case takes beside x."""
    return [name for name in odd.fields if name in odd.args]


def joined(cases: Sequence[Odd]) -> str:
    """The text of a model that runs cases one after the other."""
    texts = [
        case_text.format(
            number=i,
            before=indent(dedent(odd.before).strip("\n") or "pass", 4 * " "),
            init=indent(dedent(odd.init).strip("\n"), 12 * " "),
            args=odd.args,
            forward=indent(dedent(odd.forward).strip("\n"), 12 * " "),
        )
        for i, odd in enumerate(cases)
    ]
    given = [", ".join(["x=x", *(f"{n}={n}" for n in taken(odd))]) for odd in cases]
    calls = [f"        x = torch.tanh(self.cases[{i}]({names}))" for i, names in enumerate(given)]
    made = ", ".join(f"case_{i}()" for i in range(len(cases)))
    fields = dict.fromkeys(["x", *(name for odd in cases for name in taken(odd))])
    net = net_text.format(cases=made, fields=", ".join(fields), calls="\n".join(calls))
    return "\n".join([imports, *texts, net])
