"""Which layout a planning call gets, and why: the decision, without vLLM and without side effects.

The tables in the README are this file; :func:`decide` reads in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from . import certified
from .layout import LayoutPlan, make_layout_plan
from .search import (
    Problem,
    SearchResult,
    attention_excess,
    draft_spread,
    evaluate,
    new_shortage,
    search,
)
from .settings import (
    DISABLE_ENV_NAME,
    FAMILY_COUNTS_ENV_NAME,
    GROUP_COST_ENV_NAME,
    GROUP_SIZE_ENV_NAME,
    KV_TRANSFER_ENV_NAME,
    LAYOUT_ENV_NAME,
    MAX_GROUPS_ENV_NAME,
    PLAN_TOKENS_ENV_NAME,
    SEARCH_ENV_NAME,
    Mode,
    SettingError,
    Settings,
)

_SWITCHES = (DISABLE_ENV_NAME, LAYOUT_ENV_NAME, FAMILY_COUNTS_ENV_NAME)
"""Malformed, these leave open what the person wanted of the certified layout."""

_SEARCH_KNOBS = (
    SEARCH_ENV_NAME,
    GROUP_SIZE_ENV_NAME,
    MAX_GROUPS_ENV_NAME,
    GROUP_COST_ENV_NAME,
    PLAN_TOKENS_ENV_NAME,
    KV_TRANSFER_ENV_NAME,
)


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
    undivided: str | None = None
    """Why vLLM made these groups by other means than dividing families, or None."""
    family_counts: tuple[int, ...] = ()
    """Layers per family, in vLLM's order; hidden-state layers are not among them."""
    hidden_state_layers: int = 0
    not_searched: str | None = None
    """Why the capacity search must leave this model alone, or None."""
    kv_connector: bool = False
    max_model_len: int = 0
    problem: Callable[[int], Problem] | None = None
    """Prices the families for requests of so many tokens. Called only where the search needs it:
    the prices come from vLLM's code."""


@dataclass(frozen=True)
class Decision:
    outcome: Outcome
    rule: str
    """Which rule decided: ``certified``, ``search``, ``forced`` or ``native``."""
    reason: str
    plan: LayoutPlan | None = None
    """The layout to apply; only with :attr:`Outcome.APPLY`."""
    error: str | None = None
    """What was asked for and can't be done."""
    warnings: tuple[str, ...] = ()
    """What may fail with the layout that is applied."""
    search: SearchResult | None = None
    """The whole table of candidates, where the search ran."""


def decide(situation: Situation, settings: Settings) -> Decision:
    """Choose the layout for one planning call."""
    if situation.native_only:
        return _native(situation.native_only)

    required = settings.mode is Mode.REQUIRED
    doubts = [e for e in settings.errors if e.variable in _SWITCHES]
    if doubts:
        reason = "; ".join(map(str, doubts))
        meant_required = any(e.variable != DISABLE_ENV_NAME for e in doubts)
        if required or (situation.is_altay and meant_required):
            return Decision(Outcome.REFUSE, "certified", reason)
        return _native(reason)

    if required or (situation.is_altay and settings.mode is not Mode.OFF):
        return _decide_certified(situation, settings, required)
    if situation.is_altay:
        return _native("the certified layout is switched off")
    return _decide_search(situation, settings)


def _native(reason: str) -> Decision:
    return Decision(Outcome.NATIVE, "native", reason)


def _decide_certified(situation: Situation, settings: Settings, required: bool) -> Decision:
    plan = settings.certified_plan
    obstacle = _certified_obstacle(situation, plan)
    if obstacle is not None:
        outcome = Outcome.REFUSE if required else Outcome.FALLBACK
        return Decision(outcome, "certified", obstacle)
    warnings = []
    if settings.group_size is not None:
        warnings.append(f"{GROUP_SIZE_ENV_NAME} has no effect on a certified layout")
    return Decision(
        Outcome.APPLY,
        "certified",
        f"for exactly {_counts(plan.family_counts)} layers",
        plan,
        warnings=tuple(warnings),
    )


def _certified_obstacle(situation: Situation, plan: LayoutPlan) -> str | None:
    if situation.unknown or situation.undivided:
        return situation.unknown or situation.undivided
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


def _decide_search(situation: Situation, settings: Settings) -> Decision:
    if not settings.search:
        return _native("the capacity search is switched off")
    malformed = [str(e) for e in settings.errors if e.variable in _SEARCH_KNOBS]
    if malformed:
        return _native("; ".join(malformed))
    if situation.unknown:
        return Decision(Outcome.FALLBACK, "search", situation.unknown)
    obstacle = situation.undivided or situation.not_searched
    if obstacle:
        return _native(obstacle)
    if situation.kv_connector and not settings.with_kv_transfer:
        return _native(
            f"a KV connector is configured, and {KV_TRANSFER_ENV_NAME} is not set: nothing "
            "compares the layouts at its two ends"
        )
    tokens = settings.plan_tokens or situation.max_model_len
    if tokens > situation.max_model_len:
        error = SettingError(
            PLAN_TOKENS_ENV_NAME,
            str(tokens),
            f"1 to max_model_len, which is {situation.max_model_len}",
        )
        return Decision(Outcome.NATIVE, "native", str(error), error=str(error))
    if situation.problem is None:
        return _native("the model's configuration is not known here")
    problem = situation.problem(tokens)
    if settings.group_size is not None:
        return _decide_forced(situation, problem, settings.group_size)
    result = search(problem, max_groups=settings.max_groups, group_cost=settings.group_cost)
    reason = f"{result.reason}, for requests of {tokens:,} tokens"
    if result.chosen.is_native:
        return Decision(Outcome.NATIVE, "search", reason, search=result)
    plan = make_layout_plan(situation.family_counts, result.chosen.size)
    return Decision(Outcome.APPLY, "search", reason, plan, search=result)


def _decide_forced(situation: Situation, problem: Problem, size: int) -> Decision:
    asked = f"{GROUP_SIZE_ENV_NAME}={size}"
    forced, native = evaluate(problem, size)
    if forced.size == native.size:
        return _native(f"{asked} is the layout that vLLM chose itself")
    shortage = new_shortage(problem, forced, native)
    if shortage:
        error = f"{asked} can't be used by vLLM, its own layout is kept: {shortage}"
        return Decision(Outcome.NATIVE, "forced", error, error=error)
    drafter = draft_spread(problem, forced, native)
    attention = attention_excess(forced, native)
    return Decision(
        Outcome.APPLY,
        "forced",
        asked if forced.size == size else f"{asked} makes groups of {forced.size} at most",
        make_layout_plan(situation.family_counts, forced.size),
        warnings=tuple(
            f"{asked}: {risk}"
            for risk in (
                drafter and f"{drafter}; vLLM's V1 model runner may refuse to start",
                attention
                and f"{attention}; the attention backend may run out of memory for "
                "the workspace of each",
            )
            if risk
        ),
    )
