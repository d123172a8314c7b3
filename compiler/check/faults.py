"""What differs between graph and model, as complaints for the user."""

from dataclasses import dataclass

from ..errors import CaptureError
from ..frontend.capture.batch import batch_sizes
from ..frontend.capture.fields import read_fields
from ..frontend.capture.user import location
from ..ir.graph import Graph, Op
from ..ir.plan import Plan
from ..ir.spec import Spec
from .differing import caught_failure, differing_line, differing_op
from .keeping import kept_once
from .outcome import is_comparable
from .real import microbatch, read_state, really

report = "this is a limit of ppc's capture; please report it with the model"
kept_question = "; does forward keep something in an attribute?"
kept_remedy = (
    "what forward keeps from call to call is a buffer of a module: self.register_buffer(...); if "
    f"that is not it, {report}"
)


@dataclass(frozen=True, slots=True)
class Fault:
    """What differs in a microbatch of `size` samples."""

    size: int
    what: str
    where: str = ""
    """The user's line, `gpt.py:58`, if it is known."""


def samples(number: int) -> str:
    return f"{number} sample{'s' * (number != 1)}"


def depends_on_size(spec: Spec, plan: Plan, usual: int, fault: Fault) -> CaptureError:
    """The complaint about a model that computes something else for some number of samples."""
    what = f"the model computes something else for {samples(fault.size)} than for {usual}"
    error = None if fault.where else differing_op(spec, fault.size, usual)
    full = plan.sizes(spec.train.global_batch)
    hint = "data: {last_batch: drop}"
    if fault.size in full:
        hint = f"a number of microbatches that divides the global batch of {sum(full)}"
    return CaptureError(
        error.message if error else f"{what}: {fault.what}",
        (error and error.where) or location(fault.where, spec.folder) or spec.at("model.factory"),
        f"{hint}, or make it independent of the number of samples",
    )


def not_the_model(spec: Spec, graph: Graph, fault: Fault) -> CaptureError:
    """The complaint about a graph that is not the model, at the user's line if it is found: a
    branch on the number of samples is taken for those that a trace has, which are others."""
    if error := caught_failure(spec, fault.size):
        return error
    traced = batch_sizes(read_fields(spec))
    usual = next(size for size in traced if size != fault.size)
    if error := differing_op(spec, fault.size, usual):
        return error
    found = None
    if is_comparable(graph, fault.size):
        training = really(spec)
        if kept_question in fault.what and (
            error := kept_once(training, microbatch(spec, training, fault.size), kept_remedy)
        ):
            return error
        inputs, state = microbatch(spec, training, fault.size), read_state(graph, training.model)
        found = differing_line(graph, training, state, inputs, fault.what, spec.folder)
    where, path = location(fault.where, spec.folder), ""
    if isinstance(found, Op):
        where, path = location(found.where, spec.folder), found.call[0]
    elif found:
        where = found
    way_out = f"keep the module whole: model: {{leaf: [{path}]}}; "
    way_out *= bool(path) and path not in spec.model.leaf
    message = f"the captured graph is not the model: {fault.what}"
    hint = kept_remedy if kept_question in fault.what else way_out + report
    return CaptureError(message, where or spec.at("model.factory"), hint)
