"""What an engine run says, in the terms of the tests."""

from __future__ import annotations

from engine_process import EngineRun


def answers(run: EngineRun) -> list[list[list[int]]]:
    """Token ids by round and request; the run has to have succeeded."""
    assert run.exit_code == 0, run.log[-5000:]
    assert run.result is not None
    return [[answer["token_ids"] for answer in round_] for round_ in run.result["rounds"]]


def our_lines(run: EngineRun) -> list[str]:
    return [line for line in run.log.splitlines() if "altay-kvfix" in line]


def layout_rows(run: EngineRun) -> list[dict[str, object]]:
    return [row for row in run.trace if "group_lengths" in row]
