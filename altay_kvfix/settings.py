"""The environment variables, read into one frozen object.

Values are trimmed and compared without case; an empty value means unset. A malformed value never
passes silently: it becomes a :class:`SettingError` that names the variable, the value and what is
allowed, and the planner decides what that error stops.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .certified import COMPACT_PLAN, GROUP_SIZE, plan_for
from .layout import LayoutPlan
from .search import DEFAULT_GROUP_COST, DEFAULT_MAX_GROUPS

DISABLE_ENV_NAME = "ALTAY_KVFIX_DISABLE"
LAYOUT_ENV_NAME = "ZENIT_ALTAY_KV_LAYOUT"
TRACE_ENV_NAME = "ZENIT_ALTAY_KV_LAYOUT_TRACE_PATH"
FAMILY_COUNTS_ENV_NAME = "ALTAY_KVFIX_FAMILY_COUNTS"
SEARCH_ENV_NAME = "RADIANCE_KV_GROUP_OPT"
GROUP_SIZE_ENV_NAME = "RADIANCE_KV_GROUP_SIZE"
MAX_GROUPS_ENV_NAME = "RADIANCE_KV_GROUP_MAX_GROUPS"
GROUP_COST_ENV_NAME = "ALTAY_KVFIX_GROUP_COST"
PLAN_TOKENS_ENV_NAME = "ALTAY_KVFIX_PLAN_TOKENS"
KV_TRANSFER_ENV_NAME = "ALTAY_KVFIX_WITH_KV_TRANSFER"

VARIABLES = {
    "disabled": DISABLE_ENV_NAME,
    "mode": LAYOUT_ENV_NAME,
    "certified_plan": FAMILY_COUNTS_ENV_NAME,
    "trace_path": TRACE_ENV_NAME,
    "search": SEARCH_ENV_NAME,
    "group_size": GROUP_SIZE_ENV_NAME,
    "max_groups": MAX_GROUPS_ENV_NAME,
    "group_cost": GROUP_COST_ENV_NAME,
    "plan_tokens": PLAN_TOKENS_ENV_NAME,
    "with_kv_transfer": KV_TRANSFER_ENV_NAME,
}
"""The variable behind each field of :class:`Settings`."""


class Mode(Enum):
    """What the certified layout may do (``ZENIT_ALTAY_KV_LAYOUT``)."""

    ATTENTION_EXACT = "attention_exact"
    """Apply it, or fall back to vLLM's own layout with a warning."""
    REQUIRED = "required"
    """Apply it, or refuse to start."""
    OFF = "off"
    """Leave vLLM's own layout alone."""


_MODES = {
    "attention_exact": Mode.ATTENTION_EXACT,
    "required": Mode.REQUIRED,
    "strict": Mode.REQUIRED,
    "off": Mode.OFF,
    "legacy": Mode.OFF,
    "0": Mode.OFF,
    "false": Mode.OFF,
}
_SWITCH = {"1": True, "true": True, "yes": True, "on": True}
_SWITCH |= {"0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class SettingError:
    """A malformed environment variable."""

    variable: str
    value: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.variable}={self.value!r} is not valid; allowed: {self.allowed}"


@dataclass(frozen=True)
class Settings:
    """Every setting in effect. Build it with :meth:`from_environ`."""

    disabled: bool = False
    mode: Mode = Mode.ATTENTION_EXACT
    certified_plan: LayoutPlan = COMPACT_PLAN
    """The composition the certified layout expects, and how it is laid out."""
    trace_path: str | None = None
    search: bool = True
    """Whether the capacity search runs for models that are not ALTAY."""
    group_size: int | None = None
    """A group size that an operator forces instead of the search's."""
    max_groups: int = DEFAULT_MAX_GROUPS
    group_cost: float = DEFAULT_GROUP_COST
    """Price of one more group, as a share of capacity."""
    plan_tokens: int | None = None
    """Request length in tokens that the search optimises for; None means max_model_len."""
    with_kv_transfer: bool = False
    """Search although a KV connector is configured."""
    errors: tuple[SettingError, ...] = ()

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read all variables. Never raises: malformed ones keep their default and are listed."""
        values: dict[str, Any] = {}
        errors: list[SettingError] = []
        for field, variable in VARIABLES.items():
            raw = environ.get(variable, "")
            value = raw.strip()
            if not value:
                continue
            parse, allowed = _PARSERS[field]
            try:
                values[field] = parse(value)
            except (ValueError, KeyError):
                errors.append(SettingError(variable, raw, allowed))
        return cls(**values, errors=tuple(errors))


def expect_family_counts(counts: Sequence[int], group_size: int = GROUP_SIZE) -> LayoutPlan:
    """Declare the family counts that the certified layout expects instead of ALTAY's 16 + 54.

    Call it before the engine starts. The declaration is kept in ``ALTAY_KVFIX_FAMILY_COUNTS`` of
    this process's environment, so that the engine's spawned processes see it too; a declaration
    found there is replaced.

    Args:
        counts: Layers per family, two families or more, in any order.
        group_size: The size to certify. Where it is not canonical for these counts, the largest
            canonical size below it is used.

    Returns:
        The plan that a model with exactly these counts will get.

    Raises:
        ValueError: fewer than two families, a count or the size below 1.
    """
    plan = plan_for(counts, group_size)
    os.environ[FAMILY_COUNTS_ENV_NAME] = (
        ",".join(map(str, plan.family_counts)) + f":{plan.group_size}"
    )
    return plan


def _parse_switch(value: str) -> bool:
    return _SWITCH[value.lower()]


def _parse_family_counts(value: str) -> LayoutPlan:
    counts, colon, size = value.partition(":")
    return plan_for(
        [_parse_whole_number(count) for count in counts.split(",")],
        _parse_whole_number(size) if colon else GROUP_SIZE,
    )


def _parse_whole_number(text: str) -> int:
    # int() alone would also take "1_6", "+16" and digits of other scripts.
    text = text.strip()
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)


def _parse_positive(value: str) -> int:
    number = _parse_whole_number(value)
    if number < 1:
        raise ValueError(value)
    return number


def _parse_cost(value: str) -> float:
    cost = float(value)
    if not 0 <= cost < math.inf:
        raise ValueError(value)
    return cost


def _parse_absolute_path(value: str) -> str:
    if not os.path.isabs(value):
        raise ValueError(value)
    return value


_SWITCH_PARSER = (_parse_switch, ", ".join(_SWITCH))
_POSITIVE_PARSER = (_parse_positive, "a whole number >= 1")
_PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "disabled": _SWITCH_PARSER,
    "mode": (lambda value: _MODES[value.lower()], ", ".join(_MODES)),
    "certified_plan": (
        _parse_family_counts,
        "two or more layer counts >= 1, then an optional group size, such as 7,9,54 or 7,9,54:9",
    ),
    "trace_path": (_parse_absolute_path, "an absolute path"),
    "search": _SWITCH_PARSER,
    "group_size": _POSITIVE_PARSER,
    "max_groups": _POSITIVE_PARSER,
    "group_cost": (_parse_cost, "a number >= 0, such as 0.005"),
    "plan_tokens": _POSITIVE_PARSER,
    "with_kv_transfer": _SWITCH_PARSER,
}
"""How the value of each field of :class:`Settings` is read, and what is allowed."""
