"""Everything this package knows about vLLM: names, attributes, and how to read its objects.

No other file touches a vLLM name. vLLM itself is never imported from here: the hook hands in the
planner module that has just been loaded, and objects are read by their attributes.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from .layout import groups_of, split_round_robin
from .search import Family, Problem
from .vllm_releases import PLANNER_MODULES

CONFIGS_FUNCTION = "get_kv_cache_configs"
GLOBAL_GROUPS_FUNCTION = "get_global_kv_cache_groups"
GROUPS_FUNCTION = "get_kv_cache_groups"
UNIFORM_PAGE_FUNCTION = "_get_kv_cache_groups_uniform_page_size"
PLANNER_FUNCTIONS = (CONFIGS_FUNCTION, GROUPS_FUNCTION, UNIFORM_PAGE_FUNCTION)
"""What is wrapped in every release; GLOBAL_GROUPS_FUNCTION is, where it exists."""
_GROUP_SPECS_FUNCTION = "create_kv_cache_group_specs"
_BUILDER_MODULE = "vllm.v1.core.kv_cache_config_builder"

LOGGER_NAME = "vllm.altay_kvfix"
"""A child of vLLM's logger, so that our lines carry its format, level and destination."""

Specs = Mapping[str, Any]
"""Layer name -> KVCacheSpec, in the order the model registered its layers."""
Groups = Sequence[Any]
"""KVCacheGroupSpec objects."""


def version() -> str:
    """For messages and traces only: nothing in this package depends on it."""
    # The distribution has another name in CPU builds, so its metadata can't be asked.
    return str(getattr(sys.modules.get("vllm"), "__version__", "unknown"))


class UnknownPlannerError(Exception):
    """This vLLM does not look, or does not group, like any release this package knows."""

    def __init__(self, what: str) -> None:
        super().__init__(f"vLLM {version()}: {what}")


# --- the planner module ------------------------------------------------------------------------


def planner_module() -> str:
    """The name of the module that holds the imported vLLM's planner. Imports nothing.

    Raises:
        UnknownPlannerError: this release keeps its planner elsewhere.
    """
    for name in PLANNER_MODULES:
        if _exists(name):
            return name
    raise UnknownPlannerError(f"there is no module {' or '.join(PLANNER_MODULES)}")


def _exists(module: str) -> bool:
    path: Any = sys.modules["vllm"].__path__
    parts = module.split(".")
    for i in range(1, len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: i + 1]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return True


def wrapped_functions(planner: ModuleType) -> list[str]:
    """The names of the functions that are wrapped in this release."""
    grouped_before = hasattr(planner, GLOBAL_GROUPS_FUNCTION)
    return [*PLANNER_FUNCTIONS, *([GLOBAL_GROUPS_FUNCTION] if grouped_before else [])]


def check_planner_functions(planner: ModuleType) -> None:
    """Raises :class:`UnknownPlannerError` where a function we need is missing or takes more."""
    grouped_before = hasattr(planner, GLOBAL_GROUPS_FUNCTION)
    needed = {
        CONFIGS_FUNCTION: 4 if grouped_before else 3,
        GROUPS_FUNCTION: 2,
        UNIFORM_PAGE_FUNCTION: 1,
        _GROUP_SPECS_FUNCTION: 2,
    }
    if grouped_before:
        needed[GLOBAL_GROUPS_FUNCTION] = 2
    for name, arguments in needed.items():
        function = getattr(planner, name, None)
        if not callable(function):
            raise UnknownPlannerError(f"there is no function {planner.__name__}.{name}")
        try:
            inspect.signature(function).bind(*[None] * arguments)
        except TypeError:
            signature = ", ".join(inspect.signature(function).parameters)
            raise UnknownPlannerError(f"{name} takes other arguments: {signature}") from None


def is_vllms(function: Any) -> bool:
    """Whether vLLM itself defines the function, and no plugin does."""
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    return str(getattr(function, "__module__", None)).partition(".")[0] == "vllm"


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
    _check_specs(kv_cache_spec)
    return vllm_config, kv_cache_spec


def uniform_page_arguments(kv_cache_spec: Specs) -> Specs:
    """The argument of ``_get_kv_cache_groups_uniform_page_size``; TypeError for another call."""
    _check_specs(kv_cache_spec)
    return kv_cache_spec


