"""Everything this package knows about vLLM: names, attributes, and how to read its objects.

No other file touches a vLLM name. vLLM itself is never imported from here: the hook hands in the
planner module that has just been loaded, and objects are read by their attributes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from .layout import groups_of, join_round_robin, split_round_robin

PLANNER_MODULE = "vllm.v1.core.kv_cache_utils"
CONFIGS_FUNCTION = "get_kv_cache_configs"
GROUPS_FUNCTION = "get_kv_cache_groups"
UNIFORM_PAGE_FUNCTION = "_get_kv_cache_groups_uniform_page_size"
PLANNER_FUNCTIONS = (CONFIGS_FUNCTION, GROUPS_FUNCTION, UNIFORM_PAGE_FUNCTION)
_GROUP_SPECS_FUNCTION = "create_kv_cache_group_specs"

LOGGER_NAME = "vllm.altay_kvfix"
"""A child of vLLM's logger, so that our lines carry its format, level and destination."""

Specs = Mapping[str, Any]
"""Layer name -> KVCacheSpec, in the order the model registered its layers."""
Groups = Sequence[Any]
"""KVCacheGroupSpec objects."""


class UnknownPlannerError(Exception):
    """This vLLM does not look, or does not group, like any release this package knows."""


def version() -> str:
    # The distribution has another name in CPU builds, so its metadata can't be asked.
    return str(getattr(sys.modules.get("vllm"), "__version__", "unknown"))


# --- the planner module ------------------------------------------------------------------------


def check_planner_exists() -> None:
    """Look for the planner's file in the imported vLLM, without importing it.

    Raises:
        UnknownPlannerError: this release keeps its planner elsewhere.
    """
    path: Any = sys.modules["vllm"].__path__
    parts = PLANNER_MODULE.split(".")
    for i in range(1, len(parts)):
        name = ".".join(parts[: i + 1])
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            raise UnknownPlannerError(f"vLLM {version()} has no module {name}")
        path = spec.submodule_search_locations


def check_planner_functions(planner: ModuleType) -> None:
    """Raises :class:`UnknownPlannerError` where a function we need is missing."""
    for name in (*PLANNER_FUNCTIONS, _GROUP_SPECS_FUNCTION):
        if not callable(getattr(planner, name, None)):
            raise UnknownPlannerError(f"vLLM {version()} has no {planner.__name__}.{name}")


def replace_everywhere(planner: ModuleType, name: str, native: Any, wrapped: Any) -> None:
    """Put ``wrapped`` in the planner, and where a module imported the function by its name.

    ``vllm.v1.engine.core`` does. It sees the wrapped function where the hook was armed in time; a
    model's package may call for the layout after the engine's modules are loaded.
    """
    setattr(planner, name, wrapped)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is native:
            setattr(module, name, wrapped)


def groups_arguments(vllm_config: Any, kv_cache_spec: Specs) -> tuple[Any, Specs]:
    """The arguments of ``get_kv_cache_groups``; TypeError where the call has others."""
    return vllm_config, kv_cache_spec


def uniform_page_arguments(kv_cache_spec: Specs) -> Specs:
    """The argument of ``_get_kv_cache_groups_uniform_page_size``; TypeError for another call."""
    return kv_cache_spec


def configs_arguments(
    vllm_config: Any, kv_cache_specs: Sequence[Specs], available_memory: Sequence[int]
) -> tuple[Any, Sequence[Specs], Sequence[int]]:
    """The arguments of ``get_kv_cache_configs``; TypeError where the call has others."""
    return vllm_config, kv_cache_specs, available_memory


# --- the configuration -------------------------------------------------------------------------


def architectures(vllm_config: Any) -> set[str]:
    """Every architecture name the model's config carries."""
    model_config = getattr(vllm_config, "model_config", None)
    names: set[str] = set()
    for owner in (model_config, getattr(model_config, "hf_config", None)):
        for value in (getattr(owner, "architecture", None), getattr(owner, "architectures", None)):
            names.update([value] if isinstance(value, str) else value or ())
    return names


