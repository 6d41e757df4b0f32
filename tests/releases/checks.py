"""Every check of the release suite, run against the vLLM that is first on the path.

``python checks.py RELEASE`` runs in a process of its own (see suite.py), the product armed by
PYTHONPATH and nothing else, and prints one JSON object: check -> what it said.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import planning
import suite
import vllm_models as models
from planning import LAYOUT, MEMORY, Log, environment, lengths, names
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils

try:
    from vllm.v1.core import kv_cache_planning as planner
except ImportError:
    planner = kv_cache_utils

from altay_kvfix import COMPACT_PLAN, LEGACY_PLAN, vllm_compat, vllm_releases

COUNTS = "ALTAY_KVFIX_FAMILY_COUNTS"
COMPACT = sorted(COMPACT_PLAN.group_lengths)
NATIVE = sorted(LEGACY_PLAN.group_lengths)
OTHER_NATIVE = [14, 14, 14, 14, 15]  # 15 full-attention and 56 GDN layers: groups of 15

CHECKS: dict[str, Callable[[], None]] = {}


class NotInThisRelease(Exception):
    """What a check is about came later."""


def check(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    assert name in suite.CHECKS and name not in CHECKS, name

    def register(function: Callable[[], None]) -> Callable[[], None]:
        CHECKS[name] = function
        return function

    return register


# --- what the checks are made of ---------------------------------------------------------------


def plan(config: Any, *worker_specs: Any, memory: int = MEMORY) -> list[Any]:
    return planning.plan(planner, config, *worker_specs, memory=memory)


@contextlib.contextmanager
def logged() -> Iterator[Log]:
    # What is said once in a process shall be said in every check.
    sys.modules["altay_kvfix.report"]._already_said.clear()
    with planning.logged() as log:
        yield log


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def refused(*words: str) -> Iterator[None]:
    """The block raises a RuntimeError of the product that says ``words``."""
    try:
        yield
    except RuntimeError as error:
        assert type(error).__name__ == "KVLayoutError", error
        for word in words:
            assert word in str(error), f"{word!r} is missing in: {error}"
        return
    raise AssertionError("the engine would have started")


def one_line(log: Log, level: str, *words: str) -> None:
    lines = log.ours()
    assert len(lines) == 1, lines
    assert lines[0].startswith(level), lines
    for word in words:
        assert word in lines[0], f"{word!r} is missing in: {lines[0]}"


def has(name: str) -> bool:
    """Whether this vLLM has what ``Difference.marker`` names."""
    module, _, attribute = name.partition(":")
    try:
        found: Any = planner if module == "planner" else import_module(f"vllm.v1.{module}")
    except ImportError:
        return False
    for part in filter(None, attribute.split(".")):
        if not hasattr(found, part) and part not in getattr(found, "__dataclass_fields__", ()):
            return False
        found = getattr(found, part, None)
    return True


def needs(name: str) -> None:
    if not has(name):
        raise NotInThisRelease(name)


# --- the certified layout and its refusals -----------------------------------------------------


@check("hook armed by PYTHONPATH")
def _() -> None:
    for name in ("get_kv_cache_configs", "get_kv_cache_groups"):
        assert type(getattr(planner, name)).__name__ == "_PlannerFunction", name
    core = sys.modules.get("vllm.v1.engine.core") or import_module("vllm.v1.engine.core")
    assert core.get_kv_cache_configs is planner.get_kv_cache_configs
    if hasattr(planner, "get_global_kv_cache_groups"):
        assert core.get_global_kv_cache_groups is planner.get_global_kv_cache_groups


@check("certified layout")
def _() -> None:
    config = models.vllm_config()
    with logged() as log:
        (compact,) = plan(config, models.altay())
    with environment(**{LAYOUT: "off"}):
        (native,) = plan(config, models.altay())
    assert lengths(compact) == COMPACT, lengths(compact)
    assert lengths(native) == NATIVE, lengths(native)
    layers = [name for group in names(compact.kv_cache_groups) for name in group]
    assert sorted(layers) == sorted(models.altay())
    # The tokens are what vLLM itself says of both layouts.
    figures = f"{_vllms_tokens(config, native):,} -> {_vllms_tokens(config, compact):,} KV cache"
    one_line(log, "INFO", "group size 16 -> 8, 5 -> 9 groups", figures)
    assert not [line for line in log.vllms() if "Add 10 padding layers" in line], log.vllms()


@check("counts differ")
def _() -> None:
    with logged() as log:
        (config,) = plan(models.vllm_config(), models.altay(15, 56))
    assert lengths(config) == OTHER_NATIVE, lengths(config)
    one_line(log, "WARNING", "expected families of 16 + 54 layers, found 15 + 56")


@check("required")
def _() -> None:
    with environment(**{LAYOUT: "required"}):
        with logged() as log:
            (config,) = plan(models.vllm_config(architecture="Other"), models.altay())
        assert lengths(config) == COMPACT
        one_line(log, "WARNING", "certified, required")
        with refused("expected families of 16 + 54 layers, found 15 + 56"):
            plan(models.vllm_config(architecture="Other"), models.altay(15, 56))


@check("required looks at the finished groups")
def _() -> None:
    with environment(**{LAYOUT: "required"}):
        with contextlib.ExitStack() as stack:
            for name in ("get_kv_cache_groups", "_get_kv_cache_groups_uniform_page_size"):
                native = getattr(planner, name).__wrapped__
                stack.enter_context(patched(planner, name, native))
            stack.enter_context(refused("get_kv_cache_groups was replaced by"))
            plan(models.vllm_config(), models.altay())
        project = planner._project_kv_cache_groups_to_worker

        def reversed_groups(groups: Any, specs: Any) -> Any:
            swapped = [replace(group, layer_names=list(group.layer_names)) for group in groups]
            swapped[0].layer_names[0], swapped[1].layer_names[0] = (
                swapped[1].layer_names[0],
                swapped[0].layer_names[0],
            )
            return project(swapped, specs)

        with (
            patched(planner, "_project_kv_cache_groups_to_worker", reversed_groups),
            refused("the groups about to be used"),
        ):
            plan(models.vllm_config(), models.altay())


@check("off")
def _() -> None:
    for value in ("off", "legacy"):
        with environment(**{LAYOUT: value}), logged() as log:
            (config,) = plan(models.vllm_config(), models.altay())
        assert lengths(config) == NATIVE
        assert log.ours() == []
        assert [line for line in log.vllms() if "Add 10 padding layers" in line], log.vllms()


@check("hybrid manager disabled")
def _() -> None:
    specs = models.model(window=(54, models.sliding_window()), full=(16, models.full_attention()))
    for value in ("attention_exact", "required"):
        with environment(**{LAYOUT: value}):
            (config,) = plan(models.vllm_config(), specs)
            assert lengths(config) == COMPACT
            with logged() as log:
                (config,) = plan(models.vllm_config(disable_hybrid=True), specs)
            assert lengths(config) == [70]
            assert log.ours() == []


@check("a model that is not hybrid")
def _() -> None:
    for value in ("attention_exact", "required"):
        with environment(**{LAYOUT: value}), logged() as log:
            (config,) = plan(models.vllm_config(), models.model(full=(16, models.full_attention())))
        assert lengths(config) == [16]
        assert log.ours() == []


@check("hidden-state layers")
def _() -> None:
    needs("kv_cache_interface:HiddenStateCacheSpec")
    specs = models.altay() | models.model(hidden=(1, models.hidden_states()))
    with logged() as log:
        (config,) = plan(models.vllm_config(), specs)
    assert lengths(config) == sorted([*NATIVE, 1])
    one_line(log, "WARNING", "1 hidden-state cache layers")
    with environment(**{LAYOUT: "required"}), refused("1 hidden-state cache layers"):
        plan(models.vllm_config(), specs)


# --- the planner's other paths -----------------------------------------------------------------


@check("packed layout")
def _() -> None:
    needs("planner:_get_packed_kv_cache_groups")
    config = models.vllm_config()
    config.cache_config.get_resolved_kv_cache_layout = lambda: models.KVCacheLayout.BLNHC
    narrow = replace(models.full_attention(), num_kv_heads=1)
    specs = models.altay() | models.model(narrow=(16, narrow))
    with environment(**{LAYOUT: "off"}):
        native = plan(config, specs)[0].kv_cache_groups
    assert len(native) > 1
    with logged() as log:
        (result,) = plan(config, specs)
    assert names(result.kv_cache_groups) == names(native)
    one_line(log, "WARNING", "are packed into common groups")
    with environment(**{LAYOUT: "required"}), refused("are packed into common groups"):
        plan(config, specs)


@check("EAGLE annotation")
def _() -> None:
    if not (has("planner:_annotate_eagle_groups") or _marks_drafts()):
        raise NotInThisRelease("hybrid models get no EAGLE annotation")
    drafter = dict(
        block_size=models.BLOCK_SIZE,
        num_kv_heads=1,
        head_size=512,
        dtype=models.full_attention().dtype,
        page_size_padded=models.PAGE,
    )
    drafter |= {"is_draft": True} if _marks_drafts() else {"non_causal_multi_token_decode": True}
    draft_layers = models.model(draft=(5, kv_cache_interface.MLAAttentionSpec(**drafter)))
    specs = models.altay() | draft_layers
    config = models.vllm_config()
    config.speculative_config = SimpleNamespace(
        method="eagle3",
        num_speculative_tokens=1,
        use_eagle=lambda: True,
        use_eagle_block_drop=lambda: True,
        use_multi_module_mtp=lambda: False,
    )
    with environment(**{COUNTS: "5,16,54"}):
        (result,) = plan(config, specs)
        assert lengths(result) == sorted([5, *COMPACT]), lengths(result)
        for group in result.kv_cache_groups:
            drafts = set(group.layer_names) & set(draft_layers)
            assert group.is_eagle_group == bool(drafts), (group.layer_names, group.is_eagle_group)
        if has("planner:_uses_trailing_mtp_layers"):
            config.speculative_config.method = "mtp"
            specs = draft_layers | models.altay()
            (result,) = plan(config, specs)
            marked = [g.layer_names for g in result.kv_cache_groups if g.is_eagle_group]
            assert len(marked) == 2 and "full.15" in marked[0] + marked[1], marked


def _marks_drafts() -> bool:
    return has("kv_cache_interface:KVCacheSpec.is_draft")


@check("two pipeline stages")
def _() -> None:
    layers = list(_interleaved(models.altay()).items())
    stages = dict(layers[:35]), dict(layers[35:])
    config = models.vllm_config(pipeline_stages=2)
    with logged() as log:
        results = plan(config, *stages)
    with environment(**{LAYOUT: "off"}):
        natives = plan(config, *stages)
    assert [len(result.kv_cache_groups) for result in results] == [9, 9]
    assert results[0].num_blocks == results[1].num_blocks
    for result, stage in zip(results, stages, strict=True):
        assert sorted(n for group in names(result.kv_cache_groups) for n in group) == sorted(stage)
        assert max(lengths(result)) == 4, "each stage has half of every group"
    figures = [min(_vllms_tokens(config, c) for c in configs) for configs in (natives, results)]
    one_line(log, "INFO", "{:,} -> {:,} KV cache".format(*figures))
    with environment(**{LAYOUT: "required"}):
        assert len(plan(config, *stages)[1].kv_cache_groups) == 9
        with refused("expected families of 16 + 54 layers, found 16 + 53"):
            plan(config, stages[0], dict(layers[35:-1]))


def _interleaved(specs: dict[str, Any]) -> dict[str, Any]:
    """Layers in a model's order: each full-attention layer after a few GDN layers."""
    kinds = [[n for n in specs if n.startswith(kind)] for kind in ("gdn", "full")]
    places = [(i / len(kind), name) for kind in kinds for i, name in enumerate(kind)]
    return {name: specs[name] for _, name in sorted(places)}