def global_groups_arguments(
    vllm_config: Any, kv_cache_specs: Sequence[Specs]
) -> tuple[Any, Sequence[Specs]]:
    """The arguments of ``get_global_kv_cache_groups``; TypeError where the call has others."""
    _check_specs(*kv_cache_specs)
    return vllm_config, kv_cache_specs


def configs_arguments(
    vllm_config: Any,
    kv_cache_specs: Sequence[Specs],
    available_memory: Sequence[int],
    *_: Any,
    **__: Any,
) -> tuple[Any, Sequence[Specs], Sequence[int]]:
    """The arguments of ``get_kv_cache_configs``; TypeError where the call lacks one."""
    _check_specs(*kv_cache_specs)
    return vllm_config, kv_cache_specs, available_memory


def _check_specs(*worker_specs: Any) -> None:
    for specs in worker_specs:
        if not isinstance(specs, Mapping):
            raise TypeError(f"{type(specs).__name__} where cache specs by layer were expected")


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


def max_model_len(vllm_config: Any) -> int:
    return int(vllm_config.model_config.max_model_len)


def has_kv_connector(vllm_config: Any) -> bool:
    return getattr(vllm_config, "kv_transfer_config", None) is not None


# --- families ----------------------------------------------------------------------------------


def is_hidden_state(spec: Any) -> bool:
    """Whether a spec is the marker for hidden-state layers (vLLM >= 0.22).

    Told by class name: the class does not exist in every release.
    """
    return _is_a(spec, "HiddenStateCacheSpec")


def kind(spec: Any) -> str:
    """What a person calls such layers: ``full attention``, ``sliding window 1024``, ``mamba2``."""
    if _is_a(spec, "MambaSpec"):
        return str(getattr(spec.mamba_type, "name", spec.mamba_type)).lower().removesuffix("_attn")
    name = type(spec).__name__.removesuffix("Spec")
    words = "".join(f" {c.lower()}" if c.isupper() else c for c in name).strip()
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    return f"{words} {window}" if window else words


def _is_a(spec: Any, class_name: str) -> bool:
    return any(cls.__name__ == class_name for cls in type(spec).__mro__)


def undivided_reason(planner: ModuleType, vllm_config: Any, groups: Groups) -> str | None:
    """Why vLLM made ``groups`` by other means than dividing families, or None.

    It keeps layers of several page sizes in packed groups, and HiSparse makes groups of its own.
    A platform or a model may group the layers in vLLM's place (vLLM >= 0.33); where it calls
    vLLM's grouping and builds on the answer, that must be the one it knows.
    """
    attention_config = getattr(vllm_config, "attention_config", None)
    if getattr(attention_config, "hisparse_config", None) is not None:
        return "HiSparse makes the KV cache groups"
    if getattr(vllm_config.model_config, "supports_kv_cache_grouping", False):
        return "the model makes the KV cache groups"
    builders = sys.modules.get(_BUILDER_MODULE)
    if builders is not None:
        builder = type(builders.get_kv_cache_config_builder(vllm_config))
        default = planner.DefaultKVCacheConfigBuilder
        if builder.get_kv_cache_groups is not default.get_kv_cache_groups:
            return f"the platform's {builder.__name__} makes the KV cache groups"
    specs = [group.kv_cache_spec for group in groups]
    if any(hasattr(spec, "kv_cache_specs") for spec in specs):
        return "layers of different page sizes are packed into common groups"
    return None


def recover_families(specs: Specs, dealt: list[list[str]]) -> list[list[str]]:
    """The families vLLM saw, read off its own answer instead of a copy of its rule.

    Layers that share a spec or a native group are one family. vLLM collects a family spec by spec,
    in the order it meets them; dealing that out must give its answer exactly.

    Args:
        specs: What ``_get_kv_cache_groups_uniform_page_size`` was given.
        dealt: What it answered: the layer names of each group.

    Returns:
        The layer names of each family, in vLLM's order.

    Raises:
        UnknownPlannerError: vLLM's answer is not a round-robin deal of such families.
    """
    by_spec: dict[Any, list[str]] = {}
    for name, spec in specs.items():
        by_spec.setdefault(spec, []).append(name)
    families: list[list[str]] = []
    redealt: list[list[str]] = []
    for family_specs, num_groups in _specs_of_families(specs, dealt):
        families.append(
            [n for spec, names in by_spec.items() if spec in family_specs for n in names]
        )
        redealt += split_round_robin(families[-1], num_groups)
    if redealt != dealt:
        raise UnknownPlannerError(
            "layers are grouped by a rule that is not known: it does not deal each family out in "
            f"turn (group lengths {[len(names) for names in dealt]})"
        )
    return families


