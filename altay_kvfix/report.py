"""What a person sees of a planning call: one log line, one trace row, one clear error."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import trace, vllm_compat
from .certified import REPAIR_ID
from .planner import Decision, Outcome, Situation
from .settings import LAYOUT_ENV_NAME, Mode, Settings
from .vllm_compat import Groups, Specs

_log = logging.getLogger(vllm_compat.LOGGER_NAME)
_already_said: set[str] = set()


class KVLayoutError(RuntimeError):
    """The layout that was required can't be had; the engine must not start without it."""


@dataclass
class ConfigsCall:
    """A running get_kv_cache_configs: the engine's real plan, with every worker's memory.

    Or, from vLLM 0.33, a get_global_kv_cache_groups: the same plan before memory is profiled.
    """

    vllm_config: Any
    worker_specs: Sequence[Specs]
    """Each worker's own layers."""
    available_memory: Sequence[int] = ()
    """Bytes for the KV cache on each worker; empty before it is profiled."""
    planned: bool = False
    """Whether a decision was made in this call."""
    changed: bool = False
    """Whether it was another layout than vLLM's own."""
    certified: list[list[str]] | None = None
    """Layer names per group, once the certified layout has been applied."""


def settings_now() -> Settings:
    return Settings.from_environ(os.environ)


def log(level: int, message: str) -> None:
    _log.log(level, "altay-kvfix: %s", message)


def log_once(level: int, message: str) -> None:
    """Say it once in this process."""
    if message not in _already_said:
        _already_said.add(message)
        log(level, message)


def log_failure() -> None:
    """A bug of ours, with the current exception's traceback."""
    message = "altay-kvfix: failed, vLLM %s keeps its own KV cache layout: %r"
    _log.exception(message, vllm_compat.version(), sys.exc_info()[1])
    write_trace("fallback", reason="an exception, see the log")


def write_trace(event: str, **fields: Any) -> None:
    """Append a row where a trace is wanted. One that can't be written is logged once."""
    settings = settings_now()
    if settings.trace_path is None:
        return
    try:
        trace.write(
            settings.trace_path,
            event,
            repair_id=REPAIR_ID,
            vllm_version=vllm_compat.version(),
            mode=settings.mode.value,
            **fields,
        )
    except OSError as error:
        log_once(logging.WARNING, f"the trace can't be written: {error}")


def stand_aside(reason: object) -> None:
    """Leave vLLM alone and say so once.

    Raises:
        KVLayoutError: the layout is required, or a malformed setting may have meant that.
    """
    settings = settings_now()
    malformed = [str(e) for e in settings.errors if e.variable == LAYOUT_ENV_NAME]
    if settings.mode is Mode.REQUIRED or malformed:
        wanted = malformed[0] if malformed else f"{LAYOUT_ENV_NAME}=required"
        write_trace("refused", reason=str(reason))
        raise KVLayoutError(f"altay-kvfix: {wanted}, but {reason}")
    write_trace("fallback", reason=str(reason))
    log_once(logging.WARNING, f"not active, vLLM keeps its own KV cache layout: {reason}")


