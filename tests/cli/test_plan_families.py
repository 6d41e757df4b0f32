"""``plan --family``: no vLLM and no checkpoint; the published figures of layouts.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import REPOSITORY

LAYOUTS = {
    layout["name"]: layout
    for layout in json.loads((REPOSITORY / "benchmarks" / "layouts.json").read_text())["layouts"]
}
KINDS = {"full_attention": "full", "sliding_window": "sliding", "mamba": "mamba"}
SMALL = [
    *("plan", "--family", "full:16", "--family", "gdn:54"),
    *("--block-size", "1152", "--max-model-len", "1010000"),
]


def arguments(layout):
    """The command for a layout of layouts.json."""
    words = ["plan", "--json"]
    for family in layout["families"]:
        text = f"{KINDS[family['kind']]}:{family['layers']}"
        if "window" in family:
            text += f":window={family['window']}"
        if family.get("draft_layers"):
            text += f":draft={family['draft_layers']}"
        words += ["--family", text]
    for name in ("block_size", "max_model_len", "max_num_batched_tokens"):
        words += [f"--{name.replace('_', '-')}", str(layout[name])]
    words += ["--speculative-tokens", str(layout["num_speculative_blocks"])]
    return words


def rows(report):
    return {row["size"]: row for row in report["sizes"]}


@pytest.mark.parametrize(
    "name", ["qwen3.8-27b-dflash2-radiance", "qwen3.8-27b-dflash2-fp8", "altay-1m"]
)
def test_published_layouts(cli, name):
    layout = LAYOUTS[name]
    native = layout["native"]
    answer = cli(*arguments(layout))
    assert answer.exit_code == 0
    report = answer.report
    found = next(row for row in report["sizes"] if row["is_native"])
    assert (found["size"], found["groups"]) == (native["size"], native["groups"])
    if "blocks_per_request" in native:
        assert found["blocks_per_request"] == native["blocks_per_request"]
    if "best_capacity" in layout:
        best = layout["best_capacity"]
        row = rows(report)[best["size"]]
        assert row["is_chosen"]
        assert row["blocks_per_request"] == best["blocks_per_request"]
        assert row["gain"] == pytest.approx(best["tokens"] / native["tokens"] - 1, abs=0.002)


def test_memory_gives_tokens_as_published(cli):
    layout = LAYOUTS["qwen3.8-27b-dflash2-radiance"]
    page = layout["block_size"] * 2 * 2 * 256 * 2
    report = cli(*arguments(layout), "--kv-memory", str(layout["available_pages"] * page)).report
    for figures in (layout["native"], layout["best_capacity"]):
        row = rows(report)[figures["size"]]
        assert row["tokens"] == pytest.approx(figures["tokens"], rel=1e-5)
        assert row["concurrency"] == pytest.approx(
            figures["num_blocks"] / figures["blocks_per_request"]
        )


def test_where_the_padding_lands(cli):
    """ALTAY at 18 has as few slots as at 8, but pads attention: a price for every token."""
    report = cli(*SMALL, "--json").report
    assert [f["kind"] for f in report["families"]] == ["full attention", "gdn"]
    assert rows(report)[18]["padding_by_family"] == [2, 0]
    assert rows(report)[8]["padding_by_family"] == [0, 2]
    assert rows(report)[8]["padding"] == rows(report)[18]["padding"] == 2
    page = 1152 * 2 * 2 * 256 * 2
    extra = rows(report)[18]["bytes_per_token"] - rows(report)[8]["bytes_per_token"]
    # Two slots of attention more, for 877 blocks; and no GDN slots padded, two blocks each.
    assert extra * 1_010_000 == pytest.approx(2 * 877 * page - 2 * 2 * page)


def test_request_length(cli):
    short = cli(*SMALL, "--json", "--request-tokens", "4096").report
    assert short["request_tokens"] == 4096
    assert [f["blocks_per_request"] for f in short["families"]] == [4, 2]
    assert short == cli(*SMALL, "--json", ALTAY_KVFIX_PLAN_TOKENS="4096").report


def test_settings_of_the_environment_decide(cli):
    forced = cli(*SMALL, "--json", RADIANCE_KV_GROUP_SIZE="9").report
    assert (forced["outcome"], forced["rule"]) == ("apply", "forced")
    assert rows(forced)[9]["is_chosen"]
    required = cli(*SMALL, "--json", ZENIT_ALTAY_KV_LAYOUT="required").report
    assert (required["rule"], rows(required)[8]["is_chosen"]) == ("certified", True)
    off = cli(*SMALL, RADIANCE_KV_GROUP_OPT="0")
    assert "vLLM's own layout is kept: the capacity search is switched off" in off.stdout
    malformed = cli(*SMALL, RADIANCE_KV_GROUP_OPT="maybe")
    assert "RADIANCE_KV_GROUP_OPT='maybe' is not valid" in malformed.stdout


def test_off_switch_is_told(cli):
    assert "would keep vLLM's own layout" in cli(*SMALL, ALTAY_KVFIX_DISABLE="1").stdout


def test_recurrent_state_without_prefix_caching(cli):
    report = cli(*SMALL, "--json", "--no-prefix-caching", "--speculative-tokens", "3").report
    assert [f["blocks_per_request"] for f in report["families"]] == [877, 4]


def test_blocks_may_be_given(cli):
    words = ["plan", "--json", "--family", "full:4:blocks=7", "--family", "mamba:6:blocks=5"]
    report = cli(*words, "--block-size", "16", "--max-model-len", "1000").report
    assert [f["blocks_per_request"] for f in report["families"]] == [7, 5]
    assert report["sizes"][0]["blocks_per_request"] == 4 * 7 + 6 * 5


def test_for_a_person(cli):
    answer = cli(*SMALL, "--kv-memory", "40GiB")
    assert answer.exit_code == 0
    assert answer.stderr == ""
    for text in ("16 full attention + 54 gdn", "█", "No layout can gain more than", "Not allowed"):
        assert text in answer.stdout
    marks = {tuple(line.split()[:3]) for line in answer.stdout.splitlines()}
    assert ("vLLM", "16", "5") in marks or ("->", "vLLM", "16") in marks


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan"], "give either MODEL_DIR or --family"),
        (["plan", "x", "--family", "full:1"], "give either MODEL_DIR or --family"),
        ([*SMALL[:3], *SMALL[5:]], "two families or more"),
        (SMALL[:5], "--family needs --block-size and --max-model-len"),
        ([*SMALL, "--family", "other:3"], "'other:3' is not valid; allowed: KIND:LAYERS"),
        ([*SMALL, "--family", "full:x"], "'full:x' is not valid"),
        ([*SMALL, "--family", "full:0"], "'full:0' is not valid"),
        ([*SMALL, "--family", "full"], "'full' is not valid"),
        ([*SMALL, "--family", "sliding:3"], "'sliding:3' is not valid"),
        ([*SMALL, "--family", "full:3:window=9"], "'full:3:window=9' is not valid"),
        ([*SMALL, "--family", "full:3:size=9"], "'full:3:size=9' is not valid"),
        ([*SMALL, "--family", "full:3:draft=4"], "'full:3:draft=4' is not valid"),
        ([*SMALL, "--kv-memory", "40 Gigs"], "--kv-memory '40 Gigs' is not valid; allowed"),
        ([*SMALL, "--kv-memory", "0"], "--kv-memory '0' is not valid"),
        ([*SMALL, "--kv-memory", "1GB", "--gpu-memory", "2GB"], "either --kv-memory or"),
        ([*SMALL, "--gpu-memory", "2GB"], "--kv-memory instead of --gpu-memory"),
        ([*SMALL, "--plot", "x.pdf"], "a file that ends in .svg or .png"),
        ([*SMALL, "--plot", "none/x.svg"], "there is no folder"),
        (["plan", "no-such-model"], "no-such-model is no model folder: it has no config.json"),
        (["plan", ".", "--speculative-config", "{"], "is no model folder"),
    ],
)
def test_wrong_input(cli, words, message):
    answer = cli(*words)
    assert answer.exit_code == 2, answer.stderr
    assert answer.stdout == ""
    assert message in answer.stderr.replace("\n", " ")


def test_plot_needs_matplotlib(cli, tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('none')")
    answer = cli(*SMALL, "--plot", "x.svg", PYTHONPATH=str(tmp_path))
    assert answer.exit_code == 3
    assert "pip install 'altay-kvfix[plot]'" in answer.stderr


def test_plot(cli, tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="needs the extra plot")
    where = str(Path(matplotlib.__file__).parents[1])
    first, second, png = (tmp_path / name for name in ("a.svg", "b.svg", "c.png"))
    for file in (first, second, png):
        assert cli(*SMALL, "--plot", file, PYTHONPATH=where).exit_code == 0
    assert first.read_text().startswith("<?xml")
    assert first.read_text() == second.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")


def test_units():
    from altay_kvfix.cli.plan import _size

    sizes = {"7": 7, "1kB": 1000, "1KiB": 1024, "1.5 GiB": 3 * 2**29, "2GB": 2 * 10**9}
    assert {text: _size("--x", text) for text in sizes} == sizes