@check("a worker's throw-away plan")
def _() -> None:
    config = models.vllm_config()
    with logged() as log:
        groups = planner.get_kv_cache_groups(config, models.altay())
    assert lengths(groups) == COMPACT
    assert log.ours() == [], "the engine says it, once"
    staged = planner.get_kv_cache_groups(models.vllm_config(pipeline_stages=2), models.altay())
    assert lengths(staged) == NATIVE, "a worker sees its own stage only"
    with environment(**{LAYOUT: "required"}):
        planner.get_kv_cache_groups(models.vllm_config(pipeline_stages=2), models.altay(8, 27))


@check("planner called inside itself")
def _() -> None:
    unify = planner.unify_kv_cache_spec_page_size
    inner: list[Any] = []
    config = models.vllm_config()

    def unify_and_plan(specs: Any) -> Any:
        inner.append(planner.get_kv_cache_groups(config, models.altay()))
        return unify(specs)

    # The inner call would come here again.
    def unify_once(specs: Any) -> Any:
        with patched(planner, "unify_kv_cache_spec_page_size", unify):
            return unify_and_plan(specs)

    with patched(planner, "unify_kv_cache_spec_page_size", unify_once):
        (result,) = plan(config, models.altay())
    assert inner and all(lengths(groups) == NATIVE for groups in inner), "vLLM is left alone there"
    assert lengths(result) == COMPACT


