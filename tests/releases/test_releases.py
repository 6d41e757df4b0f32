"""The planner of every supported release, with the product armed as users arm it.

Plain pytest runs three releases; ``TEST_RELEASES=all`` (``make releases``) runs all of them and
writes the table in docs/releases.md; ``TEST_RELEASES=0.28.0,0.29.0`` runs these.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import suite
from sources import KNOWN, SHORT

_WANTED = os.environ.get("TEST_RELEASES", "")
RELEASES = KNOWN if _WANTED == "all" else tuple(filter(None, _WANTED.split(","))) or SHORT


@pytest.fixture(scope="module", autouse=True)
def _table() -> Iterator[None]:
    yield
    if RELEASES == KNOWN:
        suite.write_table(RELEASES)


@pytest.mark.parametrize("name", suite.CHECKS)
@pytest.mark.parametrize("release", RELEASES)
def test_release(release: str, name: str) -> None:
    result = suite.results(release)[name]
    if result == suite.NOT_THERE:
        pytest.skip(f"vLLM {release} has nothing of the kind")
    assert result == suite.PASSED, result