def _specs_of_families(specs: Specs, dealt: list[list[str]]) -> list[tuple[set[Any], int]]:
    """Each family's specs and number of groups: groups with a spec in common belong together."""
    families: list[tuple[set[Any], int]] = []
    for names in dealt:
        group_specs, num_groups = {specs[name] for name in names}, 1
        # A group of several specs can join families that looked separate so far.
        for family in [family for family in families if family[0] & group_specs]:
            families.remove(family)
            group_specs |= family[0]
            num_groups += family[1]
        families.append((group_specs, num_groups))
    return families


def watched_families(
    calls: Sequence[tuple[Specs, list[list[str]]]], native: Groups
) -> list[list[str]]:
    """The families behind ``native``, the answer of ``get_kv_cache_groups``.

    Args:
        calls: What the inner function was given, and the layer names of the groups it answered.

    Raises:
        UnknownPlannerError: the answer is not that of the inner function plus hidden-state groups.
    """
    if len(calls) != 1:
        raise UnknownPlannerError(
            f"{UNIFORM_PAGE_FUNCTION} was called {len(calls)} times, not once, to divide the layers"
        )
    specs, dealt = calls[0]
    if dealt != layer_names(g for g in native if not is_hidden_state(g.kv_cache_spec)):
        raise UnknownPlannerError("the groups were changed after the layers had been divided")
    return recover_families(specs, dealt)


def deal_families(families: Iterable[Sequence[str]], group_size: int) -> list[list[str]]:
    """Layer names per group, for groups of ``group_size``."""
    return [
        names
        for family in families
        for names in split_round_robin(family, groups_of(len(family), group_size))
    ]


# --- groups ------------------------------------------------------------------------------------


def build_groups(planner: ModuleType, specs: Specs, divided: list[list[str]]) -> Groups:
    """Fresh KVCacheGroupSpec objects, made by vLLM (newer releases append to them later)."""
    if sorted(specs) != sorted(name for names in divided for name in names):
        raise UnknownPlannerError("other layers were asked for the second time")
    # Copies: the lists become part of the groups, where anybody may change them.
    copies = [list(names) for names in divided]
    groups: Groups = getattr(planner, _GROUP_SPECS_FUNCTION)(specs, copies)
    return groups


def layer_names(groups: Iterable[Any]) -> list[list[str]]:
    """A copy: vLLM appends to the lists of groups it has made."""
    return [list(group.layer_names) for group in groups]


def group_lengths(groups: Groups) -> list[int]:
    return [len(group.layer_names) for group in groups]


def check_same_cache(native: Groups, groups: Groups, divided: list[list[str]]) -> None:
    """Check that ``groups`` is native's cache, divided as ``divided`` says and else the same.

    The groups that vLLM adds afterwards, for hidden-state layers, must be native's.

    Raises:
        UnknownPlannerError: a layer is missing, doubled or has another spec; page sizes differ;
            a group has fields that are not at their defaults; fewer than two groups.
    """
    hidden = layer_names(g for g in native if is_hidden_state(g.kv_cache_spec))
    if layer_names(groups) != divided + hidden:
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


def not_searched_reason(vllm_config: Any, native: Groups) -> str | None:
    """Why a model that could be divided otherwise is better left alone, or None."""
    if vllm_config.cache_config.num_gpu_blocks_override is not None:
        # Wider blocks would then take more memory than was measured to be free.
        return "num_gpu_blocks_override sets the number of blocks, not the memory"
    try:
        for group in native:
            check_default_fields(group)
    except UnknownPlannerError as special:
        return str(special)
    return None


# --- capacity ----------------------------------------------------------------------------------


