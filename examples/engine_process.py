"""Run engines as subprocesses, watch them, and leave nothing of them behind.

Standard library only: whoever watches an engine need not be able to run one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

REPOSITORY = Path(__file__).resolve().parent.parent
ENGINE_RUN = Path(__file__).resolve().with_name("engine_run.py")

_OUR_VARIABLES = ("ALTAY_KVFIX_", "ZENIT_ALTAY_KV_LAYOUT", "RADIANCE_KV_GROUP_")
_TOKENS_LINE = re.compile(r"KV cache size: ([\d,]+) tokens")
_GROUPS_LINE = re.compile(r"kv cache group sizes \(([\d, ]+)\)")
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class EngineRun:
    """What one run of `engine_run.py` left behind."""

    exit_code: int
    seconds: float
    log: str
    """Standard output and standard error of all the engine's processes, in the order written."""
    log_file: Path
    result: dict[str, Any] | None
    """What `engine_run.py` wrote; None when it did not get that far."""
    trace: list[dict[str, Any]]
    """The evidence that altay-kvfix appended, oldest first."""

    @property
    def kv_cache_tokens(self) -> int | None:
        return kv_cache_tokens(self.log)

    @property
    def group_count(self) -> int | None:
        return group_count(self.log)

    @property
    def planning_row(self) -> dict[str, Any] | None:
        return planning_row(self.trace)


def run_engine(
    model: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *options: str | int,
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
    timeout: float = 600.0,
    python: str = sys.executable,
) -> EngineRun:
    """Run `engine_run.py` on the checkpoint `model` and collect what it leaves in `directory`.

    `options` are those of `engine_run.py`; `environment` is the whole environment, by default
    `engine_environment()`. `on_line` gets every line of the log as it is written. A run of more
    than `timeout` seconds ends in `TimeoutError`. A failing engine is no exception: look at
    `exit_code`.
    """
    directory = Path(directory).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    result_file, trace_file = directory / "result.json", directory / "trace.jsonl"
    log_file = directory / "engine.log"
    for old in (result_file, trace_file):
        old.unlink(missing_ok=True)

    command = [python, str(ENGINE_RUN), str(model), "--out", str(result_file), *map(str, options)]
    variables = dict(engine_environment() if environment is None else environment)
    variables.setdefault("ZENIT_ALTAY_KV_LAYOUT_TRACE_PATH", str(trace_file))

    started = time.monotonic()
    with (
        process_group(command, variables, log_file) as process,
        log_file.open(errors="replace") as log,
    ):
        for line in follow(process, log, timeout):
            if on_line is not None:
                on_line(line)
    return EngineRun(
        exit_code=process.returncode,
        seconds=time.monotonic() - started,
        log=log_file.read_text(errors="replace"),
        log_file=log_file,
        result=json.loads(result_file.read_text()) if result_file.exists() else None,
        trace=read_trace(trace_file),
    )


def engine_environment(
    *,
    disable: bool = False,
    python_path: Sequence[str | os.PathLike[str]] = (REPOSITORY,),
    **variables: str,
) -> dict[str, str]:
    """The environment of an engine that is planned by altay-kvfix, unless `disable`.

    It is this process's own without any of the product's variables, so that those of the caller's
    shell have no say. `python_path` becomes PYTHONPATH; an empty one leaves the product out.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_OUR_VARIABLES)}
    environment.pop("PYTHONPATH", None)
    environment |= {
        # Fixed, so that every machine gets a pool of the same size. GiB.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if python_path:
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(p).absolute()) for p in python_path)
    if disable:
        environment["ALTAY_KVFIX_DISABLE"] = "1"
    return environment | variables


@contextlib.contextmanager
def process_group(
    command: Sequence[str], environment: Mapping[str, str], log_file: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `command` in a process group of its own, with all output going to `log_file`.

    vLLM's own processes stay in that group. However the block is left, none of them survives it.
    """
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _end_group(process)


def follow(process: subprocess.Popen[bytes], log: TextIO, timeout: float) -> Iterator[str]:
    """Yield the lines of a growing log until `process` has ended; raise after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    partial = ""
    while True:
        ended = process.poll() is not None
        partial += log.read()
        *lines, partial = partial.split("\n")
        yield from lines
        if ended:
            if partial:
                yield partial
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"still running after {timeout:.0f} s: {process.args!r}")
        time.sleep(_POLL_SECONDS)


def kv_cache_tokens(log: str) -> int | None:
    """The KV cache's size in tokens as vLLM logs it; None when the log does not say."""
    found = _TOKENS_LINE.search(log)
    return int(found[1].replace(",", "")) if found else None


def group_count(log: str) -> int | None:
    """The number of KV cache groups as vLLM logs it; None when the log does not say."""
    found = _GROUPS_LINE.search(log)
    return len(re.findall(r"\d+", found[1])) if found else None


def read_trace(trace_file: Path) -> list[dict[str, Any]]:
    """The rows of a trace, oldest first; none when no process wrote one."""
    if not trace_file.exists():
        return []
    return [json.loads(line) for line in trace_file.read_text().splitlines()]


def planning_row(trace: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The last row about a layout: the one that the engine uses."""
    rows = [row for row in trace if row.get("group_lengths")]
    return rows[-1] if rows else None


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End every process of the group, politely first."""
    try:
        # Not SIGINT, which vLLM swallows while it starts.
        _signal_group(process, signal.SIGTERM)
        # Multiprocessing's resource tracker outlives the others, to free their shared memory.
        deadline = time.monotonic() + _GRACE_SECONDS
        while _signal_group(process, 0) and time.monotonic() < deadline:
            process.poll()
            time.sleep(_POLL_SECONDS)
    finally:
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to the group, 0 being none; False when no process of it is left."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True
