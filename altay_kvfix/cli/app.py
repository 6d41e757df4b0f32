"""All commands under one name."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from .. import __version__
from . import doctor, path, plan, run, verify
from .common import EXIT_CODES, INTERRUPTED, Failure, say

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
    # As Ctrl-C does, so that what was started is ended.
    signal.signal(signal.SIGTERM, _terminated)
    try:
        app(standalone_mode=True)
    except Failure as failure:
        say(str(failure))
        sys.exit(failure.exit_code)
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(INTERRUPTED)


def _terminated(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
