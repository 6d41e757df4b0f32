"""ALTAY in the real engine: compact against native, and every way it is not applied."""

from __future__ import annotations

import json
import socket
import sys
import time
import urllib.error
import urllib.request

import pytest
from engine_process import engine_environment, process_group, read_trace
from engine_results import answers, layout_rows, our_lines

# vLLM keeps a GDN state for reuse only once a prompt has come back, hence the third round.
CACHING = ("--prefix-caching", "--rounds", 3, "--requests", 2, "--prompt-tokens", 3000)


@pytest.fixture(scope="module")
def altay(checkpoint):
    return checkpoint("altay")


@pytest.fixture(scope="module")
def native(run, altay):
    return run(altay, ALTAY_KVFIX_DISABLE="1")


@pytest.fixture(scope="module")
def compact(run, altay):
    return run(altay)


class TestCompact:
    def test_is_planned_in_the_spawned_engine(self, compact):
        (row,) = layout_rows(compact)
        assert compact.exit_code == 0
        assert row["event"] == "top_level_active" and row["process"].startswith("EngineCore")
        assert row["group_lengths"] == [8, 8, 8, 8, 8, 7, 7, 8, 8]
        main = [r["pid"] for r in compact.trace if r["process"] == "MainProcess"]
        assert main and row["pid"] not in main
        # The worker is a process of its own on newer releases only.
        assert row["pid"] in {r["pid"] for r in compact.trace if r["event"] == "install_new"}

    def test_answers_are_native(self, compact, native):
        assert answers(compact) == answers(native)
        assert len({tuple(tokens) for tokens in answers(native)[0]}) > 1

    def test_holds_what_the_arithmetic_says(self, compact, native):
        blocks = {"gdn": 1, "full": native_blocks_of_full_attention(native)}
        price_native = 16 * (4 * blocks["gdn"] + 1 * blocks["full"])
        price_compact = 8 * (7 * blocks["gdn"] + 2 * blocks["full"])
        gain = compact.kv_cache_tokens / native.kv_cache_tokens
        assert gain == pytest.approx(price_native / price_compact, rel=1e-3)
        assert gain > 1.06
        (row,) = layout_rows(compact)
        assert row["tokens"] == compact.kv_cache_tokens
        assert compact.result["num_gpu_blocks"] > 1.9 * native.result["num_gpu_blocks"]

    def test_says_so_in_one_line_without_vllms_padding_warning(self, compact, native):
        (line,) = our_lines(compact)
        before, after = f"{native.kv_cache_tokens:,}", f"{compact.kv_cache_tokens:,}"
        assert f"group size 16 -> 8, 5 -> 9 groups, {before} -> {after} KV cache tokens" in line
        assert "INFO" in line and "EngineCore" in line
        assert "padding layers" in native.log
        assert "padding layers" not in compact.log


def native_blocks_of_full_attention(native):
    """Blocks of 4,096 tokens in the one full-attention group: the rest of a request's blocks."""
    blocks_per_request = native.result["num_gpu_blocks"] * 4096 / native.kv_cache_tokens
    return round(blocks_per_request) - 4


@pytest.fixture(scope="module")
def cached_native(run, altay):
    return run(altay, *CACHING, ZENIT_ALTAY_KV_LAYOUT="off")


@pytest.fixture(scope="module")
def cached_compact(run, altay):
    return run(altay, *CACHING, ZENIT_ALTAY_KV_LAYOUT="required")


class TestPrefixCaching:
    def test_off_runs_natively(self, cached_native):
        native = cached_native
        assert native.exit_code == 0 and our_lines(native) == []
        (row,) = layout_rows(native)
        assert row["event"] == "native" and row["mode"] == "off"
        assert row["group_lengths"] == [14, 14, 13, 13, 16]

    def test_answers_are_native_and_come_from_the_cache(self, cached_compact, cached_native):
        assert answers(cached_compact) == answers(cached_native)
        # Rounds are not compared: what is cached is not computed in the same chunks again, and
        # the last bits differ natively too.
        for engine in (cached_compact, cached_native):
            assert all(answer["cached_tokens"] > 0 for answer in engine.result["rounds"][2])

    def test_holds_more(self, cached_compact, cached_native):
        gain = cached_compact.kv_cache_tokens / cached_native.kv_cache_tokens
        assert gain == pytest.approx(1.091, abs=2e-3)

    def test_required_proves_itself_with_a_warning(self, cached_compact):
        (line,) = our_lines(cached_compact)
        assert "WARNING" in line and "certified, required" in line


