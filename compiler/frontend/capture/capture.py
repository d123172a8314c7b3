"""The user's model and loss -> Graph: build without values, trace twice, bring to one form, measure."""

from collections.abc import Mapping

from ...errors import CaptureError
from ...ir.graph import Graph, TensorMeta
from ...ir.spec import Spec
from .assemble import assemble
from .batch import Generaliser, batch_sizes, refuse_coupled
from .build import Built, build_fake, default_dtype
from .canonical import canonicalise
from .convert import Converter, Raw
from .export import export
from .fields import bind, read_fields
from .statements import forget
from .training import Training, make_training


def capture(spec: Spec) -> Graph:
    """Before: a spec that loads. After: `verify_graph` holds; sizes are in terms of the batch.

    Raises CaptureError at the user's own line for what cannot be captured.
    """
    forget()
    fields = read_fields(spec)
    with default_dtype(spec.train.precision):
        built = build_fake(spec)
        training = make_training(spec, built.model, bind(spec, built.model, fields))
        sizes = batch_sizes(fields)
        traces = [trace(training, built, fields, size) for size in sizes]
        try:
            raw = Generaliser(*sizes).merge(*traces)
        except CaptureError as error:
            size, message = fixed_size(spec, error)
            raw = trace(training, built, fields, size)
            return assemble(spec, raw, built, training, (size, size), (message,))
        if spec.parallel.microbatches > 1:
            refuse_coupled(raw)
        return assemble(spec, raw, built, training, sizes, ())


def trace(training: Training, built: Built, fields: Mapping[str, TensorMeta], batch: int) -> Raw:
    """One microbatch of `batch` samples, in canonical form."""
    return canonicalise(Converter(export(training, built, fields, batch)).convert())


def fixed_size(spec: Spec, error: CaptureError) -> tuple[int, str]:
    """The one size of microbatch for which a model can be compiled that is not the same for all.

    Raises the error where microbatches differ in size.
    """
    size, rest = divmod(spec.train.global_batch, spec.parallel.microbatches)
    if rest or spec.data.last_batch != "drop":
        raise error
    return size, f"compiled for microbatches of just {size} samples: {error.message}"
