"""A spec file -> Spec, or every complaint about it, in file order.

    document    YAML 1.2 -> plain values and the place of each
    schema      the values against schemas/spec.schema.json
    build       plain values -> Spec, defaults filled in
    sense       what numbers, names and files must have to do with each other

A complaint does not hide those behind it: what it is about is cut out, and the rest is checked on.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..errors import Complaints, Location, SpecError
from ..ir.spec import Spec
from .build import build
from .document import read_document, within
from .optimizers import spell_names
from .schema import validate
from .sense import check_sense


def load(path: str | Path) -> Spec:
    """Read a spec. Runs no user code and imports no torch.

    Raises SpecError, or Complaints where there are several.
    """
    path = Path(path)
    document = read_document(path)
    complaints = list(document.complaints)
    if not isinstance(document.tree, dict):
        hint = "`ppc init` writes a spec to start from"
        raise SpecError("a spec is a mapping of keys", Location(str(path), 1, 1), hint)
    spelled = spell_names(document.tree)
    first = [complaint.path for complaint in complaints]
    found = validate(prune(spelled, first), document.locations, document.file)
    complaints += [complaint for complaint in found if complaint.path not in first]
    bad = [complaint.path for complaint in complaints]
    tree = prune(spelled, bad)
    lacking = validate(tree, document.locations, document.file)
    sections = {complaint.path.partition(".")[0] for complaint in lacking}
    bad += sections
    spec = build({k: v for k, v in tree.items() if k not in sections}, path, document.locations)
    complaints += check_sense(spec, bad)
    if complaints:
        errors = sorted((complaint.error for complaint in complaints), key=position)
        raise errors[0] if len(errors) == 1 else Complaints(errors)
    return spec


def prune(tree: Any, bad: Collection[str], path: str = "") -> Any:
    """The tree without the values at the given paths."""
    if isinstance(tree, dict):
        places = {key: within(path, key) for key in tree}
        return {k: prune(tree[k], bad, at) for k, at in places.items() if at not in bad}
    if isinstance(tree, list):
        items = ((item, f"{path}[{index}]") for index, item in enumerate(tree))
        return [prune(item, bad, at) for item, at in items if at not in bad]
    return tree


def position(error: SpecError) -> tuple[int, int]:
    where = error.where
    return (where.line or 0, where.column or 0) if where else (0, 0)
