"""What all commands share: exit codes, output, progress, processes that end with us."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table

OK = 0
NO = 1
WRONG_INPUT = 2
CANNOT_TELL = 3

EXIT_CODES = (
    "Exit codes: 0 yes; 1 no (doctor: a vLLM process would not be hooked; verify: not proven); "
    "2 wrong input; 3 the question could not be answered; 130 and 143 interrupted. "
    "run has the exit code of the command it starts."
)

FOLDER = Path(__file__).resolve().parents[2]
"""What goes on PYTHONPATH: the folder with sitecustomize.py and altay_kvfix in it."""

_PLAIN_WIDTH = 200
"""Columns where the output is no terminal, so that a table is not folded for nobody."""


class Failure(Exception):
    """Ends the command with a message for the person and an exit code."""

    def __init__(self, message: str, exit_code: int = CANNOT_TELL) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def say(message: str) -> None:
    """A line on stderr; stdout is for the report alone."""
    sys.stderr.write(f"altay-kvfix: {message}\n")


def console() -> Console:
    """Stdout. Colours and live lines only on a terminal, and no colours with NO_COLOR."""
    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    return Console(width=width, highlight=False, soft_wrap=False)


def new_table(*columns: str, numbers: Sequence[str] = ()) -> Table:
    """A table without outer lines; the columns in ``numbers`` are aligned to the right."""
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        if column in numbers:
            table.add_column(column, justify="right", no_wrap=True)
        else:
            table.add_column(column, overflow="fold")
    return table


def print_json(report: Any) -> None:
    json.dump(report, sys.stdout, indent=2)
    sys.stdout.write("\n")


def python_path_with(folder: str | os.PathLike[str], existing: str | None) -> str:
    """PYTHONPATH with ``folder`` first and every existing entry behind it, as it was."""
    folder = os.fspath(folder)
    # An empty PYTHONPATH is none; a trailing separator would add the working directory.
    entries = existing.split(os.pathsep) if existing else []
    return os.pathsep.join([folder, *(entry for entry in entries if entry != folder)])


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr that ``title`` is going on; the function it gives tells the current step.

    A spinner on a terminal, one plain line per step otherwise.
    """
    stderr = Console(stderr=True, highlight=False)
    if not stderr.is_terminal:
        say(f"{title} ...")
        yield lambda step: say(f"{step} ...")
        return
    with stderr.status(title) as status:
        yield lambda step: status.update(f"{title}: {step}")


@contextlib.contextmanager
def process_group(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start ``command`` in a process group of its own. However the block is left, none survives.

    Args:
        options: For :class:`subprocess.Popen`.
    """
    process = subprocess.Popen(command, text=True, start_new_session=True, **options)
    try:
        yield process
    finally:
        # Nothing in it has anything to save, and vLLM ignores politer signals while it starts.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
