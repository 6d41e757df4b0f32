"""``plan MODEL_DIR``: real models' published configurations in the installed vLLM, no weights."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import REPOSITORY, clean_environment, command

pytest.importorskip("vllm", reason="the models are built by vLLM: make test installs it")

CONFIGS = Path(__file__).with_name("configs")

# name: (options, layers by family, vLLM's size, chosen size, rule)
MODELS = {
    "altay-27b": ([], {"gdn": 54, "full attention": 16}, 16, 8, "certified"),
    "qwen3-next-80b": ([], {"gdn": 36, "full attention": 12}, 12, 12, "search"),
    "gemma-3-27b": (
        [],
        {"sliding window 1024": 52, "full attention": 10},
        10,
        10,
        "search",
    ),
    "gpt-oss-20b": ([], {"sliding window 128": 12, "full attention": 12}, 12, 12, "search"),
    "granite-4.0-h-small": (
        ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"],
        {"mamba2": 36, "full attention": 4},
        4,
        4,
        "search",
    ),
    "lfm2-2.6b": ([], {"short_conv": 22, "full attention": 8}, 8, 8, "search"),
    "nemotron-nano-9b-v2": (
        ["--kv-cache-dtype", "fp8", "--no-prefix-caching"],
        {"mamba2": 27, "full attention": 4},
        4,
        4,
        "search",
    ),
}


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Each model is built once, for all that look at it."""
    answers = {}

    def planned(name):
        if name not in answers:
            done = subprocess.run(
                command("plan", CONFIGS / name, "--json", "--kv-memory", "40GiB", *MODELS[name][0]),
                env=clean_environment(),
                cwd=tmp_path_factory.mktemp("plan"),
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, done.stderr
            answers[name] = json.loads(done.stdout)
        return answers[name]

    return planned


def row(report, mark):
    (found,) = [size for size in report["sizes"] if size[mark]]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_model(planned, name):
    report = planned(name)
    _, families, native, chosen, rule = MODELS[name]
    assert {f["kind"]: f["layers"] for f in report["families"]} == families
    assert row(report, "is_native")["size"] == native
    assert row(report, "is_chosen")["size"] == chosen
    assert report["rule"] == rule
    assert all(size["gain"] <= report["bound"] + 1e-9 for size in report["sizes"])
    assert report["error"] is None


def test_altay_is_laid_out_as_certified(planned):
    report = planned("altay-27b")
    assert report["outcome"] == "apply"
    compact = row(report, "is_chosen")
    assert (compact["groups"], compact["padding"], compact["padding_by_family"]) == (9, 2, [2, 0])
    assert row(report, "is_native")["padding_by_family"] == [10, 0]


def test_what_was_left_out_is_told(planned):
    assert planned("altay-27b")["notes"] == []
    assert "without the weights' quantisation" in planned("gpt-oss-20b")["notes"][0]


def test_pipeline_stages_are_priced_by_the_worst(planned):
    """40 layers over 2 stages: a block of group size 4 is 2 wide on each."""
    report = planned("granite-4.0-h-small")
    assert (report["tensor_parallel_size"], report["pipeline_parallel_size"]) == (2, 2)
    native = row(report, "is_native")
    request = native["blocks_per_request"] * 2 * report["page_bytes"]
    assert native["bytes_per_token"] == pytest.approx(request / report["request_tokens"])


def test_the_caches_type_halves_the_price(planned):
    report = planned("nemotron-nano-9b-v2")
    assert report["kv_cache_dtype"] == "fp8"
    assert report["prefix_caching"] is False
    heads, head_size, key_and_value, fp8 = 8, 128, 2, 1
    block = report["page_bytes"] / (heads * head_size * key_and_value * fp8)
    assert report["block_size"] == block


# vLLM itself, without us: the model is built by the same code, and planned natively.
NATIVELY = """
import importlib, json, sys
from altay_kvfix import vllm_compat
from altay_kvfix.cli import vllm_model

for stages in (1, 2):
    engine = {"pipeline_parallel_size": stages}
    model = vllm_model._build_stages(engine, sys.argv[1], lambda step: None)
    vllm_model._prepare_as_engine(model)
    planner = importlib.import_module(vllm_compat.planner_module())
    memory = [40 << 30] * stages
    configs = planner.get_kv_cache_configs(model.config, model.worker_specs, memory)
    print("ANSWER", json.dumps({
        "hooked": hasattr(planner.get_kv_cache_groups, "__wrapped__"),
        "groups": len(configs[0].kv_cache_groups),
        "capacity": planner.get_kv_cache_capacity(model.config, configs[0]),
    }))
"""


def test_figures_are_vllms_own(cli, planned):
    """Groups, tokens and concurrency of the native row, against vLLM's planner and its capacity."""
    model = CONFIGS / "qwen3-next-80b"
    done = subprocess.run(
        [sys.executable, "-c", NATIVELY, model],
        env=clean_environment(ALTAY_KVFIX_DISABLE="1", PYTHONPATH=str(REPOSITORY)),
        capture_output=True,
        text=True,
    )
    answers = [
        json.loads(line.removeprefix("ANSWER"))
        for line in done.stdout.splitlines()
        if line.startswith("ANSWER")
    ]
    memory = ("--kv-memory", "40GiB")
    two_stages = cli("plan", model, "--json", *memory, "--pipeline-parallel-size", "2").report
    for theirs, report in zip(answers, (planned(model.name), two_stages), strict=True):
        assert theirs["hooked"] is False
        native = row(report, "is_native")
        assert native["groups"] == theirs["groups"]
        tokens, concurrency = theirs["capacity"]
        assert native["tokens"] == tokens
        assert native["concurrency"] == pytest.approx(concurrency)


def test_drafters_layers_and_estimated_memory(cli):
    speculative = '{"method": "mtp", "num_speculative_tokens": 2}'
    answer = cli(
        *("plan", CONFIGS / "qwen3-next-80b", "--speculative-config", speculative),
        *("--gpu-memory", "80GiB", "--utilization", "0.9", "--tensor-parallel-size", "4"),
    )
    assert answer.exit_code == 0, answer.stderr
    assert "full attention       13                1" in answer.stdout
    # 80 billion parameters of two bytes, a quarter on each GPU, and the drafter's.
    assert "weights of 38.2 GiB on a GPU" in answer.stdout
    assert "KV cache 33.8 GiB per GPU" in answer.stdout
    assert "building the layers" in answer.stderr


def test_not_enough_memory(cli):
    answer = cli("plan", CONFIGS / "altay-27b", "--kv-memory", "1GiB")
    assert answer.exit_code == 0
    assert "vLLM would refuse to start" in answer.stdout


def test_no_hybrid_model(cli, tmp_path):
    """One family: there is nothing to divide, and that is the answer."""
    config = json.loads((CONFIGS / "qwen3-next-80b" / "config.json").read_text())
    config |= {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    answer = cli("plan", tmp_path)
    assert answer.exit_code == 0, answer.stderr
    assert "vLLM's own layout is kept: the model is not hybrid" in answer.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["NoSuchModel"]}, "NoSuchModel"),
        ({"model_type": "no_such_type"}, "no_such_type"),
    ],
)
def test_model_that_vllm_does_not_take(cli, tmp_path, change, message):
    config = json.loads((CONFIGS / "qwen3-next-80b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    answer = cli("plan", tmp_path)
    assert answer.exit_code == 2
    assert answer.stdout == ""
    assert message in answer.stderr


def test_wrong_option_is_named_with_what_is_allowed(cli):
    answer = cli("plan", CONFIGS / "altay-27b", "--kv-cache-dtype", "fp99")
    assert answer.exit_code == 2
    assert "cache_dtype: Input should be 'auto'" in answer.stderr


def test_no_vllm(cli, tmp_path):
    (tmp_path / "vllm.py").write_text("raise ImportError('no vllm here')")
    answer = cli("plan", CONFIGS / "altay-27b", PYTHONPATH=str(tmp_path))
    assert answer.exit_code == 3
    assert "vLLM can't be imported: no vllm here" in answer.stderr


def children_of(pid: int) -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            child = int(stat.parent.name)
            found |= {child} | children_of(child)
    return found


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_leaves_no_process(number, code):
    process = subprocess.Popen(
        command("plan", CONFIGS / "altay-27b"),
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "importing vLLM" in line:
            break
    time.sleep(0.5)
    children = children_of(process.pid)
    assert children
    process.send_signal(number)
    _, rest = process.communicate(timeout=20)
    assert process.returncode == code
    assert "Traceback" not in rest
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
