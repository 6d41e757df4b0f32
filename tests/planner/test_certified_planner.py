"""The certified layout against the real planner: every row of the case table."""

from __future__ import annotations

import logging
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
from vllm_models import (
    PAGE,
    altay,
    full_attention,
    gdn,
    hidden_states,
    layer_names,
    lengths,
    model,
    sliding_window,
    split,
    vllm_config,
)

import altay_kvfix
from altay_kvfix import hook

MODES = ["attention_exact", "required", "strict", "off", "legacy", "0", "false"]
OFF = MODES[3:]
REQUIRED = MODES[1:3]
COMPACT = [8, 8, 8, 8, 8, 7, 7, 8, 8]
NATIVE = [14, 14, 13, 13, 16]
MEMORY = 4096 * 70 * PAGE
OTHER = "SomeOtherForCausalLM"


def plan(
    planner: ModuleType, specs: dict[str, Any], memory: int = MEMORY, **config: Any
) -> list[Any]:
    """The groups that a single worker's engine would use."""
    (result,) = planner.get_kv_cache_configs(vllm_config(**config), [specs], [memory])
    return result.kv_cache_groups


class TestDeclaredCounts:
    def test_is_laid_out_compactly(self, planner, said, trace):
        groups = plan(planner, altay())

        assert lengths(groups) == COMPACT
        assert layer_names(groups)[0] == [f"gdn.{i}" for i in range(0, 54, 7)]
        assert layer_names(groups)[-1] == [f"full.{i}" for i in range(1, 16, 2)]
        (row,) = [row for row in trace() if row["event"] == "top_level_active"]
        assert row["rule"] == "certified"
        assert row["repair_id"] == "ALTAY72_KV_ATTENTION_EXACT_G8_V2"
        assert row["mode"] == "attention_exact"
        assert row["vllm_version"] == "0.32.0"
        assert (row["family_counts"], row["group_lengths"]) == ([54, 16], COMPACT)
        assert (row["allocated_slots"], row["padding_slots"]) == (72, 2)
        assert row["native_group_lengths"] == NATIVE

    def test_one_info_line_and_no_padding_warning(self, planner, said):
        plan(planner, altay())

        (line,) = said()
        assert "group size 16 -> 8, 5 -> 9 groups" in line
        assert "10 -> 2 padding slots" in line
        assert not [text for text in said(ours=False) if "padding" in text]

    def test_tokens_are_what_vllm_says(self, planner, said, trace):
        config = vllm_config()
        (result,) = planner.get_kv_cache_configs(config, [altay()], [MEMORY])
        compact, _ = planner.get_kv_cache_capacity(config, result)
        config = vllm_config(architecture=OTHER, max_model_len=4096)
        native = planner.get_kv_cache_config_from_groups(
            config, planner.get_kv_cache_groups.__wrapped__(config, altay()), MEMORY
        )
        before, _ = planner.get_kv_cache_capacity(config, native)

        assert f"{before:,} -> {compact:,} KV cache tokens" in said()[0]
        (row,) = [row for row in trace() if row["event"] == "top_level_active"]
        assert row["tokens"] == compact
        assert compact > before

    @pytest.mark.parametrize("mode", REQUIRED)
    def test_required_warns_as_proof(self, planner, said, monkeypatch, mode):
        monkeypatch.setenv("ZENIT_ALTAY_KV_LAYOUT", mode)
        assert lengths(plan(planner, altay())) == COMPACT
        (line,) = said(logging.WARNING)
        assert "certified, required" in line and "5 -> 9 groups" in line

    @pytest.mark.parametrize("mode", OFF)
    def test_off_returns_vllms_own_list(self, planner, said, monkeypatch, made, mode):
        monkeypatch.setenv("ZENIT_ALTAY_KV_LAYOUT", mode)
        groups = planner.get_kv_cache_groups(vllm_config(), altay())
        assert lengths(groups) == NATIVE
        assert made == [groups] and groups is made[0]
        assert said() == []
        assert len([text for text in said(ours=False) if "padding" in text]) == 1

    @pytest.mark.parametrize("place", ["architecture", "architectures", "hf_config"])
    def test_the_name_counts_wherever_it_stands(self, planner, place):
        config = vllm_config(architecture=OTHER)
        name = "LomonosovZenitAltayForConditionalGeneration"
        if place == "architecture":
            config.model_config.architecture = name
        elif place == "architectures":
            config.model_config.architectures = ["Qwen3NextForCausalLM", name]
        else:
            config.model_config.hf_config.architectures = [name]
        assert lengths(planner.get_kv_cache_groups(config, altay())) == COMPACT

    def test_groups_are_fresh_objects_every_time(self, planner):
        config, specs = vllm_config(), altay()
        first = planner.get_kv_cache_groups(config, specs)
        second = planner.get_kv_cache_groups(config, specs)
        assert first == second
        assert not {id(group) for group in first} & {id(group) for group in second}

    def test_a_connector_is_warned_about(self, planner, said):
        assert lengths(plan(planner, altay(), kv_connector=object())) == COMPACT
        assert "other end of the connector" in said(logging.WARNING)[0]


