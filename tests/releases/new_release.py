"""The verdict on a vLLM release that nobody has seen: ``make new-release VERSION=x``.

Downloads it, compares the planner's functions with those of the newest supported release, runs the
release suite on it, and says what a maintainer has to do. Exits 0 when nothing is left to do but to
add the release to the supported ones.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import sys

import suite
from fingerprints import functions
from sources import KNOWN


def differences(known: str, new: str) -> dict[str, str]:
    """By function, the difference between two releases; docstrings and comments do not count."""
    before, after = (
        {name: ast.unparse(node) for name, node in functions(release).items()}
        for release in (known, new)
    )
    found = {}
    for name in sorted(before.keys() | after.keys()):
        old, now = before.get(name, ""), after.get(name, "")
        if old != now:
            lines = difflib.unified_diff(
                old.splitlines(), now.splitlines(), f"{known}/{name}", f"{new}/{name}", lineterm=""
            )
            found[name] = "\n".join(lines)
    return found


def judge(release: str) -> int:
    newest = KNOWN[-1]
    try:
        changed = differences(newest, release)
        results = suite.results(release)
    except (RuntimeError, OSError) as failure:
        print(f"{failure}\n\nVERDICT: vLLM {release} can't be checked: see above.")
        return 2
    for name, difference in changed.items():
        print(f"--- {name} is not what it was in {newest}\n{difference}\n")
    failed = {name: r for name, r in results.items() if r not in (suite.PASSED, suite.NOT_THERE)}
    for name, traceback in failed.items():
        print(f"--- failed: {name}\n{traceback}\n")

    passed = sum(result == suite.PASSED for result in results.values())
    absent = sum(result == suite.NOT_THERE for result in results.values())
    print(f"{passed} checks passed, {len(failed)} failed, {absent} do not apply", end="; ")
    print(f"{len(changed)} functions changed since {newest}\n")
    if failed:
        print(f"VERDICT: vLLM {release} is not supported yet. What failed: {', '.join(failed)}.")
        print("Users get vLLM's own layout there. Extend altay_kvfix/vllm_compat.py and record")
        print("what is different in altay_kvfix/vllm_releases.py, then run this again.")
        return 1
    if changed and release not in KNOWN:
        print(f"VERDICT: vLLM {release} works. Read the differences above: {', '.join(changed)}.")
    else:
        print(f"VERDICT: vLLM {release} works, with the planner of {newest}.")
    if release not in KNOWN:
        print(f"To support it: add {release!r} to KNOWN in tests/releases/sources.py, run")
        print("python tests/releases/fingerprints.py and make releases, and commit both.")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", help="a vLLM release, such as 0.34.0")
    sys.exit(judge(parser.parse_args().version))
