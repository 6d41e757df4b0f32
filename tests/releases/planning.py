"""What runs a planner and listens to it, for the scripts that run in a process of their own."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "planner"))

MEMORY = 8 << 30
LAYOUT = "ZENIT_ALTAY_KV_LAYOUT"
OURS = "vllm.altay_kvfix"


def plan(planner: ModuleType, config: Any, *worker_specs: Any, memory: int = MEMORY) -> list[Any]:
    """Plan as the engine does: the KV cache config of each worker."""
    workers = [dict(specs) for specs in worker_specs]
    arguments: list[Any] = [config, workers, [memory] * len(workers)]
    if hasattr(planner, "get_global_kv_cache_groups"):
        arguments.append(planner.get_global_kv_cache_groups(config, workers))
    configs: list[Any] = planner.get_kv_cache_configs(*arguments)
    return configs


def lengths(groups: Any) -> list[int]:
    return sorted(len(group.layer_names) for group in getattr(groups, "kv_cache_groups", groups))


def names(groups: Any) -> list[list[str]]:
    return [list(group.layer_names) for group in groups]


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Log:
    """The lines of vLLM and of the product while a block runs."""

    def __init__(self) -> None:
        self.records: list[logging.LogRecord] = []

    def ours(self, level: int = logging.INFO) -> list[str]:
        return [
            f"{record.levelname} {record.getMessage()}"
            for record in self.records
            if record.name == OURS and record.levelno >= level
        ]

    def vllms(self) -> list[str]:
        return [record.getMessage() for record in self.records if record.name != OURS]


@contextlib.contextmanager
def logged() -> Iterator[Log]:
    """Listen to the whole process's vLLM loggers."""
    log = Log()
    handler = logging.Handler()
    handler.emit = log.records.append  # type: ignore[method-assign]
    logger = logging.getLogger("vllm")
    logger.addHandler(handler)
    try:
        yield log
    finally:
        logger.removeHandler(handler)


def silence_vllm() -> None:
    """vLLM logs to stdout, where the answer of a script goes."""
    logger = logging.getLogger("vllm")
    logger.handlers.clear()
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
