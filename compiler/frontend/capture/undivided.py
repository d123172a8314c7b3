"""Fields without a batch dimension, such as a graph's edges: each microbatch takes all of them."""

import torch

from ...errors import CaptureError
from ...ir.spec import Dataset, Spec


def read_attributes(spec: Spec, data: Dataset, dataset: object) -> dict[str, torch.Tensor]:
    """Those of a user's Dataset. Raises CaptureError where it has no attribute of such a name."""
    found = {}
    for name in data.whole:
        if not hasattr(dataset, name):
            raise CaptureError(
                f"data.whole names {name}, and {data.source} has no attribute of that name",
                spec.at("data.whole"),
                f"self.{name} = ... in the dataset: a tensor that goes whole to every microbatch",
            )
        found[name] = torch.as_tensor(getattr(dataset, name))
    return found


def refuse_undivided(spec: Spec, taken: tuple[str, ...], whole: frozenset[str]) -> None:
    """Raises CaptureError where several microbatches would each compute the same: nothing that the
    model and the loss take has a batch dimension."""
    parts, replicas = spec.parallel.microbatches, spec.parallel.data
    if not taken or not whole.issuperset(taken) or parts * replicas == 1:
        return
    named = " and ".join([", ".join(taken[:-1]), taken[-1]] if len(taken) > 1 else taken)
    verb = "goes" if len(taken) == 1 else "go"
    each = f" of each of {replicas} replicas" if replicas > 1 else ""
    raise CaptureError(
        f"no input has a batch dimension to divide: {named} {verb} whole to each of "
        f"{parts} microbatch{'es' * (parts > 1)}{each}, all of which would compute the same",
        spec.at("parallel.data" if replicas > 1 else "parallel.microbatches"),
        "parallel: {data: 1, microbatches: 1}: stages still divide the model",
    )