class TestAnotherArchitecture:
    def test_not_forced_is_none_of_the_certified_rules_business(self, planner, made):
        groups = planner.get_kv_cache_groups(vllm_config(architecture=OTHER), altay())
        assert groups is made[0]

    @pytest.mark.parametrize("mode", REQUIRED)
    def test_required_lets_the_counts_decide(self, planner, monkeypatch, mode):
        monkeypatch.setenv("ZENIT_ALTAY_KV_LAYOUT", mode)
        assert lengths(plan(planner, altay(), architecture=OTHER)) == COMPACT
        with pytest.raises(RuntimeError, match=r"expected families of 16 \+ 54 .* 20 \+ 30"):
            plan(planner, altay(20, 30), architecture=OTHER)

    def test_a_models_package_can_ask_for_it(self, planner, trace):
        assert altay_kvfix.install_altay72_compact_kv_layout(force=True) is False
        assert lengths(plan(planner, altay(), architecture=OTHER)) == COMPACT
        assert trace()[0]["event"] == "install_reused"


class TestOtherCounts:
    def test_default_warns_and_stays_native(self, planner, said, trace, made):
        groups = plan(planner, altay(15, 55))
        assert layer_names(groups) == layer_names(made[0])
        (line,) = said()
        assert said(logging.WARNING) == [line]
        assert "expected families of 16 + 54 layers, found 15 + 55" in line
        assert trace()[-1]["event"] == "fallback"
        assert trace()[-1]["group_lengths"] == trace()[-1]["native_group_lengths"]

    @pytest.mark.parametrize("mode", REQUIRED)
    def test_required_refuses(self, planner, trace, monkeypatch, mode):
        monkeypatch.setenv("ZENIT_ALTAY_KV_LAYOUT", mode)
        with pytest.raises(RuntimeError, match=r"expected .* 16 \+ 54 layers, found 15 \+ 55"):
            plan(planner, altay(15, 55))
        assert trace()[-1]["event"] == "refused"

    @pytest.mark.parametrize("mode", OFF)
    def test_off_says_nothing(self, planner, said, monkeypatch, mode):
        monkeypatch.setenv("ZENIT_ALTAY_KV_LAYOUT", mode)
        assert lengths(plan(planner, altay(15, 55))) == [14, 14, 14, 13, 15]
        assert said() == []

    def test_three_families_are_not_two(self, planner, said):
        specs = model(gdn=(54, gdn()), full=(7, full_attention()), sw=(9, sliding_window()))
        plan(planner, specs)
        assert "found 7 + 9 + 54" in said(logging.WARNING)[0]


