"""A release that changed the planner's body tells us, not the user."""

from __future__ import annotations

import fingerprints
import pytest
from sources import KNOWN
from test_releases import RELEASES


def test_every_supported_release_is_recorded() -> None:
    assert tuple(fingerprints.recorded()) == KNOWN


@pytest.mark.parametrize("release", RELEASES)
def test_the_planner_is_the_one_that_was_read(release: str) -> None:
    seen, known = fingerprints.fingerprints(release), fingerprints.recorded().get(release, {})
    changed = sorted(
        name for name in seen.keys() | known.keys() if seen.get(name) != known.get(name)
    )
    assert not changed, (
        f"vLLM {release} changed {', '.join(changed)}: read the difference (make new-release "
        f"VERSION={release}), then record it with python tests/releases/fingerprints.py"
    )


def test_a_changed_body_is_noticed_and_a_comment_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    source = fingerprints.planner_source("0.32.0")
    known = fingerprints.fingerprints("0.32.0")
    commented = source.replace(
        "    grouped_layers = []", "    # a comment\n    grouped_layers = []"
    )
    changed = source.replace("min_num_layers * 1.5", "min_num_layers * 2")
    assert source not in (commented, changed)
    monkeypatch.setattr(fingerprints, "planner_source", lambda release: commented)
    assert fingerprints.fingerprints("0.32.0") == known
    monkeypatch.setattr(fingerprints, "planner_source", lambda release: changed)
    differing = {n for n, f in fingerprints.fingerprints("0.32.0").items() if known[n] != f}
    assert differing == {"_get_kv_cache_groups_uniform_page_size"}
