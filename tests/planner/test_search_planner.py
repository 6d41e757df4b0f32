"""The capacity search against the real planner, with real specs and vLLM's own accounting."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_models import (
    LAYOUTS,
    PAGE,
    full_attention,
    gdn,
    hidden_states,
    layer_names,
    layout_config,
    layout_specs,
    lengths,
    model,
    sliding_window,
    speculative,
    split,
    vllm_config,
)

OTHER = "SomeHybridForCausalLM"
RADIANCE = LAYOUTS["qwen3.8-27b-dflash2-radiance"]
FP8 = LAYOUTS["qwen3.8-27b-dflash2-fp8"]
POOR = model(gdn=(48, gdn()), full=(16, full_attention()), sw=(5, sliding_window()))
POOR_NATIVE, POOR_BEST = 5, 8
MEMORY = 100_000 * PAGE


def page_size(specs: dict[str, Any]) -> int:
    return next(iter(specs.values())).page_size_bytes


def configs(planner: Any, config: Any, specs: Any, memory: int) -> tuple[Any, int, int]:
    """The engine's KV cache config, its blocks per request and its tokens, counted by vLLM."""
    (result,) = planner.get_kv_cache_configs(config, [specs], [memory])
    tokens, concurrency = planner.get_kv_cache_capacity(config, result)
    return result, round(result.num_blocks / concurrency), tokens


class TestPublishedFigures:
    @pytest.mark.parametrize(
        ("setting", "groups", "num_blocks", "blocks", "tokens"),
        [
            ({"RADIANCE_KV_GROUP_OPT": "0"}, 15, 2082, 738, 739_544),
            ({"ALTAY_KVFIX_GROUP_COST": "0"}, 9, 1301, 382, 892_799),
            ({}, 9, 1301, 382, 892_799),
            ({"RADIANCE_KV_GROUP_SIZE": "1"}, 69, 10412, 3032, 900_212),
        ],
    )
    def test_reference_model(
        self, planner, monkeypatch, setting, groups, num_blocks, blocks, tokens
    ):
        for name, value in setting.items():
            monkeypatch.setenv(name, value)
        specs = layout_specs(RADIANCE)
        memory = RADIANCE["available_pages"] * page_size(specs)
        result, *counted = configs(planner, layout_config(RADIANCE), specs, memory)
        assert len(result.kv_cache_groups) == groups
        assert [result.num_blocks, *counted] == [num_blocks, blocks, tokens]

    @pytest.mark.parametrize(
        ("setting", "figures"),
        [("0", [770, 743, 271_670]), ("1", [481, 387, 325_817])],
    )
    def test_fp8_model(self, planner, monkeypatch, setting, figures, said):
        monkeypatch.setenv("RADIANCE_KV_GROUP_OPT", setting)
        result, *counted = configs(
            planner, layout_config(FP8), layout_specs(FP8), FP8["available_bytes"]
        )
        assert [result.num_blocks, *counted] == figures
        if setting == "1":
            (line,) = said()
            assert "group size 5 -> 8, 15 -> 9 groups, 271,670 -> 325,817 KV cache tokens" in line

    def test_group_cost_zero_takes_the_least_cost_and_fewest_groups(
        self, planner, monkeypatch, lines
    ):
        monkeypatch.setenv("ALTAY_KVFIX_GROUP_COST", "0")
        for layout in LAYOUTS.values():
            specs, config = layout_specs(layout), layout_config(layout)
            native = planner.get_kv_cache_groups.__wrapped__(config, specs)
            chosen = planner.get_kv_cache_groups(config, specs)
            price = planner._max_memory_usage_bytes_from_groups
            assert price(config, chosen) <= price(config, native)


@pytest.mark.parametrize("name", LAYOUTS)
def test_real_models_start_from_the_published_native_layout(planner, name):
    layout = LAYOUTS[name]
    native = planner.get_kv_cache_groups.__wrapped__(layout_config(layout), layout_specs(layout))
    assert (max(lengths(native)), len(native)) == (
        layout["native"]["size"],
        layout["native"]["groups"],
    )