class TestHiddenStateLayers:
    SPECS = altay() | model(hidden=(2, hidden_states()))

    def test_default_warns_and_stays_native(self, planner, said):
        assert lengths(plan(planner, self.SPECS)) == [*NATIVE, 1, 1]
        assert "2 hidden-state cache layers" in said(logging.WARNING)[0]
        # vLLM's own lines about them come out once, though it groups under our eyes.
        assert len([text for text in said(ours=False) if "hidden-state cache" in text]) == 2

    def test_required_refuses(self, planner, monkeypatch):
        monkeypatch.setenv("ZENIT_ALTAY_KV_LAYOUT", "required")
        with pytest.raises(RuntimeError, match="2 hidden-state cache layers"):
            plan(planner, self.SPECS)

    def test_off(self, planner, said, monkeypatch):
        monkeypatch.setenv("ZENIT_ALTAY_KV_LAYOUT", "off")
        assert lengths(plan(planner, self.SPECS)) == [*NATIVE, 1, 1]
        assert said() == []


@pytest.mark.parametrize("mode", MODES)
class TestNativeInEveryMode:
    def test_hybrid_manager_disabled(self, planner, said, monkeypatch, mode):
        monkeypatch.setenv("ZENIT_ALTAY_KV_LAYOUT", mode)
        # vLLM 0.32 refuses full attention + GDN without the hybrid manager by itself; sliding
        # windows it promotes to full attention.
        specs = model(sw=(54, sliding_window()), full=(16, full_attention()))
        assert lengths(plan(planner, specs, disable_hybrid=True)) == [70]
        assert said() == []

    def test_not_hybrid(self, planner, said, monkeypatch, mode):
        monkeypatch.setenv("ZENIT_ALTAY_KV_LAYOUT", mode)
        assert lengths(plan(planner, model(full=(16, full_attention())))) == [16]
        assert said() == []

    def test_attention_free(self, planner, said, monkeypatch, mode):
        monkeypatch.setenv("ZENIT_ALTAY_KV_LAYOUT", mode)
        assert plan(planner, {}) == []
        assert said() == []

    def test_a_worker_that_plans_its_own_stage(self, planner, said, monkeypatch, mode):
        monkeypatch.setenv("ZENIT_ALTAY_KV_LAYOUT", mode)
        own_stage = altay(8, 27)
        groups = planner.get_kv_cache_groups(vllm_config(pipeline_stages=2), own_stage)
        assert lengths(groups) == [7, 7, 7, 6, 8]
        assert said() == []


def test_two_pipeline_stages_share_the_compact_layout(planner, monkeypatch):
    monkeypatch.setenv("ZENIT_ALTAY_KV_LAYOUT", "required")
    stages = split(altay(), 2)
    results = planner.get_kv_cache_configs(vllm_config(pipeline_stages=2), stages, [MEMORY, MEMORY])
    first, second = (lengths(result.kv_cache_groups) for result in results)
    assert [a + b for a, b in zip(first, second, strict=True)] == COMPACT
    assert max(first) == max(second) == 4


class TestSomethingRaisesInside:
    @pytest.fixture(autouse=True)
    def broken(self, monkeypatch):
        def decide(*_: Any) -> Any:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(hook, "decide", decide)

    def test_default_logs_a_traceback_and_stays_native(self, planner, lines, said, trace):
        assert lengths(plan(planner, altay())) == NATIVE
        (record,) = [r for r in lines if r.name == "vllm.altay_kvfix"]
        assert record.levelno == logging.ERROR and record.exc_info
        assert len([text for text in said(ours=False) if "padding" in text]) == 1
        assert trace()[-1]["event"] == "fallback"

    def test_required_raises(self, planner, monkeypatch):
        monkeypatch.setenv("ZENIT_ALTAY_KV_LAYOUT", "required")
        with pytest.raises(ZeroDivisionError):
            plan(planner, altay())


def test_vllms_own_error_passes_untouched(planner, said):
    with pytest.raises(ValueError, match="KV cache is needed"):
        plan(planner, altay(), memory=PAGE * 1000, max_model_len=1_000_000)
    broken = altay() | {"x": object()}
    with pytest.raises(AttributeError):
        planner.get_kv_cache_groups(vllm_config(), broken)
    assert [text for text in said() if "failed" in text] == []


