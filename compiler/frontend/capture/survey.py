"""Runs the model once at a batch size, and notes what its leaves are given and return.

Without values where that can be done; a model that looks at them runs really, on the first samples
of the data.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CaptureError, PpcError
from ...ir.graph import TensorMeta
from ...ir.spec import Spec
from ..samples import read_samples
from .build import Built, build_model, seeded
from .fields import bind, read_fields
from .held import read, reader
from .inner_backward import backward_noted
from .leaves import called
from .measure import FlopCounter
from .private import storage_address, version_of
from .python_state import changed_again, changing_line, counted, refuse_draws, roots_of
from .restored import restored
from .schema import draws
from .training import Training, make_training
from .trees import tree_leaves, tree_map
from .user import call_site, users_errors
from .whole import Result, Seen, known, shapes, stand_in, state_of

max_elements = 250_000_000
"""Of a model that runs really: 1 GB in float32."""


def survey(training: Training, built: Built, fields: Mapping[str, TensorMeta], batch: int) -> None:
    """See what the leaves do with `batch` samples, unless it is known.

    Raises CaptureError for what a leaf must not do, or the model fails on.
    """
    if not known.leaves or known.spec is None or batch in known.seen:
        return
    try:
        with built.mode:
            inputs = [zeros(fields[name], batch) for name in training.binding.fields]
            seen = run_watched(training, inputs)
    except PpcError:
        raise
    except Exception:  # noqa: BLE001  # whatever has no values fails in a way of its own
        seen = survey_really(known.spec, batch)
    known.seen[batch] = seen


def zeros(meta: TensorMeta, batch: int) -> Tensor:
    return torch.zeros((batch, *meta.shape), dtype=getattr(torch, meta.dtype))  # type: ignore[arg-type]


def survey_really(spec: Spec, batch: int) -> dict[str, list[Seen]]:
    """The same with values: those of the first samples, and of a new model."""
    count = sum(prod(p.shape) for leaf in known.leaves.values() for p in state_of(leaf.module))
    if count > max_elements:
        raise CaptureError(
            f"the leaves look at values, and have too many parameters to run here: {count:,}",
            spec.at("model.leaf"),
            "smaller leaves: the part alone that looks at values",
        )
    with users_errors(spec.at("model.leaf"), f"the model fails on {batch} samples"):
        training, inputs = with_values(spec, batch)
        with seeded(spec.train.seed):
            return run_watched(training, inputs)


def with_values(spec: Spec, batch: int) -> tuple[Training, tuple[Tensor, ...]]:
    """A new model whose leaves can be watched, and the first samples of the data."""
    model = build_model(spec)
    stand_in(model)
    training = make_training(spec, model, bind(spec, model, read_fields(spec)))
    samples = read_samples(spec)
    numbers = [i % samples.count for i in range(batch)]
    return training, samples.batch(numbers, training.binding.fields, epoch=0)


def run_watched(training: Training, inputs: Sequence[Tensor]) -> dict[str, list[Seen]]:
    """Run the model, and see what its leaves do. Raises CaptureError at the line where one of them
    draws from a foreign generator, or keeps a value of Python's that each call changes."""
    leaves = {path: training.model.get_submodule(path) for path in known.leaves}
    roots = [(module, path or type(module).__name__) for path, module in leaves.items()]

    def run() -> dict[str, list[Seen]]:
        with watching() as seen:
            training.run(*inputs)
        return seen

    with restored(roots_of(training)):
        before = read(roots)
        with refuse_draws(training, "no script seeds it"):
            seen = run()
        for key in changed_again(roots, run) if read(roots) != before else ():
            path = next(path for path, m in leaves.items() if key in read([(m, path or key[0])]))
            raise CaptureError(
                f"{called(path)} changes {key[1]} of {key[0]}, a Python value: every rank has its "
                "own, and changes it only in its own microbatches",
                changing_line(run, reader(roots, key)),
                f"an argument of the leaf: {counted(key[1])} in a module outside, handed to it",
            )
    return seen