@pytest.mark.parametrize(
    ("name", "best"),
    [
        ("qwen3.8-27b-dflash2-radiance", (8, 9)),
        ("glm-5.3-flash-dflash2", (11, 6)),
        ("mimo-v2.5-draft", (9, 7)),
        ("qwen3.8-flash-next-ple", (12, 7)),
    ],
)
def test_real_models_gain(planner, said, name, best):
    layout = LAYOUTS[name]
    specs = layout_specs(layout)
    result, *_ = configs(planner, layout_config(layout), specs, 200_000 * page_size(specs))
    groups = result.kv_cache_groups
    assert (max(lengths(groups)), len(groups)) == best
    (line,) = said()
    assert f"for requests of {layout['max_model_len']:,} tokens" in line


@pytest.mark.parametrize(
    "name",
    [
        "altay-1m",
        "gemma3-27b",
        "gpt-oss-20b-p-eagle",
        "lfm2-1.2b",
        "nemotron-3-nano",
        "qwen3.6-35b-dflash",
        "qwen3.6-35b-mtp",
        "qwen3.8-27b-mtp",
        "fixme-20-full-30-sliding",
    ],
)
def test_what_is_right_already_is_left_alone(planner, said, made, name):
    layout = LAYOUTS[name]
    groups = planner.get_kv_cache_groups(layout_config(layout), layout_specs(layout))
    assert groups is made[0] and len(made) == 1
    assert said() == []


class TestNotApplied:
    def untouched(self, planner: Any, made: list[Any], config: Any, specs: Any) -> None:
        groups = planner.get_kv_cache_groups(config, specs)
        assert made == [groups] and groups is made[0]

    def test_switched_off(self, planner, made, monkeypatch, said):
        monkeypatch.setenv("RADIANCE_KV_GROUP_OPT", "0")
        self.untouched(planner, made, vllm_config(architecture=OTHER), POOR)
        assert said() == []

    def test_kv_connector_without_the_opt_in(self, planner, made, said):
        config = vllm_config(architecture=OTHER, kv_connector=object())
        self.untouched(planner, made, config, POOR)
        assert said() == []

    def test_kv_connector_with_the_opt_in(self, planner, said, monkeypatch):
        monkeypatch.setenv("ALTAY_KVFIX_WITH_KV_TRANSFER", "1")
        config = vllm_config(architecture=OTHER, kv_connector=object())
        result, *_ = configs(planner, config, POOR, MEMORY)
        assert max(lengths(result.kv_cache_groups)) == POOR_BEST
        assert "other end of the connector" in said(logging.WARNING)[0]

    def test_hybrid_manager_disabled(self, planner, said):
        specs = model(sw=(48, sliding_window()), full=(16, full_attention()))
        config = vllm_config(architecture=OTHER, disable_hybrid=True)
        assert lengths(planner.get_kv_cache_groups(config, specs)) == [64]
        assert said() == []

    def test_attention_free_and_uniform_models(self, planner, said):
        config = vllm_config(architecture=OTHER)
        assert planner.get_kv_cache_groups(config, {}) == []
        assert lengths(planner.get_kv_cache_groups(config, model(f=(9, full_attention())))) == [9]
        same_window = model(a=(4, sliding_window(64)), b=(2, sliding_window(64)))
        assert lengths(planner.get_kv_cache_groups(config, same_window)) == [6]
        assert said() == []

    def test_groups_with_a_purpose_of_their_own(self, planner, monkeypatch, said):
        make = planner.create_kv_cache_group_specs

        def resident(*args: Any) -> Any:
            groups = make(*args)
            groups[0].enable_kv_transfer = False
            return groups

        monkeypatch.setattr(planner, "create_kv_cache_group_specs", resident)
        groups = planner.get_kv_cache_groups(vllm_config(architecture=OTHER), POOR)
        assert max(lengths(groups)) == POOR_NATIVE
        assert said() == []

    def test_packed_pages(self, planner, said):
        from vllm.v1.kv_cache_layout import KVCacheLayout

        config = vllm_config(
            architecture=OTHER, get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC
        )
        other_page = full_attention(page_size_padded=2 * PAGE)
        specs = model(full=(12, full_attention()), wide=(4, other_page), sw=(8, sliding_window()))
        groups = planner.get_kv_cache_groups(config, specs)
        assert lengths(groups) == lengths(planner.get_kv_cache_groups.__wrapped__(config, specs))
        assert said() == []

    def test_a_fixed_number_of_blocks(self, planner, made):
        config = vllm_config(architecture=OTHER, num_gpu_blocks_override=1000)
        self.untouched(planner, made, config, POOR)

    def test_a_worker_that_plans_its_own_stage(self, planner, made):
        config = vllm_config(architecture=OTHER, pipeline_stages=2)
        self.untouched(planner, made, config, POOR)

    @pytest.mark.parametrize(
        ("variable", "value"),
        [
            ("RADIANCE_KV_GROUP_OPT", "perhaps"),
            ("RADIANCE_KV_GROUP_SIZE", "0"),
            ("RADIANCE_KV_GROUP_MAX_GROUPS", "many"),
            ("ALTAY_KVFIX_GROUP_COST", "-1"),
            ("ALTAY_KVFIX_PLAN_TOKENS", "8k"),
            ("ALTAY_KVFIX_WITH_KV_TRANSFER", "nixl"),
        ],
    )
    def test_a_malformed_knob(self, planner, made, monkeypatch, said, variable, value):
        monkeypatch.setenv(variable, value)
        self.untouched(planner, made, vllm_config(architecture=OTHER), POOR)
        assert said() == said(logging.ERROR)
        (line,) = said()
        assert f"{variable}='{value}' is not valid; allowed:" in line