@check("HiSparse")
def _() -> None:
    needs("hisparse.layout:get_hisparse_kv_cache_groups")
    mla = kv_cache_interface.MLAAttentionSpec(
        block_size=models.BLOCK_SIZE, num_kv_heads=1, head_size=576, dtype=_bfloat16()
    )
    specs = models.model(mla=(8, mla)) | models.altay()
    nested: list[Any] = []
    layout = import_module("vllm.v1.hisparse.layout")

    def lay_out(vllm_config: Any, groups: list[Any]) -> list[Any]:
        # What follows needs a HiSparse connector, and is the same whatever we do.
        nested.append(groups)
        return groups

    config = models.vllm_config()
    config.attention_config.hisparse_config = SimpleNamespace()
    with contextlib.ExitStack() as stack:
        if hasattr(layout, "_lay_out_hisparse_groups"):
            stack.enter_context(patched(layout, "_lay_out_hisparse_groups", lay_out))
        with logged() as log:
            groups = planner.get_kv_cache_groups(config, specs)
        assert lengths(groups) == sorted([8, *NATIVE])
        # No decision about ALTAY was possible, and it is not the engine's plan: only DEBUG.
        assert log.ours() == []
        with environment(**{LAYOUT: "required"}), refused("HiSparse makes the KV cache groups"):
            planner.get_kv_cache_groups(config, specs)


