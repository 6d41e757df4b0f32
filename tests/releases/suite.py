"""Runs the checks of one release in a process of its own, and tells what they are.

Imports no vLLM: every release's own is imported by the process that checks it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from sources import ROOT, extra_packages, sources

PASSED = "passed"
NOT_THERE = "not in this release"

CHECKS = (
    "hook armed by PYTHONPATH",
    "certified layout",
    "counts differ",
    "required",
    "required looks at the finished groups",
    "off",
    "hybrid manager disabled",
    "a model that is not hybrid",
    "hidden-state layers",
    "packed layout",
    "EAGLE annotation",
    "two pipeline stages",
    "a worker's throw-away plan",
    "planner called inside itself",
    "HiSparse",
    "grouping owned by a model or platform",
    "search on published layouts",
    "search with little memory",
    "scheduler and KV cache manager",
    "price formula",
    "families and forced groups",
    "table of releases",
)
"""Every check, in the order of ``checks.py`` and of the table."""

_TABLE = ROOT / "docs" / "releases.md"
_TABLE_START = "<!-- written by `make releases` -->\n"
_TABLE_END = "<!-- end -->\n"


@cache
def results(release: str) -> Mapping[str, str]:
    """What every check said of ``release``: :data:`PASSED`, :data:`NOT_THERE` or a traceback.

    Raises:
        RuntimeError: the process did not answer; its output is in the message.
    """
    return json.loads(run_with(release, "checks.py", release).splitlines()[-1])


def run_with(release: str, script: str, *arguments: str, **variables: str) -> str:
    """Run a script of this folder with the vLLM of ``release``, the product armed as users arm it.

    Returns:
        What it printed to stdout.

    Raises:
        RuntimeError: it exited with an error.
    """
    path = [ROOT, sources(release)]
    if tuple(map(int, release.split(".")[:2])) < (0, 24):
        path.append(extra_packages())
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ALTAY_KVFIX_", "ZENIT_", "RADIANCE_", "VLLM_"))
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *arguments],
        env={**environment, "PYTHONPATH": os.pathsep.join(map(str, path)), **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError(f"{script} on vLLM {release}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def write_table(releases: tuple[str, ...]) -> None:
    """Put what was checked on ``releases`` into docs/releases.md, where its table stands."""
    short = [
        ".".join(release.split(".")[:2]) if release.endswith(".0") else release
        for release in releases
    ]
    signs = {PASSED: "✓", NOT_THERE: "-"}
    lines = [
        f"| checked with the planner of vLLM | {' | '.join(short)} |",
        f"| --- |{' :-: |' * len(releases)}",
        *(
            f"| {name} | {' | '.join(signs.get(results(r)[name], '✗') for r in releases)} |"
            for name in CHECKS
        ),
    ]
    before, _, rest = _TABLE.read_text(encoding="utf-8").partition(_TABLE_START)
    after = rest.partition(_TABLE_END)[2]
    table = "\n".join(lines) + "\n"
    _TABLE.write_text(before + _TABLE_START + table + _TABLE_END + after, encoding="utf-8")