def hybrid_manager_disabled(vllm_config: Any) -> bool:
    return bool(vllm_config.scheduler_config.disable_hybrid_kv_cache_manager)


def pipeline_stages(vllm_config: Any) -> int:
    return int(vllm_config.parallel_config.pipeline_parallel_size)


def has_kv_connector(vllm_config: Any) -> bool:
    return getattr(vllm_config, "kv_transfer_config", None) is not None


# --- families ----------------------------------------------------------------------------------


def is_hidden_state(spec: Any) -> bool:
    """Whether a spec is the marker for hidden-state layers (vLLM >= 0.22).

    Told by class name: the class does not exist in every release.
    """
    return any(cls.__name__ == "HiddenStateCacheSpec" for cls in type(spec).__mro__)


def recover_families(specs: Specs, groups: Groups) -> list[list[str]]:
    """The families vLLM saw, read off its own answer instead of a copy of its rule.

    Layers that share a spec or a native group are one family. A family's groups are joined back
    into the order vLLM dealt them from, and dealing them again must give its answer exactly.

    Args:
        specs: What ``_get_kv_cache_groups_uniform_page_size`` was given.
        groups: What it answered.

    Returns:
        The layer names of each family, in vLLM's order.

    Raises:
        UnknownPlannerError: vLLM's answer is not a round-robin deal of such families.
    """
    dealt = [list(group.layer_names) for group in groups]
    families: list[list[str]] = []
    redealt: list[list[str]] = []
    for members in _families_of_groups(specs, dealt):
        families.append(join_round_robin(members))
        redealt += split_round_robin(families[-1], len(members))
    if redealt != dealt:
        raise UnknownPlannerError(
            f"vLLM {version()} groups layers by a rule that is not known: it does not deal each "
            f"family out in turn (group lengths {[len(names) for names in dealt]})"
        )
    return families


def watched_families(calls: Sequence[tuple[Specs, Groups]], native: Groups) -> list[list[str]]:
    """The families behind ``native``, the answer of ``get_kv_cache_groups``.

    Args:
        calls: What the inner function was given and answered meanwhile, call by call.

    Raises:
        UnknownPlannerError: the answer is not that of the inner function plus hidden-state groups.
    """
    if len(calls) != 1:
        raise UnknownPlannerError(
            f"vLLM {version()} called {UNIFORM_PAGE_FUNCTION} {len(calls)} times, not once, "
            "to group these layers"
        )
    specs, groups = calls[0]
    attention = [g.layer_names for g in native if not is_hidden_state(g.kv_cache_spec)]
    if attention != [group.layer_names for group in groups]:
        raise UnknownPlannerError(f"vLLM {version()} changed the groups after dividing the layers")
    return recover_families(specs, groups)


def _families_of_groups(specs: Specs, dealt: list[list[str]]) -> list[list[list[str]]]:
    """Sort the groups by family: groups that hold a spec in common belong together."""
    families: list[tuple[set[Any], list[list[str]]]] = []
    for names in dealt:
        group_specs = {specs[name] for name in names}
        members = [names]
        # A group of several specs can join families that looked separate so far.
        related = [family for family in families if family[0] & group_specs]
        for family in reversed(related):
            group_specs |= family[0]
            members = family[1] + members
            families.remove(family)
        families.append((group_specs, members))
    return [members for _, members in families]


def deal_families(families: Iterable[Sequence[str]], group_size: int) -> list[list[str]]:
    """Layer names per group, for groups of ``group_size``."""
    return [
        names
        for family in families
        for names in split_round_robin(family, groups_of(len(family), group_size))
    ]


# --- groups ------------------------------------------------------------------------------------


def build_groups(planner: ModuleType, specs: Specs, layer_names: list[list[str]]) -> Groups:
    """Fresh KVCacheGroupSpec objects, made by vLLM (newer releases append to them later)."""
    if sorted(specs) != sorted(name for names in layer_names for name in names):
        raise UnknownPlannerError("vLLM asked for other layers the second time")
    groups: Groups = getattr(planner, _GROUP_SPECS_FUNCTION)(specs, layer_names)
    return groups