def _bfloat16() -> Any:
    return models.full_attention().dtype


@check("grouping owned by a model or platform")
def _() -> None:
    needs("core.kv_cache_config_builder")
    builders = import_module("vllm.v1.core.kv_cache_config_builder")
    default = planner.DefaultKVCacheConfigBuilder

    class BuildsOnVllm(default):  # type: ignore[misc, valid-type]
        def get_kv_cache_groups(self, vllm_config: Any, specs: Any) -> Any:
            return super().get_kv_cache_groups(vllm_config, specs)[::-1]

    class GroupsAlone(default):  # type: ignore[misc, valid-type]
        def get_kv_cache_groups(self, vllm_config: Any, specs: Any) -> Any:
            alone = [[name] for name in specs]
            return planner.create_kv_cache_group_specs(specs, alone)

    class PlacesTensors(default):  # type: ignore[misc, valid-type]
        pass

    def planned_by(builder: type, **settings: str) -> Any:
        name = "get_kv_cache_config_builder"
        with patched(builders, name, lambda _: builder()), environment(**settings):
            return plan(models.vllm_config(), models.altay())[0]

    assert lengths(planned_by(PlacesTensors)) == COMPACT, "its grouping is vLLM's"
    for builder, expected in ((BuildsOnVllm, NATIVE), (GroupsAlone, [1] * 70)):
        with logged() as log:
            assert lengths(planned_by(builder)) == expected
        one_line(log, "WARNING", f"the platform's {builder.__name__} makes the KV cache groups")
        with refused(f"the platform's {builder.__name__} makes the KV cache groups"):
            planned_by(builder, **{LAYOUT: "required"})

    def own_grouping(vllm_config: Any, specs: Any) -> Any:
        return planner.get_kv_cache_groups(vllm_config, specs)

    config = models.vllm_config()
    config.model_config.supports_kv_cache_grouping = True
    model_class = SimpleNamespace(get_kv_cache_groups=own_grouping)
    config.model_config.registry = SimpleNamespace(resolve_model_cls=lambda *_: (model_class, ""))
    with logged() as log:
        (result,) = plan(config, models.altay())
    assert lengths(result) == NATIVE
    one_line(log, "WARNING", "the model makes the KV cache groups")
    with environment(**{LAYOUT: "required"}), refused("the model makes the KV cache groups"):
        plan(config, models.altay())


# --- the capacity search -----------------------------------------------------------------------


SEARCHED = {
    "qwen3.8-27b-dflash2-radiance": (8, 9),
    "qwen3.8-27b-dflash2-fp8": (8, 9),
    "mimo-v2.5-draft": (9, 7),
    "glm-5.3-flash-dflash2": (11, 6),
    "qwen3.8-flash-next-ple": (12, 7),
}
"""Published layouts that are divided otherwise -> group size and number of groups."""


