"""``altay-kvfix run -- COMMAND``: start a command with our folder first on PYTHONPATH."""

from __future__ import annotations

import os
import signal
from typing import Annotated

import typer

from .common import FOLDER, WRONG_INPUT, Failure, print_json, python_path_with

_CANNOT_EXECUTE = 126
_NOT_FOUND = 127


def add_to(app: typer.Typer) -> None:
    app.command(
        epilog="Example: altay-kvfix run -- vllm serve MODEL --max-model-len 262144",
        # The command's own options are none of ours, with or without "--" in front.
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    )(run)


def run(
    command: Annotated[
        list[str] | None, typer.Argument(help="What to start, with its arguments.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what would be started, and start nothing.")
    ] = False,
) -> None:
    """Start a command with our folder first on PYTHONPATH; existing entries are kept.

    The command replaces this process: it has its process id, its signals and its exit code. The
    shell's codes tell that it could not be started: 126 and 127.
    """
    if not command:
        raise Failure("nothing to start; example: altay-kvfix run -- vllm serve MODEL", WRONG_INPUT)
    python_path = python_path_with(FOLDER, os.environ.get("PYTHONPATH"))
    if as_json:
        print_json({"command": command, "environment": {"PYTHONPATH": python_path}})
        return
    # Python ignores these two, and what is ignored stays so for the command.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, os.environ | {"PYTHONPATH": python_path})
    except FileNotFoundError as error:
        raise Failure(f"{command[0]} is not found", _NOT_FOUND) from error
    except OSError as error:
        raise Failure(
            f"{command[0]} can't be started: {error.strerror}", _CANNOT_EXECUTE
        ) from error
