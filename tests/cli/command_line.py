"""Runs the command line as a person does: in a process of its own, stdout and stderr apart."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from altay_kvfix.settings import VARIABLES

REPOSITORY = Path(__file__).resolve().parents[2]

# As the console script does it, so that PYTHONPATH stays free for what a test is about.
MAIN = f"import sys; sys.path.append({str(REPOSITORY)!r}); from altay_kvfix.cli import main; main()"


@dataclass(frozen=True)
class Answer:
    exit_code: int
    stdout: str
    stderr: str

    @property
    def report(self) -> Any:
        """What ``--json`` printed; stdout has nothing else."""
        return json.loads(self.stdout)


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's environment without what decides about us, and ``variables``."""
    ours = {*VARIABLES.values(), "PYTHONPATH", "NO_COLOR", "FORCE_COLOR"}
    environment = {k: v for k, v in os.environ.items() if k not in ours}
    return environment | variables


def command(*arguments: str | os.PathLike[str]) -> list[str]:
    return [sys.executable, "-c", MAIN, *map(str, arguments)]
