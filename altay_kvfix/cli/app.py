"""All commands under one name."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from .. import __version__
from . import doctor, path, plan, run, verify
from .common import EXIT_CODES, Failure, say

app = typer.Typer(
    name="altay-kvfix",
    help="KV cache groups of the right size for hybrid models in vLLM, from outside.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (run, doctor, plan, verify, path):
    command.add_to(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _common_options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    pass


def run_app() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    try:
        app()
    except Failure as failure:
        say(str(failure))
        sys.exit(failure.exit_code)


def _end(number: int, frame: FrameType | None) -> None:
    """Leave by way of every ``finally``, so that what was started is ended too."""
    sys.exit(128 + number)
