"""``altay-kvfix path``: the folder that goes on PYTHONPATH."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from .common import FOLDER, print_json, say


def add_to(app: typer.Typer) -> None:
    app.command(
        epilog="Example, in a Dockerfile: "
        'RUN echo "export PYTHONPATH=$(altay-kvfix path)" >> /etc/profile.d/kvfix.sh'
    )(path)


def path(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Print the folder to put first on PYTHONPATH."""
    others = others_in_folder()
    if others:
        say(
            f"{len(others)} other packages live in this folder, and would stand in front of the "
            "container's own; better: pip install --target DIR altay-kvfix"
        )
    if as_json:
        print_json({"path": str(FOLDER), "others": others})
    else:
        print(FOLDER)


def others_in_folder() -> list[str]:
    """Distributions in our folder besides us and wrapt."""
    return sorted(
        name.partition("-")[0]
        for name in os.listdir(FOLDER)
        if name.endswith((".dist-info", ".egg-info"))
        and not name.startswith(("altay_kvfix", "wrapt-"))
    )
