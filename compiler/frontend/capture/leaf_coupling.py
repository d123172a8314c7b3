"""Whether a leaf looks at several samples at once, which no trace shows: it runs on a batch and on
the batch's halves, with what the user's model gives it for the first samples of the data."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ...ir.spec import Spec
from .build import default_dtype, seeded
from .coupled import Coupling
from .raw import Raw
from .survey import max_elements, tensors, with_values
from .trees import tree_map
from .user import first_line
from .whole import Seen, Shape, known, target

batch = 4
"""Samples of the batch: two halves of two."""


@dataclass(frozen=True, slots=True)
class Run:
    """One call of a leaf, with values."""

    path: str
    number: int
    module: nn.Module
    own: Callable[..., Any]
    args: Any
    kwargs: Any
    tolerance: float
    """Of a difference, beside the largest number."""

    def is_alone(self) -> bool:
        """Whether samples have the same results in each half. Raises Untried."""
        first, second = (known.seen[size][self.path][self.number] for size in sorted(known.seen))
        given = [*map(batch_dim, first.given, second.given)]
        shapes = ([result.shape for result in seen.results] for seen in (first, second))
        made = [*map(batch_dim, *shapes)]
        with without_draws(self.module, first, self.path):
            together = tensors(self.own(*self.args, **self.kwargs))
            try:
                halves = [self.run_half(half, given) for half in (0, 1)]
            except Exception as error:
                raise Untried(f"{self.path} fails on {batch // 2} samples alone") from error
        pairs = zip(together, zip(*halves, strict=True), made, strict=True)
        return all(
            dim is None or self.agree(result, torch.cat(parts, dim)) for result, parts, dim in pairs
        )

    def run_half(self, half: int, dims: Sequence[int | None]) -> list[Tensor]:
        """The results for the first or the second half of what it was given."""
        left = iter(dims)

        def cut(value: object) -> object:
            dim = next(left) if isinstance(value, Tensor) else None
            return value if dim is None else value.chunk(2, dim)[half]  # type: ignore[attr-defined]

        args, kwargs = tree_map(cut, (self.args, self.kwargs))
        return tensors(self.own(*args, **kwargs))

    def agree(self, one: Tensor, other: Tensor) -> bool:
        if one.shape != other.shape or not one.is_floating_point():
            return torch.equal(one, other)
        largest = float(one.detach().abs().max()) if one.numel() else 0.0
        return torch.allclose(one, other, 0.0, self.tolerance * largest, equal_nan=True)


def batch_dim(first: Shape, second: Shape) -> int | None:
    """The dimension that is another for another number of samples."""
    return next((d for d, (x, y) in enumerate(zip(first, second, strict=True)) if x != y), None)


@contextmanager
def without_draws(module: nn.Module, seen: Seen, path: str) -> Iterator[None]:
    """While it lasts, dropout does nothing: what is drawn hangs on the number of samples. Raises
    Untried where something else draws."""
    if not seen.random:
        yield
        return
    training = [part for part in module.modules() if part.training]
    module.eval()
    before = torch.get_rng_state()
    try:
        yield
        if not torch.equal(before, torch.get_rng_state()):
            raise Untried(f"{path} draws random numbers")
    finally:
        for part in training:
            part.training = True


class Untried(Exception):  # noqa: N818  # no fault of anyone's
    """Why it cannot be told."""


def find_leaf_coupling(spec: Spec, raw: Raw) -> tuple[Coupling | None, tuple[str, ...]]:
    """The first call of a leaf that gives a sample another result beside other samples; and a word
    on leaves that could not be tried.

    Before: the leaves were seen at two batch sizes.
    """
    where = {op.call: op.where for op in raw.ops if op.target == target}
    told = []
    try:
        for run in real_runs(spec, raw):
            if not run.is_alone():
                how = f"the leaf {run.path} gives a sample another result beside other samples"
                return Coupling(where.get((run.path, run.number), ""), how), ()
    except Untried as error:
        told.append(f"whether a leaf looks at several samples was not tried: {error}")
    return None, tuple(told)


def real_runs(spec: Spec, raw: Raw) -> list[Run]:
    """The calls of leaves: in float64 where the user's model can, else with the rounding of its own
    precision. Raises Untried where it does not run."""
    count = sum(prod(meta.shape) for meta in raw.states.values())  # type: ignore[arg-type,misc]  # no batch
    if count > max_elements:
        raise Untried("the model is too large to run here")
    try:
        return run_model(spec, "fp64", 1e-9)
    except Exception:  # noqa: BLE001  # forward names a dtype, say
        try:
            return run_model(spec, spec.train.precision, 1e-3)
        except Exception as error:
            raise Untried(f"{type(error).__name__}: {first_line(error)}") from error


def run_model(spec: Spec, precision: Any, tolerance: float) -> list[Run]:
    """The calls of leaves while the user's own model runs on the first samples."""
    spec = replace(spec, train=replace(spec.train, precision=precision))
    runs: list[Run] = []

    def watch(path: str, module: nn.Module, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        number = sum(run.path == path for run in runs)
        copies: tuple[Any, Any] = tree_map(copied, (args, kwargs))
        runs.append(Run(path, number, module, own, copies[0], copies[1], tolerance))
        return own(*args, **kwargs)

    with default_dtype(precision), torch.random.fork_rng(devices=[]):
        training, inputs = with_values(spec, batch)
        known.watch = watch
        try:
            with seeded(spec.train.seed):
                training.run(*inputs)
        finally:
            known.watch = None
    return runs


def copied(value: object) -> object:
    """A tensor as a leaf was given it, whatever the leaf does."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)
