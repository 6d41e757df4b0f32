"""Which layout a planning call gets, and why: the decision, without vLLM and without side effects.

The tables in the README are this file; :func:`decide` reads in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from . import certified
from .layout import LayoutPlan
from .settings import (
    DISABLE_ENV_NAME,
    FAMILY_COUNTS_ENV_NAME,
    LAYOUT_ENV_NAME,
    Mode,
    Settings,
)

_SWITCHES = (DISABLE_ENV_NAME, LAYOUT_ENV_NAME, FAMILY_COUNTS_ENV_NAME)
"""Malformed, these leave open what the person wanted of the certified layout."""


class Outcome(Enum):
    APPLY = "apply"
    """Use :attr:`Decision.plan`."""
    NATIVE = "native"
    """vLLM's own layout is what the rules want here."""
    FALLBACK = "fallback"
    """vLLM's own layout, although another one was wanted: worth a warning."""
    REFUSE = "refuse"
    """Stop the engine: what was required can't be had."""


@dataclass(frozen=True)
class Situation:
    """One planning call: what vLLM was asked and how it answered, in plain values."""

    is_altay: bool
    """The config names ALTAY, or the model's own package asked for the certified layout."""
    native_only: str | None = None
    """Why no other layout is possible whatever the mode, or None."""
    unknown: str | None = None
    """Why this vLLM's grouping was not recognised, or None."""
    family_counts: tuple[int, ...] = ()
    """Layers per family, in vLLM's order; hidden-state layers are not among them."""
    hidden_state_layers: int = 0


@dataclass(frozen=True)
class Decision:
    outcome: Outcome
    rule: str
    """Which rule decided: ``certified`` or ``native``."""
    reason: str
    plan: LayoutPlan | None = None
    """The layout to apply; only with :attr:`Outcome.APPLY`."""


def decide(situation: Situation, settings: Settings) -> Decision:
    """Choose the layout for one planning call."""
    if situation.native_only:
        return Decision(Outcome.NATIVE, "native", situation.native_only)

    required = settings.mode is Mode.REQUIRED
    doubts = [e for e in settings.errors if e.variable in _SWITCHES]
    if doubts:
        reason = "; ".join(map(str, doubts))
        meant_required = any(e.variable != DISABLE_ENV_NAME for e in doubts)
        if required or (situation.is_altay and meant_required):
            return Decision(Outcome.REFUSE, "certified", reason)
        return Decision(Outcome.NATIVE, "native", reason)

    if required or (situation.is_altay and settings.mode is not Mode.OFF):
        return _decide_certified(situation, settings.certified_plan, required)
    if situation.is_altay:
        return Decision(Outcome.NATIVE, "native", "the certified layout is switched off")
    return Decision(Outcome.NATIVE, "native", "the config does not name ALTAY")


def _decide_certified(situation: Situation, plan: LayoutPlan, required: bool) -> Decision:
    obstacle = _certified_obstacle(situation, plan)
    if obstacle is None:
        return Decision(
            Outcome.APPLY, "certified", "the family counts are the certified ones", plan
        )
    return Decision(Outcome.REFUSE if required else Outcome.FALLBACK, "certified", obstacle)


def _certified_obstacle(situation: Situation, plan: LayoutPlan) -> str | None:
    if situation.unknown:
        return situation.unknown
    if situation.hidden_state_layers:
        return (
            f"{situation.hidden_state_layers} hidden-state cache layers are present, "
            "which the certified layout does not cover"
        )
    if not certified.matches(plan, situation.family_counts):
        return (
            f"expected families of {_counts(plan.family_counts)} layers, "
            f"found {_counts(situation.family_counts)}"
        )
    return None


def _counts(family_counts: tuple[int, ...]) -> str:
    return " + ".join(map(str, sorted(family_counts)))
