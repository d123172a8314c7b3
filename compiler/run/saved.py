"""Weights beside the scripts: first values that no recipe gives, and those after the last step."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..frontend.capture.build import build_model
from ..ir.graph import Graph
from ..ir.spec import Spec
from .compare import Row, measure
from .observe import Recording


def read_saved(folder: Path) -> dict[str, Tensor]:
    """The first values that no recipe gives, as they lie beside the scripts."""
    path = folder / "weights.safetensors"
    if not path.exists():
        return {}
    from safetensors.torch import load_file

    found: dict[str, Tensor] = load_file(path)
    return found


def check_saved(
    spec: Spec, folder: Path, ranks: Sequence[Recording], graph: Graph
) -> Iterator[Row]:
    """Whether the saved weights are those after the last step, and the user's model takes them."""
    canonical = {n: p.fqn for p in graph.parameters.values() for n in (p.fqn, *p.aliases)}
    last: dict[str, Tensor] = {}
    for rank in ranks[:: spec.parallel.data]:
        state = rank.steps[-1].state if rank.steps else rank.final
        last |= {canonical.get(name, name): tensor for name, tensor in state.items()}
    union: dict[str, Tensor] = {}
    for rank in ranks:
        if rank.rank % spec.parallel.data:
            continue  # replica 0 saves
        path = folder / f"weights-rank{rank.rank}.pt"
        if not path.exists():
            yield Row("saved", None, path.name, None, 0.0, "not written")
            continue
        for name, tensor in torch.load(path, weights_only=True, map_location="cpu").items():
            fqn = canonical.get(name, name)
            expected = {name: last[fqn]} if fqn in last else {}
            yield measure("saved", None, name, tensor, expected, 0.0)
            union[name] = tensor
    yield load_strictly(spec, union)


def load_strictly(spec: Spec, weights: Mapping[str, Tensor]) -> Row:
    """Whether the user's model takes just these."""
    with torch.random.fork_rng(devices=[]):
        model = build_model(spec)
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        words = " ".join(str(error).split())
        return Row("saved", None, "all", None, 0.0, words)
    return Row("saved", None, "all", 0.0, 0.0)
