"""The user's model and loss -> Graph: build without values, trace twice, unify, measure."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FunctionType

from torch import nn

from ...errors import CaptureError
from ...ir.graph import Graph, Recipe, State, TensorMeta
from ...ir.spec import Arrays, Dataset, Random, Spec, Text, Tokens
from .alike import refuse_unlike
from .arrays import count_arrays
from .assemble import assemble, short
from .backward import try_backwards
from .batch import Generaliser, batch_sizes
from .borrowed import dissolve_borrowers
from .build import Built, build_fake, named_tensors, numerics, plain_tensors
from .canonical import canonicalise, storages
from .convert import Converter
from .coupled import at_loss, find_coupling, refuse_coupled
from .export import export
from .fields import bind, make_dataset, read_fields
from .fresh import refuse_changed
from .leaf_coupling import find_leaf_coupling
from .leaves import find_leaves
from .loss_state import Held, held_by_loss, keeps_state
from .private import is_fake, storage_address
from .raw import Raw
from .record import literal, max_inline_elements
from .registered import find_operation, refuse_underivable
from .replay import classes, replay
from .sharing import refuse_shared
from .statements import forget
from .survey import survey
from .training import Training, make_training
from .undivided import refuse_undivided
from .user import location, model_folder
from .weighted import weighted_mean
from .whole import know, known, stand_in


def capture(spec: Spec) -> Graph:
    """Before: a spec that loads. After: `verify_graph` holds; sizes are in terms of the batch.

    Raises CaptureError at the user's own line for what cannot be captured.
    """
    forget()
    refuse_unlike(spec)
    fields = read_fields(spec)
    with numerics(spec):
        built = build(spec)
        binding = bind(spec, built.model, fields)
        refuse_undivided(spec, binding.fields, binding.whole)
        training = make_training(spec, built.model, binding)
        sizes, told = batch_sizes(fields), (binding.note,) if binding.note else ()
        folder = model_folder(spec)
        with hinting_whole(spec, fields):
            traces = [trace(training, built, fields, size, folder) for size in sizes]
        try:
            raw = Generaliser(*sizes).merge(*traces)
        except CaptureError as error:
            again = trace(training, built, fields, sizes[0], folder)
            refuse_changing(spec, traces[0], again, sizes[0])
            size, message = fixed_size(spec, at_loss(spec, error))
            raw = trace(training, built, fields, size, folder)
            graph = assemble(spec, raw, built, training, (size, size), (message, *told))
        else:
            coupled, untried = accept_coupling(spec, raw)
            graph = assemble(spec, raw, built, training, sizes, told + untried)
            graph = replace(graph, coupled=coupled)
        if weighted := weighted_mean(spec, raw):
            graph = replace(graph, coupled=graph.coupled or short(weighted, spec.folder))
    refuse_imported(raw, folder)
    graph = note_users_own(spec, replace(graph, autocast=training.autocast), raw)
    refuse_shared(built.shared, graph, spec.at("model.factory"))
    refuse_untrained(spec, graph)
    refuse_underivable(graph)
    try_backwards(graph, sizes[0], spec.folder)
    return graph


def build(spec: Spec) -> Built:
    """The model without values; its leaves stand for their results."""
    know(spec, {})
    built = build_fake(spec)
    if spec.model.leaf:
        know(spec, find_leaves(spec, built, model_folder(spec)))
        stand_in(built.model)
    return built


def note_users_own(spec: Spec, graph: Graph, raw: Raw) -> Graph:
    """What stays whole: operations, autograd functions and leaves."""
    functions = {
        target: replace(function, where=short(function.where, spec.folder))
        for target, function in raw.functions.items()
    }
    leaves = {path: leaf.source for path, leaf in known.leaves.items() if leaf.source}
    return replace(graph, registered=raw.registered, functions=functions, leaves=leaves)


@contextmanager
def hinting_whole(spec: Spec, fields: Mapping[str, TensorMeta]) -> Iterator[None]:
    """Say of a trace whose shapes do not fit which fields look like one graph's, cut into rows: a
    sample is as long as there are samples."""
    try:
        yield
    except CaptureError as raised:
        error = raised if raised.where else at_loss(spec, raised)
        fits_not = error.hint is None and re.search(r"size|shape|dim", error.message)
        if not fits_not or isinstance(spec.data, Text | Tokens):
            raise error from raised.__cause__
        count = count_samples(spec, spec.data)
        square = [name for name, meta in fields.items() if meta.shape[:1] == (count,)]
        if not square:
            raise error from raised.__cause__
        raise CaptureError(
            error.message,
            error.where,
            f"if {square[0]} is one whole, such as a graph's edges, and no sample has a row of it: "
            f"data: {{whole: [{', '.join(fields)}]}}, for those of them that are so",
        ) from raised


def refuse_imported(raw: Raw, folder: Path) -> None:
    """Raises CaptureError for operations and autograd functions whose file, which the scripts
    import, is no longer what it was. `folder`: the model's."""
    for target, module in raw.registered.items():
        made, function = find_operation(target), raw.functions.get(target)
        where = next((op.where for op in raw.ops if op.target == target), "")
        if function:
            refuse_changed(function.name, classes[target], module, folder, location(where))
        elif made and isinstance(made.function, FunctionType):
            refuse_changed(made.name, made.function, module, folder, location(where))


