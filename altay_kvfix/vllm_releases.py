"""What is not the same in every supported vLLM release (0.20 to 0.33): a table, no code.

Nothing in this package compares versions. What a release has is told by what is there, so that a
vendor's build between two releases is met correctly. This table is the record of it; the release
suite (``make releases``) holds every row against the real source of every release.
"""

from __future__ import annotations

from dataclasses import dataclass

PLANNER_MODULES = ("vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils")
"""Where the planner is: the first of these that exists. Newest first, since a release that moved it
keeps the older module for other things."""


@dataclass(frozen=True)
class Difference:
    """Something that only some supported releases have."""

    what: str
    why: str
    """Why it matters here, and what this package does about it."""
    since: str
    """The first release that has it."""
    until: str | None
    """The last one; None where the newest still has it."""
    marker: str | None
    """What exists in exactly these releases, or None where no name tells: ``module:attribute``,
    the module below ``vllm.v1``, or ``planner`` for the one that holds the planner."""
    verified: str
    """The check of the release suite that would notice if this were wrong."""
    delete: str
    """When this row, and what it stands for in the code, can go."""


DIFFERENCES = (
    Difference(
        what="The planner is in kv_cache_utils.",
        why="The functions to wrap are there (PLANNER_MODULES).",
        since="0.20.2",
        until="0.32.0",
        marker="core.kv_cache_utils:get_kv_cache_groups",
        verified="hook armed by PYTHONPATH",
        delete="0.33 is the oldest supported release.",
    ),
    Difference(
        what="The planner is in kv_cache_planning; kv_cache_utils stays for other things.",
        why="As above. kv_cache_utils is loaded first and must be let pass.",
        since="0.33.0",
        until=None,
        marker="core.kv_cache_planning:get_kv_cache_groups",
        verified="hook armed by PYTHONPATH",
        delete="The planner moves on and 0.33 is no longer supported.",
    ),
    Difference(
        what="get_global_kv_cache_groups groups before memory is profiled; get_kv_cache_configs "
        "takes its groups as a fourth argument.",
        why="It is wrapped too: it marks the engine's real plan, which is one inside "
        "get_kv_cache_configs before. Memory, and so tokens, are told when that follows.",
        since="0.33.0",
        until=None,
        marker="planner:get_global_kv_cache_groups",
        verified="certified layout",
        delete="Never: from 0.33 it is the normal way. The older way goes with 0.32.",
    ),
    Difference(
        what="A platform (KVCacheConfigBuilder) or a model (SupportsKVCacheGrouping) may group "
        "the layers itself.",
        why="It may build on vLLM's answer, so that has to stay vLLM's: native "
        "(check_grouping_is_vllms).",
        since="0.33.0",
        until=None,
        marker="core.kv_cache_config_builder:get_kv_cache_config_builder",
        verified="grouping owned by a model or platform",
        delete="vLLM drops the interface, which it calls experimental.",
    ),
    Difference(
        what="spec.is_draft marks the drafter's layers, and does not count in comparisons.",
        why="Tells the drafter's layers apart. Families stay what they were: a drafter's layer "
        "with the target's spec is in the target's family.",
        since="0.33.0",
        until=None,
        marker="kv_cache_interface:KVCacheSpec.is_draft",
        verified="EAGLE annotation",
        delete="Never: before 0.33 the layers have to be told by their number.",
    ),
    Difference(
        what="Layers with a HiddenStateCacheSpec are taken out before grouping and appended to "
        "the same list of groups after it, each a group of its own.",
        why="The certified layout does not cover them; they are told by the class name, which "
        "does not exist before. What the inner function answered has to be copied.",
        since="0.22.0",
        until=None,
        marker="kv_cache_interface:HiddenStateCacheSpec",
        verified="hidden-state layers",
        delete="0.22 is the oldest supported release: then the class can be assumed.",
    ),
    Difference(
        what="Families are specs that can be merged; before, only equal specs.",
        why="Families are read off vLLM's own answer and not off such a rule (recover_families).",
        since="0.27.0",
        until=None,
        marker=None,
        verified="families and forced groups",
        delete="Nothing depends on it.",
    ),
    Difference(
        what="A model of one family must be one group: vLLM asserts it.",
        why="One family is left alone, in every release.",
        since="0.20.2",
        until="0.28.0",
        marker=None,
        verified="a model that is not hybrid",
        delete="A layout for one family is wanted, and 0.28 is no longer supported.",
    ),
    Difference(
        what="Packed layouts (block-outermost, or pages of several sizes) are grouped without the "
        "inner function.",
        why="Not one of the known calls: native (watched_families counts the calls).",
        since="0.29.0",
        until=None,
        marker="planner:_get_packed_kv_cache_groups",
        verified="packed layout",
        delete="Packed layouts are supported here.",
    ),
    Difference(
        what="get_kv_cache_groups marks the drafter's groups (is_eagle_group) at its end. From "
        "0.33 get_global_kv_cache_groups does it.",
        why="vLLM's code runs again around the forced groups and marks those. The mark is no "
        "reason to call a group's fields unknown.",
        since="0.29.0",
        until="0.32.0",
        marker="planner:_annotate_eagle_groups",
        verified="EAGLE annotation",
        delete="0.33 is the oldest supported release; the exception for the field goes too.",
    ),
    Difference(
        what="HiSparse calls get_kv_cache_groups inside itself.",
        why="The inner call runs untouched; the outer one did not come to the inner function: "
        "native.",
        since="0.30.0",
        until=None,
        marker="hisparse.layout:get_hisparse_kv_cache_groups",
        verified="HiSparse",
        delete="HiSparse goes. Any other call inside a call is met the same way.",
    ),
    Difference(
        what="Groups have host_resident, enable_kv_transfer and role.",
        why="A group with other than default values was made for a purpose: native "
        "(check_default_fields, which knows no names, so later fields are met as well).",
        since="0.30.0",
        until=None,
        marker="kv_cache_interface:KVCacheGroupSpec.role",
        verified="HiSparse",
        delete="Nothing depends on it.",
    ),
    Difference(
        what="Group objects are shared between the workers' configs and appended to later.",
        why="The forced groups are always new objects (build_groups).",
        since="0.31.0",
        until=None,
        marker=None,
        verified="two pipeline stages",
        delete="Nothing depends on it.",
    ),
)
