from __future__ import annotations

import json

import pytest
from command_line import REPOSITORY

from altay_kvfix import trace
from altay_kvfix.cli.verify import Requirement, engine_plans, judge

COMPACT = [8, 8, 8, 8, 8, 7, 7, 8, 8]
NATIVE = [14, 14, 13, 13, 16]


def row(event="top_level_active", pid=1, rule="certified", lengths=COMPACT, **fields):
    planned = {
        "rule": rule,
        "reason": "because",
        "group_lengths": lengths,
        "native_group_lengths": NATIVE,
        "padding_slots": max(lengths) * len(lengths) - sum(lengths),
        "tokens": 100_000,
    }
    return {"event": event, "pid": pid, "process": "EngineCore", **planned, **fields}


def installed(pid=1):
    return {"event": "install_new", "pid": pid, "process": "EngineCore", "time": 1.0}


@pytest.fixture
def write(tmp_path):
    def write(*rows, tail=""):
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in rows) + tail)
        return path

    return write


def test_compact_is_proven(cli, write):
    answer = cli("verify", write(installed(), row()), "--require", "compact")
    assert answer.exit_code == 0, answer.stdout
    assert "PROVEN (compact), engine processes: 1" in answer.stdout
    assert "8,8,8,8,8,7,7,8,8" in answer.stdout


def test_rows_of_the_product_are_read(cli, tmp_path):
    path = tmp_path / "trace.jsonl"
    trace.write(str(path), "install_new")
    trace.write(
        str(path), "top_level_active", rule="search", group_lengths=[8] * 9, tokens=5, reason="r"
    )
    report = cli("verify", path, "--require", "search", "--json").report
    assert report["proven"]
    assert [r["event"] for r in report["rows"]] == ["install_new", "top_level_active"]


@pytest.mark.parametrize(
    ("require", "rule", "proven"),
    [
        ("compact", "certified", True),
        ("compact", "search", False),
        ("compact", "forced", False),
        ("search", "search", True),
        ("search", "forced", True),
        ("search", "certified", False),
        ("any", "certified", True),
        ("any", "search", True),
    ],
)
def test_requirement_against_rule(require, rule, proven):
    problems = judge([row(rule=rule)], Requirement(require)).problems
    assert (not problems) == proven, problems


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], "the trace is empty or not there"),
        ([installed()], "no engine reports a layout"),
        ([row("native", rule="native", lengths=NATIVE)], "keeps vLLM's own layout: because"),
        ([row(), row("fallback", pid=2)], "EngineCore (2) reports a fallback: because"),
        ([{"event": "refused", "pid": 3, "reason": "no"}], "process (3) reports a refused: no"),
        (
            [row(), row("native", pid=2, rule="native", lengths=NATIVE)],
            "the engines do not use the same layout: "
            f"{COMPACT} in 1; {NATIVE} in 1",
        ),
        ([row(), row(pid=2, lengths=[9] * 8)], "the engines do not use the same layout"),
    ],
)  # fmt: skip
def test_problems(rows, problem):
    assert any(problem in p for p in judge(rows, Requirement.ANY).problems)


def test_every_fallback_counts_even_before_a_success():
    assert judge([row("fallback"), row()], Requirement.ANY).problems


def test_same_lengths_in_another_order_are_the_same_groups_asked_for():
    assert not judge([row()], Requirement.ANY, groups=sorted(COMPACT)).problems
    assert judge([row()], Requirement.ANY, groups=[8] * 9).problems


def test_number_of_engines():
    rows = [row(), row(pid=2)]
    assert not judge(rows, Requirement.ANY, engines=2).problems
    assert judge(rows, Requirement.ANY, engines=3).problems == ["2 engines planned, not 3"]


def test_plans_of_workers_do_not_count():
    """A worker plans its own pipeline stage natively, for profiling, and knows no memory."""
    worker = row("native", pid=2, rule="native", lengths=NATIVE, tokens=None)
    assert engine_plans([worker, row()]) == [row()]
    assert not judge([worker, row()], Requirement.COMPACT).problems


def test_the_last_plan_of_a_process_counts():
    early = row("native", rule="native", lengths=NATIVE)
    assert engine_plans([early, row()]) == [row()]


def test_torn_last_line_is_tolerated(cli, write):
    path = write(row(), tail='{"event": "top_level_act')
    answer = cli("verify", path)
    assert answer.exit_code == 0
    assert "last line is torn" in answer.stdout
    assert cli("verify", path, "--json").report["torn_last_line"] is True


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"event": "other", "pid": 1}', '{"pid": 1}'])
def test_any_other_broken_line_is_wrong_input(cli, write, line):
    answer = cli("verify", write(tail=line + "\n" + json.dumps(row()) + "\n"))
    assert answer.exit_code == 2
    assert "line 1: not a row of a trace" in answer.stderr


def test_missing_trace_proves_nothing(cli, tmp_path):
    answer = cli("verify", tmp_path / "none.jsonl")
    assert answer.exit_code == 1
    assert "the trace is empty or not there" in answer.stdout


def test_unreadable_trace(cli, tmp_path):
    answer = cli("verify", tmp_path)
    assert answer.exit_code == 2
    assert "can't be read" in answer.stderr


def test_wrong_groups_name_what_is_allowed(cli, write):
    answer = cli("verify", write(row()), "--groups", "8,x")
    assert answer.exit_code == 2
    assert "--groups '8,x' is not valid; allowed: whole numbers >= 1" in answer.stderr


def test_exit_code_and_reason(cli, write):
    answer = cli("verify", write(row()), "--require", "search", "--groups", "9,9")
    assert answer.exit_code == 1
    assert "NOT PROVEN (search)" in answer.stdout
    assert "uses a layout of rule certified, not search" in answer.stdout
    assert f"has groups of {COMPACT} layers, not [9, 9]" in answer.stdout


def test_every_event_that_is_written_is_known():
    """The events are plain words in several files; none of them may be unknown here."""
    from altay_kvfix.cli.verify import _EVENTS

    text = "".join(
        (REPOSITORY / "altay_kvfix" / name).read_text() for name in ("hook.py", "report.py")
    )
    for event in _EVENTS:
        if event not in ("native", "fallback", "refused"):
            assert f'"{event}"' in text, event