class TestRequiredChecksTheEndResult:
    @pytest.fixture(autouse=True)
    def required(self, monkeypatch):
        monkeypatch.setenv("ZENIT_ALTAY_KV_LAYOUT", "required")

    def test_groups_changed_after_planning(self, planner, monkeypatch, trace):
        make = planner.get_kv_cache_config_from_groups

        def tampering(config: Any, groups: list[Any], memory: int) -> Any:
            groups[0].layer_names.append(groups[1].layer_names.pop())
            return make(config, groups, memory)

        monkeypatch.setattr(planner, "get_kv_cache_config_from_groups", tampering)
        with pytest.raises(RuntimeError, match="groups about to be used"):
            plan(planner, altay())
        assert trace()[-1]["event"] == "refused"

    def test_somebody_elses_planner(self, planner, monkeypatch):
        native = planner.get_kv_cache_groups.__wrapped__

        def theirs(config: Any, specs: Any) -> Any:
            names = sorted(specs)
            return planner.create_kv_cache_group_specs(
                specs, [[n for n in names if n[0] == kind] for kind in "gf"]
            )

        assert native is not theirs
        monkeypatch.setattr(planner, "get_kv_cache_groups", theirs)
        with pytest.raises(RuntimeError):
            plan(planner, altay())


class TestMalformedSettings:
    @pytest.mark.parametrize(
        ("variable", "value"),
        [
            ("ZENIT_ALTAY_KV_LAYOUT", "requird"),
            ("ALTAY_KVFIX_FAMILY_COUNTS", "16,54,"),
            ("ALTAY_KVFIX_FAMILY_COUNTS", "16"),
        ],
    )
    def test_stops_altay_alone(self, planner, said, monkeypatch, variable, value):
        monkeypatch.setenv(variable, value)
        with pytest.raises(RuntimeError, match=f"{variable}='{value}' is not valid; allowed"):
            plan(planner, altay())
        plan(planner, altay(), architecture=OTHER)
        (line,) = said(logging.ERROR)
        assert variable in line and value in line

    def test_an_unclear_off_switch_means_native(self, planner, said, monkeypatch):
        monkeypatch.setenv("ALTAY_KVFIX_DISABLE", "maybe")
        assert lengths(plan(planner, altay())) == NATIVE
        assert "ALTAY_KVFIX_DISABLE='maybe'" in said(logging.ERROR)[0]
        monkeypatch.setenv("ZENIT_ALTAY_KV_LAYOUT", "required")
        with pytest.raises(RuntimeError, match="ALTAY_KVFIX_DISABLE"):
            plan(planner, altay())

    @pytest.mark.parametrize("value", ["relative/path", "."])
    def test_a_relative_trace_path_changes_nothing(self, planner, said, monkeypatch, value):
        monkeypatch.setenv("ZENIT_ALTAY_KV_LAYOUT_TRACE_PATH", value)
        assert lengths(plan(planner, altay())) == COMPACT
        assert "absolute path" in said(logging.ERROR)[0]


def test_a_trace_that_cant_be_written_is_said_once(planner, said, monkeypatch, tmp_path):
    monkeypatch.setenv("ZENIT_ALTAY_KV_LAYOUT_TRACE_PATH", str(tmp_path / "none" / "trace"))
    for _ in range(2):
        assert lengths(plan(planner, altay())) == COMPACT
    assert len([text for text in said() if "can't be written" in text]) == 1