@contextmanager
def watching() -> Iterator[dict[str, list[Seen]]]:
    """While it lasts, leaves run as they are, and what they do is noted."""
    seen: dict[str, list[Seen]] = {path: [] for path in known.leaves}

    def watch(
        path: str, module: nn.Module, own: Callable[..., object], args: Any, kwargs: Any
    ) -> object:
        result, found = look(path, module, own, args, kwargs)
        seen[path].append(found)
        return result

    known.watch = watch
    try:
        yield seen
    finally:
        known.watch = None


class Counter(FlopCounter):  # type: ignore[no-untyped-call]  # torch's own
    """Notes random operations, too."""

    random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.random |= draws(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)


def look(
    path: str, module: nn.Module, own: Callable[..., object], args: Any, kwargs: Any
) -> tuple[object, Seen]:
    """Run a leaf, and see what it does."""
    for value in (*args, *kwargs.values()):
        refuse_objects(path, value, "is given", numbers=True)
    given, state = tensors((args, kwargs)), state_of(module)
    before = [version_of(t) for t in (*given, *state)]
    held = {storage_address(t) for t in (*given, *state)}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if storage_address(tensor) not in held:
            kept[storage_address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with Counter() as counter, hooks, backward_noted() as going_back:
        result = own(*args, **kwargs)
    if going_back and known.spec and known.spec.train.compile:
        what = f"{called(path)} goes back by torch.autograd ({going_back[0]})"
        message = f"{what}, and torch.compile does not differentiate twice"
        raise CaptureError(message, known.spec.at("train.compile"), "compile: false")
    refuse_objects(path, result, "returns", numbers=False)
    same = [a is b for a, b in zip(state, state_of(module), strict=True)]
    if not all(same) or [version_of(t) for t in (*given, *state)] != before:
        what = "writes to what it is given" if all(same) else "changes its tensors"
        raise refusal(path, f"{what}, or to its buffers", "return new tensors; no buffer to count")
    if any(storage_address(t) in held for t in tensors(result)):
        raise refusal(path, "returns the memory that it was given", ".clone() of it")
    refuse_detached(path, given, tensors(result))
    places = iter(range(len(tree_leaves(result))))
    nest = tree_map(lambda x: None if x is None else next(places), result)
    results = tuple(Result(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors(result))
    random = counter.random or any(map(drops, module.modules()))
    return result, Seen(
        shapes(given), results, nest, counter.flops, sum(kept.values()), random=random
    )


def refuse_detached(path: str, given: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Raises CaptureError where no gradient comes back to what should have one."""
    ends = [t for t in given if t.requires_grad]
    begins = [t for t in results if t.requires_grad]
    if not ends or not begins:
        return
    ones = [torch.ones_like(t) for t in begins]
    found = torch.autograd.grad(begins, ends, ones, retain_graph=True, allow_unused=True)
    if any(gradient is None for gradient in found):
        what = "is given a tensor to which no gradient comes back"
        raise refusal(path, what, "give it x.detach(), where its gradient is to end")


def tensors(nest: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]


def drops(module: nn.Module) -> bool:
    """Whether a module draws random numbers, though perhaps not in every call."""
    chance = getattr(module, "p", getattr(module, "dropout", 0))
    named = "dropout" in type(module).__name__.lower() or isinstance(module, nn.RNNBase)
    return module.training and named and isinstance(chance, float) and chance > 0


def refuse_objects(path: str, nest: object, what: str, *, numbers: bool) -> None:
    """Raises CaptureError for what does not go between a leaf and a script's own text."""
    plain = (bool, int, float, complex, str, torch.dtype) if numbers else ()
    inner: Sequence[object] = ()
    if isinstance(nest, tuple | list) and type(nest) in (tuple, list):
        inner = nest
    elif nest is not None and not isinstance(nest, (Tensor, *plain)):
        allowed = "tensors, numbers, strings" if numbers else "tensors"
        raise refusal(
            path, f"{what} a {type(nest).__name__}", f"{allowed} and tuples of them, or a larger "
            "leaf around both ends of it",
        )  # fmt: skip
    for item in inner:
        refuse_objects(path, item, what, numbers=numbers)


def refusal(path: str, what: str, hint: str) -> CaptureError:
    return CaptureError(f"{called(path)} {what}", call_site(), hint)