def accept_coupling(spec: Spec, raw: Raw) -> tuple[str, tuple[str, ...]]:
    """The user's line that looks at several samples of a microbatch, "" for none; and a word on
    what could not be told.

    Raises CaptureError there, unless the spec accepts it, or has but one microbatch a step.
    """
    several = spec.parallel.microbatches * spec.parallel.data > 1
    coupling = find_coupling(spec, raw) if several else None
    untried: tuple[str, ...] = ()
    if several and not coupling and known.leaves:
        coupling, untried = find_leaf_coupling(spec, raw)
    if coupling and spec.model.coupled == "refuse":
        refuse_coupled(spec, coupling)
    return short(coupling.where, spec.folder) if coupling else "", untried


def count_samples(spec: Spec, data: Arrays | Random | Dataset) -> int:
    """How many samples there are."""
    if isinstance(data, Random):
        return data.samples
    if isinstance(data, Arrays):
        return count_arrays(spec, data)
    return len(make_dataset(data, spec))  # type: ignore[arg-type]  # a Dataset of the user's


def refuse_untrained(spec: Spec, graph: Graph) -> None:
    """Raises CaptureError where no gradient leads from the loss to a parameter."""
    if not graph.values[graph.outputs[0][1]].requires_grad:
        raise CaptureError(
            "there is nothing to train: no gradient leads from the loss to a parameter",
            spec.at("model.factory"),
            "requires_grad_(True) for some parameters, no torch.no_grad() around all of forward",
        )


def trace(
    training: Training, built: Built, fields: Mapping[str, TensorMeta], batch: int, folder: Path
) -> Raw:
    """One microbatch of `batch` samples, in canonical form. `folder`: the model's."""
    survey(training, built, fields, batch)
    taken = frozenset(name for name, _ in named_tensors(built.model))
    held = held_by_loss(training)
    traced = export(training, built, fields, batch)
    raw = Converter(traced, folder, taken | held.keys(), held).convert()
    refuse_computed(raw, built.model)
    refuse_written(raw, held)
    raw = find_values(raw, built)
    raw = replace(raw, recipes=raw.recipes | written_out(raw, held))
    return canonicalise(dissolve_borrowers(raw))


def written_out(raw: Raw, held: Held) -> dict[str, Recipe]:
    """Recipes of what the loss holds, where it is small enough for a script to write out."""
    own = {name: raw.constants[name] for name in held if name in raw.constants}
    return {
        name: Recipe((literal("v0", tensor),), "v0")
        for name, tensor in own.items()
        if tensor.numel() <= max_inline_elements
    }


def refuse_written(raw: Raw, held: Held) -> None:
    """Raises CaptureError where the loss writes to a tensor of its own."""
    memory = storages(raw.ops)
    for op in raw.ops:
        written = {base for name in op.mutates for base in memory.get(name, {name})}
        for own in written & held.keys():
            raise keeps_state(own, location(op.where))


def refuse_computed(raw: Raw, model: nn.Module) -> None:
    """Raises CaptureError where forward reads what the factory computed from parameters: it would
    stay as it is while they are trained."""
    computed = {name for name, tensor in plain_tensors(model) if not tensor.is_leaf}
    for op in raw.ops:
        for fqn in (ref.fqn for ref in op.operands if isinstance(ref, State)):
            if fqn in computed:
                raise CaptureError(
                    f"forward reads {fqn}, which the factory computed from parameters, once",
                    location(op.where),
                    "compute it in forward",
                )


def find_values(raw: Raw, built: Built) -> Raw:
    """Give the tensors that the factory made, and the model holds in no buffer, their values.

    Raises CaptureError at the user's line where these are random: nothing could set them.
    """
    hidden = {fqn: tensor for fqn, tensor in raw.constants.items() if is_fake(tensor)}
    made = {view.storage for view in built.recorder.names}
    recipes = built.recorder.recipes(hidden)
    values = {}
    for fqn, recipe in recipes.items():
        if recipe.saved or any(op.random for op in recipe.ops):
            where = next((op.where for op in raw.ops if State(fqn) in op.operands), "")
            drawn = storage_address(hidden[fqn]) in made
            raise CaptureError(
                "forward reads a tensor that the factory drew and that the model does not own"
                if drawn
                else "forward, or what it calls, reads a tensor past the trace: .data, or a cache",
                location(where),
                "hold it as a parameter or buffer; modules in nn.ModuleList, not in a list"
                if drawn
                else "the parameter itself, under torch.no_grad(); a buffer in place of a cache",
            )
        shape = tuple(hidden[fqn].shape)
        values[fqn] = replay(recipe, shape, hidden[fqn].dtype, seed=0)
    return replace(raw, constants=raw.constants | values, recipes=recipes)


def refuse_changing(spec: Spec, raw: Raw, again: Raw, size: int) -> None:
    """Raises CaptureError where a second trace of microbatches of one size is another: it reads the
    clock, or what nobody sees."""
    try:
        Generaliser(size, size).merge(raw, again)
    except CaptureError as error:
        raise at_loss(spec, error) from error


def fixed_size(spec: Spec, error: CaptureError) -> tuple[int, str]:
    """The one size of microbatch for which a model can be compiled that is not the same for all.

    Raises the error where microbatches differ in size.
    """
    parts = spec.parallel.microbatches * spec.parallel.data
    size, rest = divmod(spec.train.global_batch, parts)
    if rest or spec.data.last_batch != "drop":
        raise error
    return size, f"compiled for microbatches of just {size} samples: {error.message}"
