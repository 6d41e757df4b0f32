from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Answer, clean_environment, command

pytest.importorskip("typer", reason="the command line needs typer: make test installs it")


@pytest.fixture
def cli(tmp_path: Path) -> Callable[..., Answer]:
    """Run a command from an empty folder; keywords are environment variables."""

    def cli(*arguments: str | os.PathLike[str], cwd: Path = tmp_path, **variables: str) -> Answer:
        done = subprocess.run(
            command(*arguments),
            env=clean_environment(**variables),
            cwd=cwd,
            text=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=300,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    return cli
