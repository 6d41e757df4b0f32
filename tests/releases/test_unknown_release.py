"""What happens on a release that nobody has seen: vLLM's own layout, one clear line, or an error.

doctored.py has the cases. They are made of the newest supported release; ``TEST_RELEASES=all`` also
makes them of the newest one that has the planner in the older place.
"""

from __future__ import annotations

import json
import os
from functools import cache
from typing import Any

import pytest
import suite
from doctored import CASES

from altay_kvfix import COMPACT_PLAN

RELEASES = ("0.33.0", "0.32.0") if os.environ.get("TEST_RELEASES") == "all" else ("0.33.0",)
COMPACT = sorted(COMPACT_PLAN.group_lengths)
WARNS = [name for name, case in CASES.items() if case.says is not None]
RAISES = [name for name, case in CASES.items() if case.raises is not None]
WORKS = [name for name in CASES if name not in WARNS + RAISES]


@cache
def _answers(release: str) -> dict[str, Any]:
    return json.loads(suite.run_with(release, "doctored.py").splitlines()[-1])


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("case", WARNS)
class TestNotRecognised:
    def test_altay_starts_with_vllms_layout_and_one_line(self, release: str, case: str) -> None:
        engines = _answers(release)[case]
        assert engines["ALTAY"]["error"] is None
        assert engines["ALTAY"]["groups"] == engines["off"]["groups"] != COMPACT
        (line,) = engines["ALTAY"]["lines"]
        assert f"vLLM {release}" in line and engines["ALTAY"]["says"] in line

    def test_required_says_the_same_and_does_not_start(self, release: str, case: str) -> None:
        engine = _answers(release)[case]["required"]
        assert engine["groups"] is None and engine["lines"] == []
        assert engine["says"] in engine["error"]

    @pytest.mark.parametrize("engine", ["searched", "not searched"])
    def test_another_model_starts_with_one_line_at_most(
        self, release: str, case: str, engine: str
    ) -> None:
        answer = _answers(release)[case][engine]
        assert answer["error"] is None
        assert len(answer["lines"]) <= 1, answer["lines"]


@pytest.mark.parametrize("case", WORKS)
def test_what_does_not_matter_is_met(release: str, case: str) -> None:
    engines = _answers(release)[case]
    for engine in ("ALTAY", "required"):
        assert engines[engine]["error"] is None
        assert engines[engine]["groups"] == COMPACT
    assert engines["ALTAY"]["lines"] == []
    assert max(engines["searched"]["groups"]) == 8


@pytest.mark.parametrize("case", RAISES)
def test_vllms_own_error_is_not_touched(release: str, case: str) -> None:
    for answer in _answers(release)[case].values():
        assert answer["error"] == CASES[case].raises
        assert answer["lines"] == []
