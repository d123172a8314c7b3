"""Text as ruff formats it, at the project's 100 columns."""

import subprocess
import sys
from pathlib import Path

ruff = Path(sys.executable).with_name("ruff")


def format_text(text: str) -> str:
    """The text formatted; raises CalledProcessError for what is no Python."""
    return subprocess.run(
        [ruff, "format", "--isolated", "--line-length=100", "-"],
        input=text,
        capture_output=True,
        check=True,
        encoding="utf-8",
    ).stdout


def unformatted(folder: Path) -> list[str]:
    """Python files in a folder that ruff would format otherwise."""
    command = [ruff, "format", "--isolated", "--line-length=100", "--check", "--no-cache", folder]
    found = subprocess.run(command, capture_output=True, check=False, encoding="utf-8")
    return found.stdout.splitlines()[:-1] + found.stderr.splitlines()