class TestDrafters:
    """48 GDN + 16 full + 5 sliding drafter layers: sizes below 5 would divide the drafter."""

    def named(self, drafter: list[str]) -> dict[str, Any]:
        target = [gdn()] * 48 + [full_attention()] * 16
        specs = {f"model.layers.{i}.attn": spec for i, spec in enumerate(target)}
        return specs | {name: sliding_window() for name in drafter}

    def sizes(
        self, planner: Any, monkeypatch: Any, specs: Any, layers: int | None = 64, cost: str = "0"
    ) -> int:
        # Attention-heavy: 3 would be chosen if nothing forbade it.
        monkeypatch.setenv("ALTAY_KVFIX_GROUP_COST", cost)
        config = vllm_config(architecture=OTHER, max_model_len=4096)
        config.model_config.hf_config.num_hidden_layers = layers
        config.speculative_config = speculative()
        return max(lengths(planner.get_kv_cache_groups(config, specs)))

    @pytest.fixture
    def table(self, monkeypatch):
        """The families that the search was given."""
        from altay_kvfix import planner as decision

        problems = []
        search = decision.search

        def recording(problem: Any, **knobs: Any) -> Any:
            problems.append(problem)
            return search(problem, **knobs)

        monkeypatch.setattr(decision, "search", recording)
        return problems

    @pytest.mark.parametrize(
        "drafter",
        [
            [f"model.layers.{64 + i}.attn" for i in range(5)],
            [f"mtp.layers.{i}.attn" for i in range(5)],
        ],
    )
    def test_are_told_by_their_place(self, planner, monkeypatch, table, drafter):
        self.sizes(planner, monkeypatch, self.named(drafter))
        drafts = [family.draft_layers for family in table[0].families]
        assert drafts == [(), (), (0, 1, 2, 3, 4)]
        assert not any(family.may_hold_draft for family in table[0].families)

    @pytest.mark.parametrize(
        ("drafter", "layers"),
        [
            ([f"model.layers.{i}.draft" for i in range(5)], 64),  # starts again at 0
            ([f"model.layers.{64 + i}.attn" for i in range(5)], None),  # unknown target
            ([f"drafter_{i}" for i in range(5)], 64),  # no index
        ],
    )
    def test_that_cant_be_told_keep_every_family_whole(
        self, planner, monkeypatch, table, drafter, layers
    ):
        size = self.sizes(planner, monkeypatch, self.named(drafter), layers)
        assert all(family.may_hold_draft for family in table[0].families)
        assert size >= POOR_NATIVE

    def test_without_layers_of_their_own_change_nothing(self, planner, monkeypatch, table):
        config = vllm_config(architecture=OTHER)
        config.model_config.hf_config.num_hidden_layers = 69
        config.speculative_config = speculative(method="ngram")
        specs = {f"model.layers.{i}.attn": s for i, s in enumerate(POOR.values())}
        planner.get_kv_cache_groups(config, specs)
        assert not any(f.draft_layers or f.may_hold_draft for f in table[0].families)

    def test_marked_ones_are_believed(self, planner, table):
        class Marked(type(full_attention())):
            is_draft = False

        class Drafting(Marked):
            is_draft = True

        from altay_kvfix import vllm_compat

        attention = dict(block_size=16, num_kv_heads=1, head_size=64, dtype=full_attention().dtype)
        specs = {"a": Marked(**attention), "b": Drafting(**attention)}
        config = vllm_config(architecture=OTHER)
        assert vllm_compat.draft_layers(config, specs, specs) == {"b"}


