"""What the tests of start-up share; interpreters.py starts the interpreters."""

from __future__ import annotations

import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from interpreters import installed, make_folder, peers_python


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that goes on PYTHONPATH."""
    return make_folder(tmp_path_factory.mktemp("kvfix") / "folder")


@pytest.fixture
def shadowed(tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder with somebody's sitecustomize.py in it."""

    def make(code: str, name: str = "shadowed") -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "sitecustomize.py").write_text(code)
        return tmp_path / name

    return make


@pytest.fixture(scope="session")
def pure_wrapt() -> Path:
    """A folder with wrapt in it, without its C extension: for every version of Python."""
    return installed("pure-wrapt", "--no-deps", "--platform=any", "wrapt")


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with nothing installed: no vLLM, no wrapt."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


@pytest.fixture(scope="session")
def peers() -> Path:
    """The interpreter of an environment under .cache that holds requirements/peers.txt."""
    return peers_python()
