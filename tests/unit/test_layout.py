from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from altay_kvfix import COMPACT_PLAN, LEGACY_PLAN, REPAIR_ID, make_layout_plan
from altay_kvfix.certified import matches, plan_for
from altay_kvfix.layout import (
    canonical_sizes,
    effective_size,
    groups_of,
    is_canonical,
    split_round_robin,
)

counts = st.lists(st.integers(1, 80), min_size=1, max_size=6)
sizes = st.integers(1, 100)


def test_the_certified_plan_has_the_published_figures():
    assert REPAIR_ID == "ALTAY72_KV_ATTENTION_EXACT_G8_V2"
    assert (LEGACY_PLAN.group_size, LEGACY_PLAN.num_groups) == (16, 5)
    assert (LEGACY_PLAN.allocated_slots, LEGACY_PLAN.padding_slots) == (80, 10)
    assert (COMPACT_PLAN.group_size, COMPACT_PLAN.num_groups) == (8, 9)
    assert (COMPACT_PLAN.allocated_slots, COMPACT_PLAN.padding_slots) == (72, 2)
    assert COMPACT_PLAN.group_lengths == (8, 8, 8, 8, 8, 8, 8, 7, 7)


@given(counts, sizes)
def test_a_plan_holds_every_layer_once_and_pads_the_rest(family_counts, size):
    plan = make_layout_plan(family_counts, size)
    assert sum(plan.group_lengths) == plan.num_layers == sum(family_counts)
    assert plan.num_groups == sum(-(-n // size) for n in family_counts)
    assert plan.allocated_slots == plan.num_layers + plan.padding_slots
    assert 0 <= plan.padding_slots < size * len(family_counts)
    assert min(plan.group_lengths) >= 1 and max(plan.group_lengths) <= size


@given(st.lists(st.integers(), max_size=60), st.integers(1, 20))
def test_round_robin_deals_every_layer_in_turn(layers, num_groups):
    groups = split_round_robin(layers, num_groups)
    assert len(groups) == num_groups
    assert all(groups[i % num_groups][i // num_groups] == x for i, x in enumerate(layers))
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


@given(counts, sizes)
def test_the_effective_size_makes_the_same_groups(family_counts, size):
    effective = effective_size(family_counts, size)
    assert effective <= size
    assert effective == max(make_layout_plan(family_counts, size).group_lengths)
    assert is_canonical(family_counts, effective)
    assert [groups_of(n, size) for n in family_counts] == [
        groups_of(n, effective) for n in family_counts
    ]


@given(counts)
def test_canonical_sizes_are_all_layouts_without_duplicates(family_counts):
    layouts = {
        size: make_layout_plan(family_counts, size).group_lengths
        for size in canonical_sizes(family_counts)
    }
    assert len(set(layouts.values())) == len(layouts)
    assert set(layouts.values()) == {
        make_layout_plan(family_counts, size).group_lengths
        for size in range(1, max(family_counts) + 1)
    }


@pytest.mark.parametrize("bad", [(), (0,), (3, -1), (True, 2), ("3",), (2.0,)])
def test_malformed_counts_are_named(bad):
    with pytest.raises(ValueError, match="family_counts must be"):
        make_layout_plan(bad, 8)


@pytest.mark.parametrize("bad", [0, -8, 1.5, True, "8", None])
def test_a_malformed_size_is_named(bad):
    with pytest.raises(ValueError, match="group_size must be"):
        make_layout_plan((16, 54), bad)


@pytest.mark.parametrize(
    ("family_counts", "asked", "size"),
    [
        ((16, 54), 8, 8),
        ((54, 9, 7), 8, 8),
        ((3, 4), 8, 4),  # no group can be 8 wide
        ((16, 54), 10, 9),  # 16 in two groups of 8, 54 in six of 9
        ((16, 54), 1, 1),
    ],
)
def test_a_declared_composition_gets_the_largest_canonical_size(family_counts, asked, size):
    plan = plan_for(family_counts, asked)
    assert plan.group_size == size
    assert plan.family_counts == tuple(sorted(family_counts))
    assert max(plan.group_lengths) == size


def test_one_family_is_not_hybrid():
    with pytest.raises(ValueError, match="two or more families"):
        plan_for((16,))


def test_families_match_in_any_order_and_exactly():
    assert matches(COMPACT_PLAN, (54, 16)) and matches(COMPACT_PLAN, (16, 54))
    for other in [(15, 55), (16, 54, 1), (16,), (54, 54), ()]:
        assert not matches(COMPACT_PLAN, other)