class TestDeclaredComposition:
    SPECS = model(gdn=(54, gdn()), full=(7, full_attention()), sw=(9, sliding_window()))

    def test_in_the_environment(self, planner, monkeypatch):
        monkeypatch.setenv("ALTAY_KVFIX_FAMILY_COUNTS", "7, 9,54")
        groups = plan(planner, self.SPECS)
        assert Counter(lengths(groups)) == Counter([8] * 5 + [7] * 2 + [7] + [5, 4])

    def test_in_code(self, planner, monkeypatch):
        monkeypatch.setenv("ALTAY_KVFIX_FAMILY_COUNTS", "")  # undone after the test
        declared = altay_kvfix.expect_family_counts((54, 9, 7), group_size=9)
        assert Counter(lengths(plan(planner, self.SPECS))) == Counter(declared.group_lengths)
        assert declared.group_size == 9
        monkeypatch.setenv("ZENIT_ALTAY_KV_LAYOUT", "required")
        with pytest.raises(RuntimeError, match=r"expected families of 7 \+ 9 \+ 54"):
            plan(planner, altay())

    def test_fewer_tokens_than_native_are_said(self, planner, said, monkeypatch):
        monkeypatch.setenv("ALTAY_KVFIX_FAMILY_COUNTS", "16,54:5")
        groups = plan(planner, altay(), max_model_len=100_000)
        assert max(lengths(groups)) == 5
        (line,) = said(logging.WARNING)
        before, after = (
            int(text.replace(",", "")) for text in line.split(": ")[-1].split() if text[0].isdigit()
        )
        assert after < before


class TestPlannerCalledOnItsOwn:
    def test_is_decided_by_the_counts_when_asked(self, planner, trace):
        altay_kvfix.install_altay72_compact_kv_layout(force=True)
        groups = planner._get_kv_cache_groups_uniform_page_size(altay())
        assert lengths(groups) == COMPACT
        assert trace()[-1]["event"] == "private_uniform_active"

    def test_stays_native_where_no_config_names_altay(self, planner, made):
        groups = planner._get_kv_cache_groups_uniform_page_size(altay())
        assert groups is made[0]

    def test_required_refuses_other_counts(self, planner, monkeypatch):
        monkeypatch.setenv("ZENIT_ALTAY_KV_LAYOUT", "required")
        with pytest.raises(RuntimeError, match=r"found 15 \+ 55"):
            planner._get_kv_cache_groups_uniform_page_size(altay(15, 55))


class TestAnotherGroupingRule:
    @pytest.fixture(autouse=True)
    def reversed_groups(self, planner, monkeypatch):
        make = planner.create_kv_cache_group_specs

        def other_rule(specs: Any, names: Any) -> Any:
            # As if a release put consecutive layers into one group.
            flat = sorted((n for group in names for n in group), key=list(specs).index)
            sizes = [len(group) for group in names]
            starts = [sum(sizes[:i]) for i in range(len(sizes))]
            return make(specs, [flat[s : s + n] for s, n in zip(starts, sizes, strict=True)])

        monkeypatch.setattr(planner, "create_kv_cache_group_specs", other_rule)

    def test_default_warns_and_stays_native(self, planner, said, made):
        groups = planner.get_kv_cache_configs(vllm_config(), [altay()], [MEMORY])[0].kv_cache_groups
        assert layer_names(groups)[0] == [f"gdn.{i}" for i in range(14)]
        (line,) = said(logging.WARNING)
        assert "rule that is not known" in line and "0.32.0" in line

    def test_required_refuses(self, planner, monkeypatch):
        monkeypatch.setenv("ZENIT_ALTAY_KV_LAYOUT", "required")
        with pytest.raises(RuntimeError, match="rule that is not known"):
            plan(planner, altay())


def test_a_call_inside_a_call_runs_untouched(planner, monkeypatch):
    inner_answers = []
    unify = planner.unify_kv_cache_spec_page_size

    def reentrant(specs: Any) -> Any:
        if not inner_answers:
            inner_answers.append(None)
            inner_answers[0] = planner.get_kv_cache_groups(vllm_config(), altay(15, 55))
        return unify(specs)

    monkeypatch.setattr(planner, "unify_kv_cache_spec_page_size", reentrant)
    assert lengths(planner.get_kv_cache_groups(vllm_config(), altay())) == COMPACT
    assert lengths(inner_answers[0]) == [14, 14, 14, 13, 15]


def test_wrapped_functions_pickle_by_name(planner):
    import pickle

    function = planner.get_kv_cache_groups
    assert pickle.loads(pickle.dumps(function)) is function