class TestGuards:
    def test_a_block_for_every_request(self, planner, lines):
        """Wider blocks are fewer; vLLM needs one for each of max_num_seqs."""
        config = vllm_config(architecture=OTHER, max_num_seqs=300)
        for pages, expected in [(300 * POOR_BEST, POOR_BEST), (300 * POOR_BEST - 1, 4)]:
            result, *_ = configs(planner, config, POOR, pages * PAGE)
            assert max(lengths(result.kv_cache_groups)) == expected
            assert result.num_blocks >= 300

    def test_memory_decides_nothing_else(self, planner):
        config, seen = vllm_config(architecture=OTHER), []
        for pages in (5_000, 50_000, 5_000_000):
            (result,) = planner.get_kv_cache_configs(config, [POOR], [pages * PAGE])
            seen.append(layer_names(result.kv_cache_groups))
        seen.append(layer_names(planner.get_kv_cache_groups(config, POOR)))
        assert seen == [seen[0]] * 4

    def test_no_more_groups_than_allowed(self, planner, monkeypatch, made):
        monkeypatch.setenv("RADIANCE_KV_GROUP_MAX_GROUPS", "5")
        groups = planner.get_kv_cache_groups(vllm_config(architecture=OTHER), POOR)
        assert len(groups) <= 5 or groups is made[0]