def test_off_switch_leaves_no_trace(native):
    assert native.exit_code == 0
    assert native.trace == [] and our_lines(native) == []


@pytest.fixture(scope="module")
def other(checkpoint):
    return checkpoint("15-55", full=15, gdn=55)


class TestOtherCounts:
    def test_required_refuses_to_start(self, run, other):
        refused = run(other, ZENIT_ALTAY_KV_LAYOUT="required")
        assert refused.exit_code != 0 and refused.result is None
        assert "expected families of 16 + 54 layers, found 15 + 55" in refused.log
        assert refused.trace[-1]["event"] == "refused"

    def test_default_warns_and_runs_natively(self, run, other):
        warned = run(other, "--requests", 1)
        assert answers(warned)
        (line,) = our_lines(warned)
        assert "WARNING" in line and "found 15 + 55" in line
        (row,) = layout_rows(warned)
        assert row["event"] == "fallback"
        assert row["group_lengths"] == row["native_group_lengths"] == [14, 14, 14, 13, 15]


def test_preempted_requests_finish_though_the_trace_cant_be_written(run, altay):
    """Requests at once need more blocks than there are; the trace path is a directory."""
    crowded = run(
        altay,
        *("--max-num-seqs", 6, "--requests", 6, "--prompt-tokens", 1150, "--max-tokens", 120),
        # 9 groups for each of 6 requests and vLLM's null block: the longest prompts' next blocks
        # of 1,152 tokens have to be taken from somebody.
        *("--blocks", 55),
        ZENIT_ALTAY_KV_LAYOUT="required",
        ZENIT_ALTAY_KV_LAYOUT_TRACE_PATH="/",
    )
    assert [len(tokens) for tokens in answers(crowded)[0]] == [120] * 6
    assert crowded.result["preemptions"] > 0
    assert any("5 -> 9 groups" in line for line in our_lines(crowded))
    assert len([line for line in our_lines(crowded) if "trace can't be written" in line]) <= 3


def test_server_answers_over_http(altay, compact, tmp_path):
    """The OpenAI-compatible server, launched as always, gives the answers of ``LLM``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    trace = tmp_path / "trace.jsonl"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(altay), "--served-model-name", "altay", "--enforce-eager"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", "1"]
    command += ["--max-model-len", "4096", "--dtype", "bfloat16"]
    command += ["--mamba-ssm-cache-dtype", "float32", "--no-enable-prefix-caching"]
    environment = engine_environment(ZENIT_ALTAY_KV_LAYOUT_TRACE_PATH=str(trace))
    with process_group(command, environment, tmp_path / "server.log") as server:
        wait_until_healthy(server, port, tmp_path / "server.log")
        from engine_run import make_prompts

        for prompt, expected in zip(make_prompts(4, 400), answers(compact)[0], strict=True):
            answer = post(
                f"http://127.0.0.1:{port}/v1/completions",
                {
                    "model": "altay",
                    "prompt": prompt,
                    "max_tokens": len(expected),
                    "temperature": 0,
                    "ignore_eos": True,
                    "return_token_ids": True,
                },
            )
            assert answer["choices"][0]["token_ids"] == expected
    (row,) = [r for r in read_trace(trace) if r["event"] == "top_level_active"]
    assert row["group_lengths"] == [8, 8, 8, 8, 8, 7, 7, 8, 8]


def wait_until_healthy(server, port, log_file, seconds=300):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert server.poll() is None, log_file.read_text()[-5000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise TimeoutError(log_file.read_text()[-5000:])


def post(url, body):
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def test_three_families_declared_in_the_environment(run, checkpoint):
    model = checkpoint("7-9-54", full=7, gdn=54, sliding=9)
    native = run(model, plugin=True, ALTAY_KVFIX_DISABLE="1")
    declared = run(
        model,
        plugin=True,
        ALTAY_KVFIX_FAMILY_COUNTS="7,9,54",
        ZENIT_ALTAY_KV_LAYOUT="required",
    )
    assert answers(declared) == answers(native)
    (row,) = layout_rows(declared)
    assert row["event"] == "top_level_active"
    assert sorted(row["family_counts"]) == [7, 9, 54]
    assert max(row["group_lengths"]) == 8 and len(row["group_lengths"]) == 10
    assert row["tokens"] == declared.kv_cache_tokens
    fewer = declared.kv_cache_tokens < native.kv_cache_tokens
    assert any("holds less" in line for line in our_lines(declared)) == fewer
