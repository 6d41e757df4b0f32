from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import LAYOUTS, problem_of

from altay_kvfix.layout import groups_of, rule_of_thumb, split_round_robin
from altay_kvfix.search import (
    MIN_CAPACITY,
    Family,
    Problem,
    evaluate,
    lower_bound,
    search,
)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    families = []
    for _ in range(draw(st.integers(2, 6))):
        layers = draw(st.integers(1, 40))
        blocks = draw(st.integers(1, 5000))
        families.append(
            Family(
                layers,
                blocks,
                max_blocks_per_request=draw(st.integers(blocks, 6000)),
                is_attention=draw(st.booleans()),
                draft_layers=tuple(range(layers - draw(st.integers(0, min(3, layers))), layers)),
                may_hold_draft=draw(st.integers(0, 9)) == 0,
                stages=draw(st.sampled_from([(), tuple(i * 2 // layers for i in range(layers))])),
            )
        )
    if any(not f.stages for f in families):
        families = [Family(**{**vars_of(f), "stages": ()}) for f in families]
    counts = [f.layers for f in families]
    return Problem(
        tuple(families),
        rule_of_thumb(counts),
        pages=draw(st.none() | st.integers(1, 10**6)),
        max_num_seqs=draw(st.integers(1, 1024)),
    )


def vars_of(family: Family) -> dict[str, object]:
    return {name: getattr(family, name) for name in Family.__dataclass_fields__}


def brute_force(problem: Problem, size: int) -> dict[str, float]:
    """Every figure of a layout, counted on layers that are really dealt out."""
    dealt = [
        (family, group)
        for family in problem.families
        for group in split_round_robin(range(family.layers), groups_of(family.layers, size))
    ]

    def width(family: Family, group: list[int]) -> int:
        stages = [family.stages[i] if family.stages else 0 for i in group]
        return max(stages.count(stage) for stage in set(stages))

    widest = max(width(family, group) for family, group in dealt)
    return {
        "groups": len(dealt),
        "cost": widest * sum(family.blocks_per_request for family, _ in dealt),
        "attention": sum(family.is_attention for family, _ in dealt),
        "draft": sum(bool(set(f.draft_layers) & set(group)) for f, group in dealt),
        "further": any(
            groups_of(f.layers, size) > groups_of(f.layers, problem.native_size)
            for f in problem.families
            if f.may_hold_draft
        ),
        "starts": problem.pages is None
        or (
            problem.pages // widest >= problem.max_num_seqs
            and problem.pages // widest > sum(f.longest_blocks for f, _ in dealt)
        ),
    }


@settings(max_examples=400, deadline=None)
@given(problems(), st.sampled_from([0, 0.001, 0.005, 0.1]), st.integers(1, 60))
def test_never_worse_and_nothing_allowed_is_better(problem, group_cost, max_groups):
    result = search(problem, max_groups=max_groups, group_cost=group_cost)
    native = brute_force(problem, problem.native_size)
    chosen = brute_force(problem, result.chosen.size)

    assert chosen["cost"] == result.chosen.cost
    assert native["cost"] / chosen["cost"] >= MIN_CAPACITY
    if not result.chosen.is_native:
        assert chosen["groups"] <= max_groups
        assert chosen["draft"] <= native["draft"] and not chosen["further"]
        assert chosen["attention"] <= native["attention"] + 1
        assert chosen["starts"] or not native["starts"]

    def priced(figures: dict[str, float]) -> float:
        return figures["cost"] * (1 + group_cost * figures["groups"])

    for size in range(1, max(f.layers for f in problem.families) + 1):
        other = brute_force(problem, size)
        allowed = (
            other["groups"] <= max_groups
            and native["cost"] / other["cost"] >= MIN_CAPACITY
            and other["draft"] <= native["draft"]
            and not other["further"]
            and other["attention"] <= native["attention"] + 1
            and (other["starts"] or not native["starts"])
        )
        if allowed:
            assert (priced(chosen), chosen["groups"]) <= (priced(other), other["groups"])


@given(problems())
def test_the_table_is_complete_and_true(problem):
    result = search(problem)
    for candidate in result.candidates:
        figures = brute_force(problem, candidate.size)
        assert (candidate.cost, candidate.groups) == (figures["cost"], figures["groups"])
        assert candidate.attention_groups == figures["attention"]
        assert candidate.draft_groups == figures["draft"]
        assert candidate.capacity == pytest.approx(result.native.cost / figures["cost"])
    assert result.native in result.candidates and result.chosen in result.candidates
    assert [c for c in result.candidates if c.is_native] == [result.native]
    if not any(family.stages for family in problem.families):
        assert min(c.cost for c in result.candidates) >= result.lower_bound
        assert result.candidates[0].size == 1
        assert result.candidates[0].cost == lower_bound(problem.families)


def test_native_wins_a_tie():
    # 8 + 8 cost the same in groups of 1, 2, 4 and 8.
    result = search(Problem((Family(8, 10), Family(8, 10)), 8), group_cost=0)
    assert {c.size for c in result.candidates if c.capacity == 1} == {1, 2, 4, 8}
    assert result.chosen.is_native


def test_fewer_groups_win_a_tie():
    families = (Family(4, 10), Family(8, 10))
    result = search(Problem(families, 1), group_cost=0)
    assert (result.chosen.size, result.chosen.groups) == (4, 3)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (
            Problem((Family(5, 1, draft_layers=(3, 4)), Family(6, 1), Family(40, 1)), 6),
            "spreads the drafter's layers over 2 groups, native over 1",
        ),
        (
            Problem((Family(5, 1, may_hold_draft=True), Family(6, 1), Family(40, 1)), 6),
            "may hold the drafter's layers",
        ),
        (
            Problem((Family(20, 8192), Family(30, 193)), 20),
            "it has 5 attention groups, native 3",
        ),
        (Problem((Family(20, 8192), Family(40, 2, is_attention=False)), 20), "more than 24"),
        (Problem((Family(16, 877), Family(54, 2, is_attention=False)), 16), "% fewer tokens"),
        (
            Problem((Family(6, 1), Family(6, 1)), 1, pages=100, max_num_seqs=51),
            "its 50 blocks are fewer than max_num_seqs 51",
        ),
        (
            Problem((Family(6, 1), Family(6, 1)), 1, pages=13),
            "its 6 blocks do not hold one request of max_model_len tokens, which takes 6",
        ),
    ],
)
def test_a_dropped_candidate_says_why(problem, reason):
    dropped = [candidate.dropped or "" for candidate in search(problem).candidates]
    assert any(reason in text for text in dropped), dropped


def test_one_family_is_no_search():
    with pytest.raises(ValueError, match="two families"):
        search(Problem((Family(16, 1),), 16))


def test_a_forced_size_is_compared_at_the_width_it_makes():
    problem = Problem((Family(16, 877), Family(54, 2, is_attention=False)), 16)
    forced, native = evaluate(problem, 10)
    assert (forced.size, native.size) == (9, 16)
    assert forced.capacity == native.cost / forced.cost < 1
    assert evaluate(problem, 1000)[0].size == 54


PICKS = {
    # name: (size, groups), why
    "altay-1m": ((16, 5), "8 holds 0.1 % more, for four groups more"),
    "qwen3.8-27b-dflash2-radiance": ((8, 9), "full attention without padding"),
    "qwen3.8-27b-dflash2-fp8": ((8, 9), "full attention without padding"),
    "mimo-v2.5-draft": ((9, 7), "3 holds more, but spreads the drafter over two groups"),
    "glm-5.3-flash-dflash2": ((11, 6), "all full attention in one group"),
    "gpt-oss-20b-p-eagle": ((17, 2), "every other size spreads the drafter"),
    "qwen3.6-35b-dflash": ((1, 46), "fewer groups cost a quarter of the capacity"),
    "qwen3.8-27b-mtp": ((17, 4), "leave it alone"),
    "qwen3.6-35b-mtp": ((11, 4), "leave it alone"),
    "gemma3-27b": ((10, 7), "full attention without padding already"),
    "qwen3.8-flash-next-ple": ((12, 7), "66 groups fewer for a quarter of a percent"),
    "nemotron-3-nano": ((6, 5), "full attention without padding already"),
    "lfm2-1.2b": ((6, 3), "full attention without padding already"),
    "fixme-20-full-30-sliding": ((20, 3), "10 makes two attention groups more"),
}


@pytest.mark.parametrize("name", PICKS)
def test_picks_for_real_models(name):
    layout = next(x for x in json.loads(LAYOUTS.read_text())["layouts"] if x["name"] == name)
    result = search(problem_of(layout))
    assert (result.native.size, result.native.groups) == (
        layout["native"]["size"],
        layout["native"]["groups"],
    )
    assert (result.chosen.size, result.chosen.groups) == PICKS[name][0]
    if "leave it alone" in layout.get("notes", ""):
        assert result.chosen.is_native


def test_every_layout_has_a_pick():
    assert {x["name"] for x in json.loads(LAYOUTS.read_text())["layouts"]} == set(PICKS)


def test_lower_bound_is_that_of_the_stage_with_the_most():
    """Three of family a's layers are on stage 0 and two of b's on stage 1."""
    families = (
        Family(4, 10, stages=(0, 0, 0, 1)),
        Family(3, 100, stages=(0, 1, 1)),
    )
    assert lower_bound(families) == max(3 * 10 + 1 * 100, 1 * 10 + 2 * 100)
    problem = Problem(families, native_size=4)
    result = search(problem)
    assert all(candidate.cost >= result.lower_bound for candidate in result.candidates)
