"""The callables that a spec names, looked for without running them.

Is the file there, is it Python, does it define the name? What hangs on an import is left to the
capture.
"""

import difflib
import keyword
import symtable
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..ir.spec import Dataset, Factory, Spec, Value
from .files import is_file

source_text = "give a file of Python source, in UTF-8, that may be read"
with_arguments = ("model.factory", "model.args", "data.source")
"""Beginnings of keys whose callable is called with arguments of the spec's."""
Found = Iterator[tuple[str, str, str]]  # (path, message, hint)

losses = (
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss",
    "cross_entropy", "ctc_loss", "gaussian_nll_loss", "hinge_embedding_loss", "huber_loss",
    "kl_div", "l1_loss", "linear_cross_entropy", "margin_ranking_loss", "mse_loss",
    "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "nll_loss",
    "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
)  # fmt: skip
"""Those of torch.nn.functional."""


def check_loss(spec: Spec) -> Found:
    """A loss without a file is the model's own, or one that torch has."""
    name = spec.model.loss
    if ":" not in name and name not in ("output", *losses):
        close = difflib.get_close_matches(name, losses, n=1) or [n for n in losses if name in n]
        hint = "or name a function: losses.py:loss"
        message = f"torch.nn.functional has no loss {name!r}"
        yield "model.loss", message, f"did you mean {close[0]}? {hint}" if close else hint


def check_callables(spec: Spec) -> Found:
    for path, target in named_callables(spec):
        place, _, name = target.rpartition(":")
        words = [name] if place.endswith(".py") else [*place.split("."), name]
        if any(map(keyword.iskeyword, words)):
            message = f"{target}: a word of Python is no callable's name"
            yield path, message, "write the name that stands after `def` or `class`"
        elif words[0] in sys.stdlib_module_names and path.startswith(with_arguments):
            message = f"{target} is of Python's own library: no spec alone runs a command"
            yield path, message, "name a function of your own, which may call it: file.py:name"
        elif place.endswith(".py"):
            for message, hint in file_faults(spec.folder / place, place, name):
                yield path, message, hint


def named_callables(spec: Spec) -> Iterator[tuple[str, str]]:
    """(path in the spec, `file.py:name` or `package.module:name`)"""
    yield "model.factory", spec.model.factory.target
    yield from factories(spec.model.factory.args, "model.args")
    if ":" in spec.model.loss:
        yield "model.loss", spec.model.loss
    if ":" in spec.model.weight.kind:
        yield "model.weight", spec.model.weight.kind
    if isinstance(spec.data, Dataset):
        yield "data.source", spec.data.source
        yield from factories(spec.data.args, "data.args")
    if spec.train.after_step is not None:
        yield "train.after_step", spec.train.after_step
    if ":" in spec.train.lr_schedule.name:
        given = "train.lr_schedule.name" in spec.locations
        yield f"train.lr_schedule{'.name' if given else ''}", spec.train.lr_schedule.name


def factories(value: Value, path: str) -> Iterator[tuple[str, str]]:
    """Those within an argument."""
    if isinstance(value, Factory):
        yield f"{path}.factory", value.target
        yield from factories(value.args, f"{path}.args")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from factories(item, f"{path}.{key}")
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from factories(item, f"{path}[{index}]")


def file_faults(file: Path, shown: str, name: str) -> Iterator[tuple[str, str]]:
    if not is_file(file):
        yield f"no file {shown} in the spec's folder", "files are relative to the spec"
        return
    try:
        with tokenize.open(file) as stream:  # honours the file's own coding line
            text = stream.read()
        table = symtable.symtable(text, shown, "exec")
    except SyntaxError as error:
        line = f" in line {error.lineno}" if error.lineno else ""
        hint = f"mend that line: {error.text.strip()[:60]}" if error.text else source_text
        yield f"{shown} is not Python: {error.msg}{line}", hint
        return
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        yield f"{shown} cannot be read: {error}", source_text
        return
    symbols = [s for s in table.get_symbols() if s.is_assigned() or s.is_imported()]
    names = [symbol.get_name() for symbol in symbols]
    hidden = any(word in text for word in ("import *", "__getattr__", "globals()"))
    if name not in names and not hidden:
        close = difflib.get_close_matches(name, names, n=1)
        made = [s.get_name() for s in symbols if s.is_namespace()]
        hint = (
            f"did you mean {close[0]}?" if close else f"it defines {', '.join(made) or 'nothing'}"
        )
        yield f"{shown} defines no {name}", hint
