"""Real interpreters, started as a container starts them, and what they wrote and returned."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE = Path(__file__).resolve().parent / "fake"
"""Holds the stand-in for vLLM, and the module ``probe``."""
CACHE = ROOT / ".cache"

HOOKED = "import probe; print(probe.hooks())"
ONCE = "[1, 1, 1]\n"
NOT_HOOKED = "[0, 0, 0]\n"
ARMED = "import probe; print(probe.armed())"

NATIVE = "[16, 14, 14, 13, 13]\n"
COMPACT = "[8, 8, 8, 8, 8, 8, 8, 7, 7]\n"
NOT_ACTIVE = "altay-kvfix: not active, vLLM keeps its own KV cache layout: "


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    out: str
    err: str = ""
    code: int = 0


def environment(path: Sequence[str | os.PathLike[str]] = (), **variables: str) -> dict[str, str]:
    """An environment that nothing of the caller's Python settings leaks into."""
    inherited = {k: os.environ[k] for k in ("PATH", "HOME", "TMPDIR") if k in os.environ}
    if path:
        inherited["PYTHONPATH"] = os.pathsep.join(map(str, path))
    return inherited | variables


def run(
    *arguments: str | os.PathLike[str],
    path: Sequence[str | os.PathLike[str]] = (),
    env: Mapping[str, str] = {},
    python: str | os.PathLike[str] | None = sys.executable,
    cwd: str | os.PathLike[str] = "/",
    timeout: float = 60,
) -> Ended:
    """Run an interpreter (or, with ``python=None``, any program) and wait for its end.

    ``path`` is its PYTHONPATH, ``env`` what else is in its environment.
    """
    command = [str(argument) for argument in ((python, *arguments) if python else arguments)]
    ended = subprocess.run(
        command,
        env=environment(path, **env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return Ended(ended.stdout, ended.stderr, ended.returncode)


def make_folder(folder: Path) -> Path:
    """What ``pip install --no-deps --target`` puts there, without its metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "sitecustomize.py", folder)
    shutil.copytree(
        ROOT / "altay_kvfix",
        folder / "altay_kvfix",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    return folder


def installed(name: str, *arguments: str) -> Path:
    """A folder under .cache that ``pip install --target`` filled; kept for the next run.

    Skips the test where that is not possible.
    """
    folder = CACHE / name
    if not folder.is_dir():
        pip_install(folder, f"--target={folder}", "--only-binary=:all:", *arguments)
    return folder


def pip_install(made: Path, *arguments: str, python: str | Path = sys.executable) -> None:
    """Run pip, which makes ``made``; remove that and skip the test where pip fails."""
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    # All of the caller's environment but Python's: pip's own settings are in it.
    variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    ended = subprocess.run([*command, *arguments], env=variables, capture_output=True, text=True)
    if ended.returncode:
        shutil.rmtree(made, ignore_errors=True)
        reason = (ended.stderr.strip() or "it does not say why").splitlines()[-1]
        pytest.skip(f"pip can't install {arguments[-1]}: {reason}")


def peers_python() -> Path:
    """An environment under .cache with requirements/peers.txt in it; its interpreter.

    It is kept for the next run. Skips the test where it can't be made.
    """
    requirements = ROOT / "requirements" / "peers.txt"
    folder = CACHE / "peers"
    stamp = folder / "installed.txt"
    if not (stamp.exists() and stamp.read_text() == requirements.read_text()):
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        pip_install(folder, "-r", str(requirements), python=folder / "bin" / "python")
        stamp.write_text(requirements.read_text())
    return folder / "bin" / "python"
