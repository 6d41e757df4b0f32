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


def answers(run: EngineRun) -> list[list[list[int]]]:
    """Token ids by round and request; the run has to have succeeded."""
    assert run.exit_code == 0, run.log[-5000:]
    assert run.result is not None
    return [[answer["token_ids"] for answer in round_] for round_ in run.result["rounds"]]


def our_lines(run: EngineRun) -> list[str]:
    return [line for line in run.log.splitlines() if "altay-kvfix" in line]


def layout_rows(run: EngineRun) -> list[dict[str, object]]:
    return [row for row in run.trace if "group_lengths" in row]
