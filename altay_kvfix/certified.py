"""The layout certified for the ALTAY stack, and how another composition is declared.

A certified layout is applied to exactly the family counts it was certified for. Families are
compared by their counts alone, whatever order vLLM meets them in.
"""

from __future__ import annotations

from collections.abc import Sequence

from .layout import LayoutPlan, canonical_sizes, make_layout_plan

REPAIR_ID = "ALTAY72_KV_ATTENTION_EXACT_G8_V2"
"""Names the certified repair in traces and logs."""

ARCHITECTURE = "LomonosovZenitAltayForConditionalGeneration"

GROUP_SIZE = 8

LEGACY_PLAN = make_layout_plan((16, 54), 16)
"""What vLLM chooses for 16 full-attention + 54 GDN layers: 5 groups, 80 slots, 10 padding."""

COMPACT_PLAN = make_layout_plan((16, 54), GROUP_SIZE)
"""The certified layout of the same layers: 9 groups, 72 slots, 2 padding."""


def plan_for(family_counts: Sequence[int], group_size: int = GROUP_SIZE) -> LayoutPlan:
    """The layout a declared composition gets: the largest canonical size up to ``group_size``.

    A size that is not canonical makes narrower groups than it says; declaring the width that is
    really made keeps the plan, the log and the trace to one number. Counts are sorted.

    Raises:
        ValueError: fewer than two families (nothing to group), a family without layers, or a
            group size below 1.
    """
    counts = tuple(family_counts)
    make_layout_plan(counts, group_size)  # raises on malformed counts and sizes
    if len(counts) < 2:
        raise ValueError(f"a hybrid composition has two or more families, got {counts!r}")
    largest = max(g for g in canonical_sizes(counts) if g <= group_size)
    return make_layout_plan(sorted(counts), largest)


def matches(plan: LayoutPlan, family_counts: Sequence[int]) -> bool:
    """Whether ``family_counts`` is the composition that ``plan`` was certified for."""
    return sorted(plan.family_counts) == sorted(family_counts)
