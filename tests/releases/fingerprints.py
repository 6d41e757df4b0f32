"""What the planner's functions looked like in every supported release.

A fingerprint is a hash of a function's syntax tree without its docstring: comments, layout and
documentation may change, behaviour may not go unnoticed.

    python tests/releases/fingerprints.py [RELEASE ...]    # write fingerprints.json anew
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from sources import KNOWN, ROOT, sources

sys.path.insert(0, str(ROOT))

from altay_kvfix.vllm_releases import PLANNER_MODULES

RECORDED = Path(__file__).with_name("fingerprints.json")

FUNCTIONS = (
    "get_kv_cache_configs",
    "get_global_kv_cache_groups",
    "get_kv_cache_groups",
    "_get_kv_cache_groups_uniform_page_size",
    "create_kv_cache_group_specs",
)
"""What is wrapped, and what builds the groups."""


def planner_source(release: str) -> str:
    """The source of the module that holds the planner.

    Raises:
        FileNotFoundError: it is in none of the modules that are known.
    """
    files = [sources(release).joinpath(*m.split(".")).with_suffix(".py") for m in PLANNER_MODULES]
    for file in files:
        if file.exists():
            return file.read_text(encoding="utf-8")
    raise FileNotFoundError(f"vLLM {release} has none of {', '.join(PLANNER_MODULES)}")


def functions(release: str) -> dict[str, ast.FunctionDef]:
    """The functions of :data:`FUNCTIONS` that the release has, without docstrings."""
    found = {}
    for node in ast.parse(planner_source(release)).body:
        if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS:
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
            found[node.name] = node
    return found


def fingerprints(release: str) -> dict[str, str]:
    # ast.dump differs between Python versions; source text made from the tree hardly does.
    return {
        name: hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:16]
        for name, node in functions(release).items()
    }


def recorded() -> Mapping[str, Mapping[str, str]]:
    return json.loads(RECORDED.read_text(encoding="utf-8"))


if __name__ == "__main__":
    table = {release: fingerprints(release) for release in sys.argv[1:] or KNOWN}
    RECORDED.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
