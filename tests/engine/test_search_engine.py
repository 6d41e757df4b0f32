"""The capacity search in the real engine, on models that are not ALTAY."""

from __future__ import annotations

import pytest
from engine_results import answers, layout_rows, our_lines

# One request: vLLM's CPU runner clears reused blocks only in part, up to 0.25 not at all, and what
# a GDN layer left in a block is no number to an attention layer. Its answers turn into NaN then,
# natively too.
LONG = ("--max-model-len", 32_768, "--requests", 1, "--max-tokens", 64)


@pytest.fixture(scope="module")
def poor(checkpoint):
    """16 full + 8 sliding-window + 5 GDN layers: vLLM makes groups of 5 and pads 16 to 20."""
    return checkpoint(
        "16-8-5", full=16, gdn=5, sliding=8, architectures=["TinyThreeFamilyForCausalLM"]
    )


@pytest.fixture(scope="module")
def native(run, poor):
    return run(poor, *LONG, plugin=True, RADIANCE_KV_GROUP_OPT="0")


@pytest.fixture(scope="module")
def searched(run, poor):
    return run(poor, *LONG, plugin=True)


class TestPoorNativeLayout:
    def test_gains_the_computed_capacity(self, native, searched):
        (row,), (native_row,) = layout_rows(searched), layout_rows(native)
        assert row["rule"] == "search" and row["event"] == "top_level_active"
        assert native_row["group_lengths"] == row["native_group_lengths"]
        assert max(row["native_group_lengths"]) == 5
        assert row["tokens"] == searched.kv_cache_tokens
        assert native_row["tokens"] == native.kv_cache_tokens
        native_price = 5 * native_row["blocks_per_request"]
        price = max(row["group_lengths"]) * row["blocks_per_request"]
        gain = searched.kv_cache_tokens / native.kv_cache_tokens
        assert gain == pytest.approx(native_price / price, rel=1e-3)
        assert gain > 1.2

    def test_answers_are_native(self, native, searched):
        assert answers(searched) == answers(native)

    def test_says_so_in_one_line(self, native, searched):
        assert our_lines(native) == []
        (line,) = our_lines(searched)
        assert "(search)" in line and "for requests of 32,768 tokens" in line
        assert "padding layers" not in searched.log


def test_what_is_right_already_is_untouched(run, checkpoint):
    """16 full + 48 GDN layers fill vLLM's groups of 16 to the last slot."""
    model = checkpoint("16-48", full=16, gdn=48, architectures=["Qwen3NextForCausalLM"])
    untouched = run(model, "--requests", 1)
    assert answers(untouched)
    assert our_lines(untouched) == []
    (row,) = layout_rows(untouched)
    assert (row["event"], row["rule"]) == ("native", "search")
    assert row["group_lengths"] == row["native_group_lengths"] == [16] * 4
