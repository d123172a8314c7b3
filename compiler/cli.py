"""The command line: the only file that prints.

Exit codes: 0 done, 1 the user's mistake, 2 wrong usage, 70 a bug of ppc. Text is for people;
`--json` prints one JSON object on standard output instead, complaints included, for programs.
"""

import errno
import gc
import json
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from . import __version__
from .errors import Complaints, OutputError, PpcError, visible
from .ir.show import few_ranks
from .ir.spec import Spec
from .signals import Ended, ended_by_signals
from .version import untested_torch

bug = 70  # EX_SOFTWARE of sysexits.h
in_json = "ppc.json"  # key of the context's meta: was --json given?


class Commands(TyperGroup):
    """Turns errors into messages and exit codes, in one place for all commands."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with ended_by_signals():
                return super().invoke(ctx)
        except Ended as signaled:
            raise typer.Exit(128 + signaled.number) from None  # as a shell has it
        except PpcError as error:
            complain(error, as_json=ctx.meta.get(in_json, False))
            raise typer.Exit(1) from error
        except (typer.Exit, typer.Abort, typer.TyperException):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:  # `ppc plan x | head`
                raise
            typer.echo(traceback.format_exc(), err=True)
            typer.secho("This is a bug of ppc: please report it with the spec.", fg="red", err=True)
            raise typer.Exit(bug) from error


def complain(error: PpcError, *, as_json: bool) -> None:
    """One complaint, or all of several: the message in red, its hint below."""
    errors = error.errors if isinstance(error, Complaints) else (error,)
    if as_json:
        where = [asdict(e.where) if e.where else {} for e in errors]
        found = [
            {**place, "message": e.message, "hint": e.hint}
            for e, place in zip(errors, where, strict=True)
        ]
        print_json({"ok": False, "complaints": found})
        return
    for each in errors:
        place = f"{each.where}: " if each.where else ""
        typer.secho(f"{place}{each.message}", fg="red", err=True)
        if each.hint:
            typer.echo(f"hint: {each.hint}", err=True)


def users_words(*, as_json: bool) -> AbstractContextManager[object]:
    """While the user's code runs: what it prints must not get among the JSON."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def print_json(value: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


def note_json(ctx: typer.Context, given: bool) -> bool:  # noqa: FBT001  # typer's signature
    ctx.meta[in_json] = given
    return given


SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="The spec, a YAML file.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.", callback=note_json)]

