"""The installed vLLM's real planner with the hook armed, in this process."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import altay_kvfix
from altay_kvfix import hook, report, settings

pytest.importorskip("vllm", reason="the planner tests need vLLM: make test installs it")


@pytest.fixture(scope="session")
def planner() -> ModuleType:
    altay_kvfix.install_altay72_compact_kv_layout()
    from vllm.v1.core import kv_cache_utils

    assert isinstance(kv_cache_utils.get_kv_cache_groups, hook._PlannerFunction)
    return kv_cache_utils


@pytest.fixture(autouse=True)
def fresh_process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in vars(settings):
        if name.endswith("_ENV_NAME"):
            monkeypatch.delenv(getattr(settings, name), raising=False)
    monkeypatch.setattr(hook, "_forced_altay", False)
    monkeypatch.setattr(report, "_already_said", set())


@pytest.fixture
def lines() -> Iterator[list[logging.LogRecord]]:
    """Every record of vLLM's loggers and ours, as vLLM's handler would get it."""
    records: list[logging.LogRecord] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger = logging.getLogger("vllm")
    collector, level = Collector(), logger.level
    logger.addHandler(collector)
    logger.setLevel(logging.DEBUG)
    yield records
    logger.removeHandler(collector)
    logger.setLevel(level)


@pytest.fixture
def said(lines: list[logging.LogRecord]) -> Callable[..., list[str]]:
    """``said()``: our lines at INFO and above; ``said(logging.WARNING)``: at that level alone."""

    def said(level: int | None = None, ours: bool = True) -> list[str]:
        return [
            record.getMessage()
            for record in lines
            if (record.name == "vllm.altay_kvfix") == ours
            and (record.levelno == level if level else record.levelno >= logging.INFO)
        ]

    return said


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict[str, Any]]]:
    path = tmp_path / "trace.jsonl"
    monkeypatch.setenv(altay_kvfix.TRACE_ENV_NAME, str(path))
    return lambda: [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def made(planner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every group list that vLLM makes, so that a test can tell its own object from a copy."""
    lists: list[Any] = []
    make = planner.create_kv_cache_group_specs

    def recording(*args: Any) -> Any:
        lists.append(make(*args))
        return lists[-1]

    monkeypatch.setattr(planner, "create_kv_cache_group_specs", recording)
    return lists