@dataclass
class PlanReport:
    """Log line and trace row of one planning call."""

    event: str
    """The trace event for a layout that is applied."""
    call: ConfigsCall | None
    """None where a worker plans a cache it throws away after profiling."""
    settings: Settings
    situation: Situation
    decision: Decision
    vllm_config: Any
    native: Groups

    def applied(self, groups: Groups) -> None:
        if self.call is not None and not self.call.available_memory:
            # The same plan is made again once it is, and told with what the memory holds.
            log(logging.DEBUG, f"KV cache layout ({self.decision.rule}) before memory is profiled")
            return
        before, after = self._measure(self.native), self._measure(groups)
        required = self.settings.mode is Mode.REQUIRED
        self._log(
            logging.WARNING if required else logging.INFO,
            f"KV cache layout ({self.decision.rule}{', required' if required else ''}): "
            f"group size {before.size} -> {after.size}, "
            f"{before.num_groups} -> {after.num_groups} groups, "
            f"{_change(before, after)}, "
            f"{before.padding} -> {after.padding} padding slots; {self.decision.reason}",
        )
        for warning in self.decision.warnings:
            self._log(logging.WARNING, warning)
        if self.decision.rule != "search" and after.holds_less_than(before):
            self._log(
                logging.WARNING,
                f"this KV cache layout holds less than vLLM's own: {_change(before, after)}",
            )
        if self.vllm_config is not None and vllm_compat.has_kv_connector(self.vllm_config):
            self._log(
                logging.WARNING,
                "a KV connector is configured: the KV cache layout was changed here, and the "
                "other end of the connector needs the same one, which nothing compares",
            )
        self._trace(self.event, groups)

    def kept_native(self) -> None:
        if self.decision.error:
            self._log(logging.ERROR, self.decision.error)
        elif self.decision.outcome is Outcome.FALLBACK:
            self._log(
                logging.WARNING,
                f"vLLM's own KV cache layout is used ({self.decision.rule}): "
                f"{self.decision.reason}",
            )
        else:
            self._log(logging.DEBUG, f"vLLM's own KV cache layout: {self.decision.reason}")
        self._trace(self.decision.outcome.value, self.native)

    def refused(self) -> KVLayoutError:
        self._trace("refused", self.native)
        return KVLayoutError(
            f"the certified KV cache layout can't be applied, and {LAYOUT_ENV_NAME} does not "
            f"allow another one: {self.decision.reason}"
        )

    def _log(self, level: int, message: str) -> None:
        # A throw-away plan is repeated by the one that counts, which says the same in the engine.
        log(level if self.call else logging.DEBUG, message)

    def _measure(self, groups: Groups) -> _Measure:
        lengths = vllm_compat.group_lengths(groups)
        blocks = tokens = None
        if self.vllm_config is not None and lengths:
            blocks = vllm_compat.blocks_per_request(self.vllm_config, groups)
            if self.call is not None and self.call.available_memory:
                tokens = vllm_compat.capacity_tokens(
                    self.vllm_config, groups, self.call.worker_specs, self.call.available_memory
                )
        return _Measure(lengths, blocks, tokens)

    def _trace(self, event: str, groups: Groups) -> None:
        if self.settings.trace_path is None:
            return  # most models are none of our business: nothing is computed for them
        measure = self._measure(groups)
        write_trace(
            event,
            rule=self.decision.rule,
            reason=self.decision.reason,
            family_counts=list(self.situation.family_counts),
            group_lengths=measure.lengths,
            allocated_slots=measure.slots,
            padding_slots=measure.padding,
            native_group_lengths=vllm_compat.group_lengths(self.native),
            blocks_per_request=measure.blocks,
            tokens=measure.tokens,
        )


@dataclass
class _Measure:
    """What a layout holds."""

    lengths: list[int]
    blocks: int | None
    """Blocks of one request of max_model_len tokens; None where no config is known."""
    tokens: int | None
    """KV cache tokens; None where the memory is not known."""

    @property
    def num_groups(self) -> int:
        return len(self.lengths)

    @property
    def size(self) -> int:
        return max(self.lengths, default=0)

    @property
    def slots(self) -> int:
        return self.size * self.num_groups

    @property
    def padding(self) -> int:
        return self.slots - sum(self.lengths)

    def holds_less_than(self, other: _Measure) -> bool:
        if self.tokens is not None and other.tokens is not None:
            return self.tokens < other.tokens
        return (self.blocks or 0) * self.size > (other.blocks or 0) * other.size


def _change(before: _Measure, after: _Measure) -> str:
    if before.tokens is not None and after.tokens is not None:
        return f"{before.tokens:,} -> {after.tokens:,} KV cache tokens"
    return f"{before.blocks} -> {after.blocks} blocks per request"
