"""The mean that a step's loss and metrics are: names of the metrics, shares of the microbatches."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..ir.plan import Plan
from ..ir.spec import Weight
from ..ir.unit import Unit
from .boundary import free
from .expression import number, plain
from .reducer import sum_lines
from .scope import clean_outside


@dataclass(frozen=True, slots=True)
class Mean:
    """How the rank of the loss averages."""

    metrics: tuple[str, ...]
    """What the metrics are called in the script."""
    keys: tuple[str, ...]
    """And in the log."""
    weighted: bool
    """Whether shares follow from the data rather than from the numbers of samples."""
    even: bool
    replicas: int

    @property
    def batch_size(self) -> str:
        """The samples of a step, those of all replicas."""
        return "sum(sizes)" if self.replicas == 1 else "batch_size"

    @property
    def share(self) -> str:
        """What a microbatch's loss is multiplied by before it goes back."""
        if self.weighted:
            return " * shares[mb]"
        if not self.even:
            return f" * (sizes[mb] / {self.batch_size})"
        return " / MICROBATCHES" if self.replicas == 1 else " / (MICROBATCHES * REPLICAS)"

    @property
    def kept(self) -> list[str]:
        """Keep a microbatch's results, with its share where shares differ."""
        share = "" if self.even else f" * sizes[mb] / {self.batch_size}"
        share = self.share if self.weighted else share
        if not self.metrics:
            return [f"losses.append(loss.detach().double(){share})"]
        names = ", ".join(["loss", *self.metrics])
        return [
            f"results = [result.detach().double() for result in ({names})]",
            f"losses.append(torch.stack(results){share})",
        ]

    @property
    def total(self) -> str:
        """The step's means, or this replica's part of them."""
        if self.weighted or not self.even:
            if self.replicas == 1 and not self.weighted:
                return f"torch.stack(losses).sum({'0' if self.metrics else ''})"
            zeros = f"torch.zeros({1 + len(self.metrics) if self.metrics else '()'}"
            return f"sum(losses, {zeros}, dtype=torch.float64, device=device))"
        if self.replicas == 1:
            return f"torch.stack(losses).mean({'0' if self.metrics else ''})"
        return f"torch.stack(losses).sum({'0' if self.metrics else ''}) / (MICROBATCHES * REPLICAS)"


def make_mean(plan: Plan, unit: Unit, weight: Weight, taken: Sequence[str]) -> Mean:
    """`taken`: names that mean something else in forward."""
    keys = tuple(name for name, _ in unit.outputs[1:])
    names: list[str] = []
    for key in keys:
        names.append(free(clean_outside(key), {*taken, *names}))
    return Mean(tuple(names), keys, weight.kind != "samples", plan.even, plan.replicas)


def weigh_lines(plan: Plan, unit: Unit, weight: Weight, weighed: Sequence[str]) -> list[str]:
    """The body of weigh(batch). `weighed`: the fields that the weight reads, as inputs."""
    fields = [clean_outside(i.name) for i in unit.inputs]
    used = [clean_outside(name) for name in weighed]
    left = fields[0] if len(fields) == 1 else ", ".join(f if f in used else "_" for f in fields)
    value = f"({used[0]} != {plain(number(weight.ignore_index).text)}).sum()"
    if weight.kind != "tokens":
        value = f"weight_of({', '.join(used)})"
    if not plan.even:  # a microbatch without samples may have no fields
        left = left if len(fields) == 1 else f"({left})"
        each = f"[{value} if size else 0 for size, {left} in zip(sizes, batch)]"
    else:
        each = f"[{value} for {left} in batch]"
    lines = [f"weights = torch.stack({each}).double()"]
    if weight.kind != "tokens" or not plan.even:
        lines = [
            f"found = {each}",
            "weights = torch.stack([torch.as_tensor(w, device=device) for w in found]).double()",
        ]
    lines.append("total = weights.sum()")
    if plan.replicas > 1:
        replicas = plan.stages[unit.stage].mesh.ranks
        lines += sum_lines("the weights of a replica", "total", replicas)
    lines += [
        "if not total:",
        '    raise ValueError(f"{HERE}, step {step + 1}: the weights of the batch sum to 0")',
        "return (weights / total).tolist()",
    ]
    return lines