def test_pipeline_stages_are_priced_as_projected(planner, said):
    """The tokens in the log line are vLLM's own, counted on the smaller stage."""
    config = vllm_config(architecture=OTHER, pipeline_stages=2)
    results = planner.get_kv_cache_configs(config, split(POOR, 2), [MEMORY, MEMORY // 2])
    merged = [
        a + b
        for a, b in zip(*(layer_names(result.kv_cache_groups) for result in results), strict=True)
    ]
    assert sorted(name for names in merged for name in names) == sorted(POOR)
    tokens, _ = planner.get_kv_cache_capacity(config, results[0])
    assert f"-> {tokens:,} KV cache tokens" in said()[0]
    widths = [max(lengths(result.kv_cache_groups)) for result in results]
    assert max(widths) == POOR_BEST // 2


def test_an_uneven_pipeline_counts_its_worst_stage(planner):
    """All sliding layers on one stage: dividing by the global size alone would misjudge it."""
    from altay_kvfix import vllm_compat

    specs = model(full=(8, full_attention()), sw=(8, sliding_window()))
    first = {name: spec for name, spec in specs.items() if name.startswith("full")}
    workers = [first, {n: s for n, s in specs.items() if n not in first}]
    config = vllm_config(architecture=OTHER, pipeline_stages=2)
    native = planner.get_kv_cache_groups.__wrapped__(config, specs)
    families = [[n for n in specs if n.startswith(kind)] for kind in ("full", "sw")]
    problem = vllm_compat.search_problem(
        config, specs, families, native, 4096, workers, [MEMORY] * 2
    )
    assert [family.stages for family in problem.families] == [(0,) * 8, (1,) * 8]
    from altay_kvfix.search import evaluate

    for size in (1, 2, 4, 8):
        candidate, _ = evaluate(problem, size)
        groups = planner.create_kv_cache_group_specs(
            specs, vllm_compat.deal_families(families, size)
        )
        projected = [planner._project_kv_cache_groups_to_worker(groups, w) for w in workers]
        price = max(planner._max_memory_usage_bytes_from_groups(config, g) for g in projected)
        assert candidate.cost * PAGE == price


class TestHiddenStateLayers:
    SPECS = POOR | model(hidden=(3, hidden_states()))

    def test_are_priced_and_added_again_by_vllm(self, planner, said):
        config = vllm_config(architecture=OTHER)
        result, *_ = configs(planner, config, self.SPECS, MEMORY)
        groups = result.kv_cache_groups
        hidden_lines = [text for text in said(ours=False) if "hidden-state cache" in text]
        native = planner.get_kv_cache_groups.__wrapped__(config, self.SPECS)
        # Each takes a whole block of its own, so narrower blocks are better than without them.
        assert max(lengths(groups)) == 4 < POOR_BEST
        assert groups[-3:] == native[-3:]
        assert len({group.kv_cache_spec.page_size_bytes for group in groups}) == 1
        tokens, _ = planner.get_kv_cache_capacity(config, result)
        assert f"-> {tokens:,} KV cache tokens" in said()[0]
        assert len(hidden_lines) == len(set(hidden_lines)) == 3

    def test_count_a_block_width_each(self, planner):
        """With many of them, narrow blocks win: each pads a whole block to one layer."""
        specs = POOR | model(hidden=(60, hidden_states()))
        config = vllm_config(architecture=OTHER)
        with_many = planner.get_kv_cache_groups(config, specs)
        price = planner._max_memory_usage_bytes_from_groups
        native = planner.get_kv_cache_groups.__wrapped__(config, specs)
        assert max(lengths(with_many)) <= POOR_NATIVE
        assert price(config, with_many) <= price(config, native) / 0.99


class TestForcedSize:
    def force(self, monkeypatch: Any, size: int) -> None:
        monkeypatch.setenv("RADIANCE_KV_GROUP_SIZE", str(size))

    @pytest.mark.parametrize("size", [1, 2, 16, 48])
    def test_is_obeyed_past_cap_and_price(self, planner, monkeypatch, size, said):
        self.force(monkeypatch, size)
        result, *_ = configs(planner, vllm_config(architecture=OTHER), POOR, MEMORY)
        groups = result.kv_cache_groups
        assert max(lengths(groups)) == size
        assert sorted(n for names in layer_names(groups) for n in names) == sorted(POOR)
        assert "forced" in said(logging.INFO)[0]

    @pytest.mark.parametrize(("size", "width"), [(9, 8), (47, 24), (1000, 48)])
    def test_that_is_not_canonical_says_its_width(self, planner, monkeypatch, size, width, said):
        self.force(monkeypatch, size)
        result, *_ = configs(planner, vllm_config(architecture=OTHER), POOR, MEMORY)
        assert max(lengths(result.kv_cache_groups)) == width
        assert f"RADIANCE_KV_GROUP_SIZE={size} makes groups of {width} at most" in said()[0]

    def test_of_native_is_native(self, planner, monkeypatch, made, said):
        self.force(monkeypatch, POOR_NATIVE)
        groups = planner.get_kv_cache_groups(vllm_config(architecture=OTHER), POOR)
        assert groups is made[0] and said() == []

    def test_warns_of_the_drafter_and_of_attention_groups(self, planner, monkeypatch, said):
        self.force(monkeypatch, 2)
        specs = layout_specs(RADIANCE)
        configs(planner, layout_config(RADIANCE), specs, 10_412 * page_size(specs))
        warnings = said(logging.WARNING)
        assert any("drafter's layers over 3 groups" in text for text in warnings)
        assert any("11 attention groups, native 5" in text for text in warnings)

    @pytest.mark.parametrize(("pages", "seqs"), [(1000, 16), (5000, 200)])
    def test_that_vllm_cant_use_is_an_error_and_native(
        self, planner, monkeypatch, said, made, pages, seqs
    ):
        self.force(monkeypatch, 48)
        config = vllm_config(architecture=OTHER, max_num_seqs=seqs)
        result, *_ = configs(planner, config, POOR, pages * PAGE)
        assert max(lengths(result.kv_cache_groups)) == POOR_NATIVE
        assert said() == said(logging.ERROR)
        assert "RADIANCE_KV_GROUP_SIZE=48 can't be used by vLLM" in said()[0]

    def test_has_no_effect_on_a_certified_layout(self, planner, monkeypatch, said):
        from vllm_models import altay

        self.force(monkeypatch, 3)
        result, *_ = configs(planner, vllm_config(), altay(), MEMORY)
        assert max(lengths(result.kv_cache_groups)) == 8
        assert "no effect" in said(logging.WARNING)[0]


class TestPlanTokens:
    LAYOUT = LAYOUTS["altay-1m"] | {"max_model_len": 262_144}

    def size(self, planner: Any) -> int:
        specs, config = layout_specs(self.LAYOUT), layout_config(self.LAYOUT)
        result, *_ = configs(planner, config, specs, 100_000 * page_size(specs))
        assert config.model_config.max_model_len == 262_144
        return max(lengths(result.kv_cache_groups))

    def test_another_workload_gets_another_layout(self, planner, monkeypatch, said):
        long_requests = self.size(planner)
        monkeypatch.setenv("ALTAY_KVFIX_PLAN_TOKENS", "8192")
        short_requests = self.size(planner)
        assert (long_requests, short_requests) == (16, 8)
        assert "for requests of 8,192 tokens" in said()[-1]

    def test_longer_than_the_model_is_an_error(self, planner, monkeypatch, said):
        monkeypatch.setenv("ALTAY_KVFIX_PLAN_TOKENS", "262145")
        assert self.size(planner) == 16
        (line,) = said(logging.ERROR)
        assert "ALTAY_KVFIX_PLAN_TOKENS='262145'" in line and "262144" in line


def test_no_config_no_search(planner, made):
    """The inner function on its own does not know the prices."""
    assert planner._get_kv_cache_groups_uniform_page_size(POOR) is made[0]


def test_a_context_parallel_size_counts(planner):
    """Prices come from the specs: two ranks halve what a request takes of full attention."""
    from altay_kvfix import vllm_compat

    config = vllm_config(architecture=OTHER)
    specs = model(gdn=(48, gdn()), full=(16, full_attention()))
    native = planner.get_kv_cache_groups.__wrapped__(config, specs)
    families = [[n for n in specs if n.startswith(kind)] for kind in ("gdn", "full")]

    def full_blocks() -> int:
        problem = vllm_compat.search_problem(config, specs, families, native, 4096)
        return problem.families[1].blocks_per_request

    alone = full_blocks()
    config.parallel_config = SimpleNamespace(
        **vars(config.parallel_config) | {"decode_context_parallel_size": 2}
    )
    assert full_blocks() == -(-alone // 2)