def group_lengths(groups: Groups) -> list[int]:
    return [len(group.layer_names) for group in groups]


def check_same_cache(native: Groups, groups: Groups, layer_names: list[list[str]]) -> None:
    """Check that ``groups`` is native's cache, divided as ``layer_names`` says and else the same.

    The groups that vLLM adds afterwards, for hidden-state layers, must be native's.

    Raises:
        UnknownPlannerError: a layer is missing, doubled or has another spec; page sizes differ;
            a group has fields that are not at their defaults; fewer than two groups.
    """
    hidden = [list(g.layer_names) for g in native if is_hidden_state(g.kv_cache_spec)]
    if [list(group.layer_names) for group in groups] != layer_names + hidden:
        raise UnknownPlannerError("the groups do not hold the layers they were given")
    if len(groups) < 2:
        raise UnknownPlannerError("fewer than two groups are left")
    native_spec = {name: g.kv_cache_spec for g in native for name in g.layer_names}
    for group in groups:
        for name in group.layer_names:
            if _shape(group.kv_cache_spec) != _shape(native_spec[name]):
                raise UnknownPlannerError(f"layer {name} has another cache spec than before")
        check_default_fields(group)
    if len({group.kv_cache_spec.page_size_bytes for group in groups}) != 1:
        raise UnknownPlannerError("the groups' pages differ in size")


def check_default_fields(group: Any) -> None:
    """Raises :class:`UnknownPlannerError` for a group that carries more than layers and a spec.

    Such a group (kept in host memory, or with a role) was made for a purpose that a group built
    anew would lose. The EAGLE mark is put on by vLLM itself after grouping.
    """
    for field in dataclasses.fields(group):
        if field.name in ("layer_names", "kv_cache_spec", "is_eagle_group"):
            continue
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if getattr(group, field.name) != default:
            raise UnknownPlannerError(
                f"a KV cache group has {field.name}={getattr(group, field.name)!r}"
            )


def _shape(spec: Any) -> tuple[Any, ...]:
    return type(spec), spec.block_size, spec.page_size_bytes


def layers_per_group(groups_per_worker: Sequence[Groups]) -> list[set[str]]:
    """The layers of each group over all workers: every worker holds its own stage's share."""
    return [
        {name for group in same_group for name in group.layer_names}
        for same_group in zip(*groups_per_worker, strict=True)
    ]


# --- capacity ----------------------------------------------------------------------------------


def blocks_per_request(vllm_config: Any, groups: Groups) -> int:
    """Blocks that one request of ``max_model_len`` tokens takes from the pool, over all groups.

    Per group: ceil(max_memory_usage_bytes / page_size_bytes), vLLM's own price of a group
    (``get_max_concurrency_for_kv_cache_config``).
    """
    return sum(
        -(-g.kv_cache_spec.max_memory_usage_bytes(vllm_config) // g.kv_cache_spec.page_size_bytes)
        for g in groups
    )


def capacity_tokens(
    vllm_config: Any,
    groups: Groups,
    worker_specs: Sequence[Specs],
    available_memory: Sequence[int],
) -> int:
    """Tokens the KV cache holds in requests of ``max_model_len``, as vLLM logs it.

    Each worker owns the layers of its pipeline stage; its block is as wide as its widest share of
    a group, and the worker with the fewest blocks counts for all.

    Args:
        worker_specs: Each worker's own layers.
        available_memory: Bytes for the KV cache on each worker.
    """
    num_blocks = vllm_config.cache_config.num_gpu_blocks_override
    if num_blocks is None:
        num_blocks = min(
            memory // _block_bytes(groups, specs)
            for specs, memory in zip(worker_specs, available_memory, strict=True)
            if specs
        )
    concurrency = num_blocks / blocks_per_request(vllm_config, groups)
    return int(concurrency * vllm_config.model_config.max_model_len)


def _block_bytes(groups: Groups, specs: Specs) -> int:
    return max(
        sum(name in specs for name in group.layer_names) * int(group.kv_cache_spec.page_size_bytes)
        for group in groups
    )