@check("search on published layouts")
def _() -> None:
    for name, layout in models.LAYOUTS.items():
        if "certified" in layout:
            continue
        native, searched, log = _search(layout)
        expected = layout["native"]
        assert _size_and_groups(native) == (expected["size"], expected["groups"]), name
        wanted = SEARCHED.get(name, _size_and_groups(native))
        assert _size_and_groups(searched) == wanted, (name, _size_and_groups(searched))
        if name not in SEARCHED:
            assert log.ours() == [], log.ours()
            continue
        tokens = [_vllms_tokens(models.layout_config(layout), c) for c in (native, searched)]
        one_line(log, "INFO", "(search)", "{:,} -> {:,} KV cache tokens".format(*tokens))
        assert tokens[1] >= 0.99 * tokens[0]
        if "available_pages" in layout or "available_bytes" in layout:
            assert tokens == [expected["tokens"], layout["best_capacity"]["tokens"]], tokens


@check("search with little memory")
def _() -> None:
    """vLLM refuses to start with fewer blocks than sequences; native has 770, the best one 481."""
    layout = models.LAYOUTS["qwen3.8-27b-dflash2-fp8"]
    native, searched, log = _search(layout, max_num_seqs=600)
    assert native.num_blocks == 770
    assert searched.num_blocks >= 600, searched.num_blocks
    assert [line for line in log.ours() if not line.startswith("INFO")] == []


def _search(layout: dict[str, Any], **settings: int) -> tuple[Any, Any, Log]:
    """The KV cache configs of vLLM and of the search, and what was said about the latter."""
    config, specs = models.layout_config(layout, **settings), models.layout_specs(layout)
    if _marks_drafts():
        target = config.model_config.hf_config.num_hidden_layers
        specs = {
            name: replace(spec, is_draft=i >= target)
            for i, (name, spec) in enumerate(specs.items())
        }
    page = next(iter(specs.values())).page_size_bytes
    memory = layout.get("available_bytes") or layout.get("available_pages", 500_000) * page
    with environment(RADIANCE_KV_GROUP_OPT="0"):
        (native,) = plan(config, specs, memory=memory)
    with logged() as log:
        (searched,) = plan(config, specs, memory=memory)
    return native, searched, log


def _size_and_groups(config: Any) -> tuple[int, int]:
    return max(lengths(config)), len(config.kv_cache_groups)


# --- what is built from the result -------------------------------------------------------------


@check("scheduler and KV cache manager")
def _() -> None:
    config = models.vllm_config(block_size=models.BLOCK_SIZE)
    for mode, expected in (("attention_exact", COMPACT), ("off", NATIVE)):
        with environment(**{LAYOUT: mode}):
            results = plan(config, models.altay())
        scheduled = kv_cache_utils.generate_scheduler_kv_cache_config(results)
        assert lengths(scheduled) == expected
        manager = _manager(config, scheduled)
        free = manager.block_pool.get_num_free_blocks
        at_first = free()
        price = vllm_compat.blocks_per_request(config, scheduled.kv_cache_groups)
        requests = [_request(i, tokens) for i, tokens in enumerate((4096, 1, 1000))]
        for request in requests:
            before = free()
            blocks = manager.allocate_slots(request, request.num_tokens)
            taken = before - free()
            assert blocks is not None and len(blocks.blocks) == len(expected)
            assert taken == sum(
                _blocks_of(g, request.num_tokens) for g in scheduled.kv_cache_groups
            )
            # A request of max_model_len tokens takes what the formula says.
            assert (taken == price) == (request.num_tokens == config.model_config.max_model_len)
        for request in requests:
            manager.free(request)
        assert free() == at_first


def _blocks_of(group: Any, tokens: int) -> int:
    if isinstance(group.kv_cache_spec, kv_cache_interface.MambaSpec):
        return 1
    return -(-tokens // group.kv_cache_spec.block_size)


def _manager(config: Any, kv_cache_config: Any) -> Any:
    from inspect import signature

    from vllm.v1.core.kv_cache_manager import KVCacheManager

    scheduler, hashing = kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, config)
    wanted = dict(
        kv_cache_config=kv_cache_config,
        max_model_len=config.model_config.max_model_len,
        scheduler_block_size=scheduler,
        hash_block_size=hashing,
        max_num_batched_tokens=4096,
        max_in_flight_tokens=4096,
        enable_caching=False,
    )
    known = signature(KVCacheManager).parameters
    return KVCacheManager(**{name: value for name, value in wanted.items() if name in known})


