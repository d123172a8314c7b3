"""What all ranks of a compilation share, for the views."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..ir.graph import Graph
from ..ir.plan import Plan
from ..ir.program import Program
from ..ir.report import Report
from ..ir.spec import Spec
from ..ir.unit import Unit

dtypes = {"fp32": "float32", "fp64": "float64", "bf16": "float32"}
"""Of weights and of the data's floats, by precision."""


@dataclass(frozen=True, slots=True)
class Job:
    """What all ranks of a compilation share."""

    version: str
    """Of ppc."""
    source: str
    """The spec's path, as the user named it."""
    spec_digest: str
    """sha256 of the spec."""
    sources: Mapping[str, str]
    """File of the user's, relative to the spec -> its sha256."""
    versions: Mapping[str, str]
    """Of the packages that these import."""
    spec: Spec
    graph: Graph
    plan: Plan
    units: tuple[Unit, ...]
    programs: tuple[Program, ...]
    longer: tuple[Program, ...]
    """The programs for a microbatch more for each stage: they tell what in a text hangs on the
    number of microbatches."""
    report: Report
    hints: Mapping[str, str]
    boundary: Mapping[str, str]
    paths: tuple[str, ...]
    """The data's files as the scripts find them."""
    checkpoints: str = ""
    """The folder of the checkpoints, likewise."""
    weight_module: str = ""
    """What the scripts import the user's weight from,"""
    course_module: str = ""
    """the user's course of the learning rate,"""
    after_module: str = ""
    """and what the user wants to run after each step."""