app = typer.Typer(
    cls=Commands,
    help="Compile a PyTorch model and a YAML spec into standalone scripts for parallel training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def print_version(given: bool) -> None:  # noqa: FBT001  # typer's signature
    if given:
        typer.echo(f"ppc {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True),
]


@app.callback()
def main(*, version: Version = False) -> None:
    pass


@app.command()
def init(
    name: Annotated[str, typer.Argument(help="Name of the spec, NAME.yaml.")] = "quickstart",
) -> None:
    """Write a starter spec that runs, and the model that it names, into this folder."""
    name = name.removesuffix(".yaml")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        message = f"{name!r} is no name for a spec: letters, digits, '.', '_' and '-'"
        raise typer.BadParameter(message, param_hint="NAME")
    starter = files("ppc.specs")
    text = (starter / "quickstart.yaml").read_bytes()
    spec, model = Path(f"{name}.yaml"), Path("models/gpt.py")
    contents = {
        model: (starter / "models/gpt.py").read_bytes(),
        spec: text.replace(b"name: quickstart", f"name: {name}".encode()),
    }
    write_new(contents, kept=model)
    typer.echo(f"wrote {spec} and {model}; next: ppc compile {spec}")


def write_new(contents: Mapping[Path, bytes], *, kept: Path) -> None:
    """Write files that are not there yet, or none; `kept` may be there if it is the same."""
    path = kept
    try:
        for path, content in contents.items():
            if path.exists() and (path != kept or path.read_bytes() != content):
                hint = "give another name, or start in another folder"
                raise OutputError(f"{path} exists and is left as it is", hint=hint)
        for path, content in contents.items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from error


@app.command()
def check(spec_file: SpecFile, *, as_json: Json = False) -> None:
    """Check a spec, all complaints at once. Runs no user code."""
    from .frontend.load import load

    spec = load(spec_file)
    if as_json:
        plain = {key: value for key, value in asdict(spec).items() if key != "locations"}
        print_json({"ok": True, "spec": plain})
    else:
        typer.echo(visible(f"{spec_file}: ok\n{summary(spec)}", "\n"))


def summary(spec: Spec) -> str:
    """What was understood, in two lines."""
    train, parallel, cluster = spec.train, spec.parallel, spec.cluster
    length = f"{train.steps} steps" if train.steps else f"{train.epochs} epochs"
    return (
        f"{spec.name}: {spec.model.factory.target}, {length} of {train.global_batch} samples "
        f"from {spec.data.source}, {train.optimizer.name}, {train.precision}\n"
        f"pipeline {parallel.pipeline} x data {parallel.data} on {cluster.num_devices} "
        f"{cluster.device.kind}, {parallel.schedule}, microbatches {parallel.microbatches}"
    )


@app.command()
def plan(spec_file: SpecFile, *, as_json: Json = False) -> None:
    """Show the plan, its cost and memory by rank, and the plans it beat. Writes nothing."""
    note_torch()
    from . import pipeline
    from .frontend.load import load

    with uncollected(), users_words(as_json=as_json):
        planned = pipeline.plan(load(spec_file))
    if as_json:
        print_json({"ok": True, **asdict(planned)})
    else:
        typer.echo(str(planned))


@app.command(name="compile")
def compile_(
    spec_file: SpecFile,
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Folder to write. [generated/NAME]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the scripts, one for each rank, the launcher and the plan."""
    note_torch()
    from . import pipeline
    from .emit.describe import start_command
    from .emit.write import refuse_foreign, write
    from .frontend.load import load

    spec = load(spec_file)
    folder = output or Path("generated") / spec.name
    refuse_foreign(folder)  # before the minutes that a large model takes
    with uncollected(), users_words(as_json=as_json):
        made = pipeline.compile(spec, folder, tell)
    kept = write(made, folder)
    if kept:
        typer.echo(f"note: what runs of the older scripts wrote is in {kept}", err=True)
    if as_json:
        print_json({"ok": True, "folder": folder, "files": [file.path for file in made]})
    else:
        typer.echo(f"wrote {listed([file.path for file in made])} in {folder}; start it there with")
        typer.echo(start_command(spec))


@contextmanager
def uncollected() -> Iterator[None]:
    """Without looking for garbage: nearly all that a compilation makes it keeps to its end, and the
    search takes a tenth of a large one; as much again where it is done as the process ends, so what
    there is then is left out of that, until another compilation of the same process."""
    gc.unfreeze()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def listed(paths: Sequence[str]) -> str:
    """The files; of many scripts the first and the last."""
    scripts = [path for path in paths if re.fullmatch(r"rank\d+\.py", path)]
    others = [path for path in paths if path not in scripts]
    some = scripts if len(scripts) <= few_ranks else [f"{scripts[0]} to {scripts[-1]}"]
    return ", ".join([*some, *others])


def note_torch() -> None:
    """Before a model is captured: a torch that nobody has tried may do so differently."""
    message = untested_torch()
    if message:
        typer.echo(f"note: {message}", err=True)


def tell(name: str, form: object) -> None:
    """Progress, on a terminal, and what the user should know about the model."""
    if sys.stderr.isatty():
        typer.secho(f"{name} done", fg="bright_black", err=True)
    for message in getattr(form, "messages", ()) if name == "check" else ():
        typer.echo(f"note: {message}", err=True)


@app.command()
def show(
    spec_file: SpecFile,
    *,
    after: Annotated[str, typer.Option("--after", metavar="PASS", help="Name of the pass.")],
) -> None:
    """Print what a pass of the compiler made."""
    note_torch()
    from . import pipeline
    from .frontend.load import load

    typer.echo(pipeline.show(load(spec_file), after=after))


@app.command()
def verify(
    target: Annotated[Path, typer.Argument(metavar="SPEC_OR_DIR", help="Spec, or its scripts.")],
    *,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to compare.")] = 3,
    exact: Annotated[bool, typer.Option("--exact", help="Recompile in float64 first.")] = False,
    as_json: Json = False,
) -> None:
    """Run the scripts and the user's own model, and compare losses, gradients and weights."""
    note_torch()
    from .run.verify import verify as run_and_compare

    with users_words(as_json=as_json):
        result = run_and_compare(target, steps=steps, exact=exact)
    if as_json:
        rows = [  # steps as metrics.jsonl has them
            asdict(row) | {"step": None if row.step is None else row.step + 1}
            for row in result.rows
        ]
        print_json({**asdict(result), "rows": rows, "ok": result.ok})
    else:
        typer.echo(str(result))
    if not result.ok:
        raise typer.Exit(1)
