"""The real engine. A start takes half a minute: each run is shared by all that look at it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_process import REPOSITORY, EngineRun, engine_environment, run_engine
from tiny_models import build_checkpoint

pytest.importorskip("vllm", reason="the engine tests need vLLM: make test installs it")

PLUGIN = REPOSITORY / "examples" / "three_family_plugin"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Build a tiny checkpoint; arguments are those of ``build_checkpoint``."""
    directory = tmp_path_factory.mktemp("checkpoints")

    def build(name: str, **arguments: object) -> Path:
        return build_checkpoint(directory / name, **arguments)

    return build


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., EngineRun]:
    """Start an engine with our folder on PYTHONPATH; keywords are environment variables."""

    def run(
        model: Path,
        *options: str | int,
        plugin: bool = False,
        **variables: str,
    ) -> EngineRun:
        environment = engine_environment(
            python_path=(REPOSITORY, PLUGIN) if plugin else (REPOSITORY,), **variables
        )
        return run_engine(
            model,
            tmp_path_factory.mktemp("run"),
            *options,
            environment=environment,
        )

    return run