def _request(number: int, tokens: int) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request(
        request_id=str(number),
        prompt_token_ids=list(range(tokens)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
    )


# --- arithmetic --------------------------------------------------------------------------------


def _vllms_tokens(config: Any, kv_cache_config: Any) -> int:
    concurrency = kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, kv_cache_config)
    return int(concurrency * config.model_config.max_model_len)


@check("price formula")
def _() -> None:
    for config, specs in [(models.vllm_config(), models.altay()), *_random_models(30)]:
        with environment(**{LAYOUT: "off"}):
            (result,) = plan(config, specs)
        groups = result.kv_cache_groups
        arguments = [config, groups]
        if has("core.kv_cache_config_builder"):
            arguments.insert(0, planner.DefaultKVCacheConfigBuilder())
        vllms = planner._max_memory_usage_bytes_from_groups(*arguments)
        widest = max(lengths(groups)) * groups[0].kv_cache_spec.page_size_bytes
        assert vllm_compat.blocks_per_request(config, groups) * widest == vllms
        tokens = vllm_compat.capacity_tokens(config, groups, [specs], [MEMORY])
        assert tokens == _vllms_tokens(config, result)


@check("families and forced groups")
def _() -> None:
    """The groups we make at a size are those that vLLM's own code makes at that size."""
    inner = planner._get_kv_cache_groups_uniform_page_size.__wrapped__
    for _config, specs in _random_models(60):
        native = inner(specs)
        families = vllm_compat.recover_families(specs, names(native))
        assert sorted(name for family in families for name in family) == sorted(specs)
        vllms = names(_native_at_size(inner, len(specs))(specs))
        if families != vllms:
            # Groups of one layer do not show which specs vLLM took together. A part of a family
            # is a family as well: its layers can share a group.
            assert max(lengths(native)) == 1
            assert all(any(set(ours) <= set(theirs) for theirs in vllms) for ours in families)
            continue
        for size in range(1, max(map(len, families)) + 1):
            ours = vllm_compat.build_groups(
                planner, specs, vllm_compat.deal_families(families, size)
            )
            expected = _native_at_size(inner, size)(specs)
            assert ours == expected, (size, names(ours), names(expected))


def _native_at_size(inner: Any, size: int) -> Callable[[Any], Any]:
    """A copy of vLLM's function for which every family has ``size`` layers when it is counted."""
    answer = {"min": lambda _: size, "max": lambda _: size}
    quiet = {"logger": logging.getLogger("quiet")}
    quiet["logger"].disabled = True
    return types.FunctionType(
        inner.__code__, {**inner.__globals__, **answer, **quiet}, closure=inner.__closure__
    )


def _random_models(number: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Hybrid models of two to four families whose layers are mixed, always the same ones."""
    generator = random.Random(number)
    kinds: list[Callable[[], Any]] = [
        models.gdn,
        models.full_attention,
        lambda: models.sliding_window(64),
        lambda: models.sliding_window(512),
        # From vLLM 0.27.1 these are of one family with full attention.
        lambda: models.full_attention(sliding_window=512),
    ]
    for _ in range(number):
        chosen = generator.sample(kinds, generator.randint(2, 4))
        specs = models.model(
            **{f"kind{i}": (generator.randint(1, 40), kind()) for i, kind in enumerate(chosen)}
        )
        layers = list(specs)
        generator.shuffle(layers)
        yield models.vllm_config(), {name: specs[name] for name in layers}


@check("table of releases")
def _() -> None:
    """Every row of ``vllm_releases.DIFFERENCES`` says which releases have what it is about."""
    here = _numbers(vllm_compat.version())
    for row in vllm_releases.DIFFERENCES:
        assert row.verified in suite.CHECKS, row
        if row.marker is not None:
            until = row.until is None or here <= _numbers(row.until)
            assert has(row.marker) == (_numbers(row.since) <= here and until), row


def _numbers(release: str) -> list[int]:
    return [int(part) for part in release.split(".")[:3]]


# --- the process -------------------------------------------------------------------------------


def run() -> dict[str, str]:
    said = {}
    for name in suite.CHECKS:
        try:
            CHECKS[name]()
            said[name] = suite.PASSED
        except NotInThisRelease:
            said[name] = suite.NOT_THERE
        except Exception:
            said[name] = traceback.format_exc()
    return said


if __name__ == "__main__":
    assert vllm_compat.version() == sys.argv[1], vllm_compat.version()
    planning.silence_vllm()
    print(json.dumps(run()))