def search_problem(
    vllm_config: Any,
    specs: Specs,
    families: Sequence[Sequence[str]],
    native: Groups,
    tokens: int,
    worker_specs: Sequence[Specs] = (),
    available_memory: Sequence[int] = (),
) -> Problem:
    """The plain numbers that the capacity search works on.

    Args:
        specs: What ``get_kv_cache_groups`` was given.
        families: Layer names by family, without hidden-state layers.
        native: vLLM's own groups, hidden-state groups among them.
        tokens: Request length to price.
        worker_specs: Each worker's own layers; empty where one worker holds the whole model.
        available_memory: Bytes for the KV cache on each worker; empty where it is not known.
    """
    by_layer = {name: group.kv_cache_spec for group in native for name in group.layer_names}
    hidden = [[name] for name, spec in by_layer.items() if is_hidden_state(spec)]
    drafters = draft_layers(vllm_config, [name for family in families for name in family], specs)
    longest = max_model_len(vllm_config)
    stages = {name: stage for stage, owned in enumerate(_stages(worker_specs)) for name in owned}

    def family(names: Sequence[str]) -> Family:
        members = [by_layer[name] for name in names]
        return Family(
            layers=len(names),
            blocks_per_request=_blocks_of_longest(vllm_config, members, tokens),
            max_blocks_per_request=_blocks_of_longest(vllm_config, members, longest),
            is_attention=not _is_a(members[0], "MambaSpec"),
            draft_layers=tuple(i for i, name in enumerate(names) if name in (drafters or ())),
            may_hold_draft=drafters is None,
            stages=tuple(stages[name] for name in names) if len(set(stages.values())) > 1 else (),
        )

    page = native[0].kv_cache_spec.page_size_bytes
    return Problem(
        families=tuple(family(names) for names in (*families, *hidden)),
        native_size=max(len(group.layer_names) for group in native),
        pages=min(available_memory) // page if available_memory else None,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
    )


def _stages(worker_specs: Sequence[Specs]) -> list[frozenset[str]]:
    """The layers of each pipeline stage: tensor-parallel workers of a stage hold the same ones."""
    return list(dict.fromkeys(frozenset(specs) for specs in worker_specs))


def _blocks_of_longest(vllm_config: Any, specs: Iterable[Any], tokens: int) -> int:
    """Blocks of a request of ``tokens`` in a group of such layers.

    vLLM prices a request of max_model_len; its own auto-fit changes that value for a moment too.
    """
    model_config = vllm_config.model_config
    longest = model_config.max_model_len
    if tokens != longest:
        model_config.max_model_len = tokens
    try:
        return max(_blocks_of(vllm_config, spec) for spec in dict.fromkeys(specs))
    finally:
        if tokens != longest:
            model_config.max_model_len = longest


def _blocks_of(vllm_config: Any, spec: Any) -> int:
    """ceil(max_memory_usage_bytes / page_size_bytes), vLLM's own price of a group.

    See ``get_max_concurrency_for_kv_cache_config``.
    """
    return -(-int(spec.max_memory_usage_bytes(vllm_config)) // int(spec.page_size_bytes))


def draft_layers(
    vllm_config: Any, layer_names: Iterable[str], specs: Specs
) -> frozenset[str] | None:
    """The layers that belong to the drafter of speculative decoding; None if it can't be told.

    vLLM >= 0.33 marks them. Before that, the drafter's layers are registered after the target's,
    under another prefix or with indices beyond the target's number of layers.
    """
    names = set(layer_names)
    ordered = [name for name in specs if name in names]
    if all(hasattr(specs[name], "is_draft") for name in ordered):
        return frozenset(name for name in ordered if specs[name].is_draft)
    if getattr(vllm_config, "speculative_config", None) is None:
        return frozenset()
    config = vllm_config.model_config
    text_config = getattr(config, "hf_text_config", None) or getattr(config, "hf_config", None)
    target_layers = getattr(text_config, "num_hidden_layers", None)
    places = [_place(name) for name in ordered]
    if target_layers is None or any(place is None for place in places):
        return None
    prefix = places[0][0] if places[0] else ""
    is_target = [p is not None and p[0] == prefix and p[1] < target_layers for p in places]
    indices = [p[1] for p, target in zip(places, is_target, strict=True) if p and target]
    # A drafter that starts at index 0 again under the same prefix would look like the target.
    if indices != sorted(indices) or is_target != sorted(is_target, reverse=True):
        return None
    return frozenset(name for name, target in zip(ordered, is_target, strict=True) if not target)


def _place(layer_name: str) -> tuple[str, int] | None:
    """Prefix and index of a layer: ``model.layers.12.attn`` -> ``("model.layers", 12)``."""
    parts = layer_name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    if not numbers:
        return None
    return ".".join(parts[: numbers[0]]), int(parts[numbers[0]])


def blocks_per_request(vllm_config: Any, groups: Groups) -> int:
    """Blocks that one request of ``max_model_len`` tokens takes from the pool, over all groups."""
    return sum(_blocks_of(vllm_config, group.kv_cache_spec) for group in groups)


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
