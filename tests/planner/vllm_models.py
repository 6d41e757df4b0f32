"""Real KVCacheSpec objects and a light stand-in for VllmConfig, for the real planner.

For every supported vLLM: the release suite runs the planners of all of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

try:
    from vllm.v1.kv_cache_layout import KVCacheLayout
except ImportError:  # the tensors' layout is no setting before vLLM 0.29
    KVCacheLayout = None

BLOCK_SIZE = 144
KV_HEADS, HEAD_SIZE = 2, 256
PAGE = BLOCK_SIZE * KV_HEADS * 2 * HEAD_SIZE * 2
"""Bytes of an attention page: tokens x heads x (key and value) x head size x bfloat16."""

ALTAY = "LomonosovZenitAltayForConditionalGeneration"


def full_attention(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**_attention(), **changes)


def sliding_window(window: int = 64) -> SlidingWindowSpec:
    return SlidingWindowSpec(**_attention(), sliding_window=window)


def gdn() -> MambaSpec:
    return MambaSpec(
        block_size=4096,
        shapes=((3, 512), (4, 128, 128)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=max(PAGE, 4 * 128 * 128 * 4 + 3 * 512 * 2),
    )


def hidden_states() -> KVCacheSpec:
    return kv_cache_interface.HiddenStateCacheSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1024, dtype=torch.bfloat16
    )


def _attention() -> dict[str, Any]:
    return dict(
        block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16
    )


def model(**families: tuple[int, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Layer name -> spec; ``model(gdn=(54, gdn()), full=(16, full_attention()))``."""
    return {
        f"{family}.{i}": spec for family, (count, spec) in families.items() for i in range(count)
    }


def altay(full: int = 16, gdn_layers: int = 54) -> dict[str, KVCacheSpec]:
    return model(gdn=(gdn_layers, gdn()), full=(full, full_attention()))


def vllm_config(
    *,
    architecture: str = ALTAY,
    max_model_len: int = 4096,
    disable_hybrid: bool = False,
    pipeline_stages: int = 1,
    kv_connector: Any = None,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 16,
    **cache: Any,
) -> Any:
    """What the planner reads of a VllmConfig."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            architecture="Qwen3NextForCausalLM",
            architectures=["Qwen3NextForCausalLM"],
            hf_config=SimpleNamespace(architectures=[architecture], model_type="test"),
            max_model_len=max_model_len,
            original_max_model_len=max_model_len,
            supports_kv_cache_grouping=False,
        ),
        cache_config=SimpleNamespace(
            **{
                "mamba_cache_mode": "none",
                "num_gpu_blocks_override": None,
                "prefix_cache_retention_interval": None,
                "get_resolved_kv_cache_layout": lambda: KVCacheLayout.LBNHC,
                "enable_prefix_caching": False,
            }
            | cache
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=pipeline_stages,
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=disable_hybrid,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        kv_transfer_config=kv_connector,
        device_config=SimpleNamespace(device_type="cpu"),
        max_in_flight_tokens=max_num_batched_tokens,
        num_prefill_lookahead_tokens=0,
    )


def lengths(groups: Any) -> list[int]:
    return [len(group.layer_names) for group in groups]


def layer_names(groups: Any) -> list[list[str]]:
    return [list(group.layer_names) for group in groups]


def split(specs: dict[str, KVCacheSpec], stages: int) -> list[dict[str, KVCacheSpec]]:
    """One worker per pipeline stage: each family's layers in ``stages`` consecutive parts."""
    workers: list[dict[str, KVCacheSpec]] = [{} for _ in range(stages)]
    families: dict[str, list[str]] = {}
    for name in specs:
        families.setdefault(name.split(".")[0], []).append(name)
    for names in families.values():
        for i, name in enumerate(names):
            workers[i * stages // len(names)][name] = specs[name]
    return workers


LAYOUTS = {
    layout["name"]: layout
    for layout in json.loads(
        (Path(__file__).parents[2] / "benchmarks" / "layouts.json").read_text()
    )["layouts"]
}
"""Layer counts of real models, with published figures."""


def layout_specs(layout: dict[str, Any]) -> dict[str, KVCacheSpec]:
    """The cache specs of a layout in LAYOUTS: the target's layers first, then the drafter's.

    All pages have the size of an attention page, as the file's notes say.
    """
    block, heads, head_size = layout["block_size"], layout.get("num_kv_heads", 2), 256
    dtype = torch.uint8 if layout.get("kv_bytes") == 1 else torch.bfloat16
    page = block * heads * 2 * head_size * dtype.itemsize

    def spec(family: dict[str, Any]) -> KVCacheSpec:
        if family["kind"] == "mamba":
            return MambaSpec(
                block_size=block,
                shapes=((16 * family.get("state_scale", 1),),),
                dtypes=(torch.float32,),
                page_size_padded=page,
                mamba_cache_mode=layout["mamba_cache_mode"],
                num_speculative_blocks=layout["num_speculative_blocks"],
            )
        own_heads = family.get("num_kv_heads", heads)
        attention = dict(
            block_size=block,
            num_kv_heads=own_heads,
            head_size=heads * head_size // own_heads,
            dtype=dtype,
        )
        if family["kind"] == "full_attention":
            return FullAttentionSpec(**attention)
        return SlidingWindowSpec(**attention, sliding_window=family["window"])

    targets, drafters = [], []
    for family in layout["families"]:
        drafted = family.get("draft_layers", 0)
        targets += [spec(family)] * (family["layers"] - drafted)
        drafters += [spec(family)] * drafted
    return {f"model.layers.{i}.attn": spec for i, spec in enumerate(targets + drafters)}


def layout_config(layout: dict[str, Any], **changes: Any) -> Any:
    config = vllm_config(
        architecture="SomeHybridForCausalLM",
        max_model_len=layout["max_model_len"],
        max_num_batched_tokens=layout["max_num_batched_tokens"],
        mamba_cache_mode=layout["mamba_cache_mode"],
        **changes,
    )
    drafted = sum(family.get("draft_layers", 0) for family in layout["families"])
    layers = sum(family["layers"] for family in layout["families"])
    config.model_config.hf_config.num_hidden_layers = layers - drafted
    if drafted:
        config.speculative_config = speculative()
    return config


def speculative(**changes: Any) -> Any:
    """What the planner reads of a SpeculativeConfig; an EAGLE-like drafter."""
    return SimpleNamespace(
        **{
            "method": "dflash",
            "num_speculative_tokens": 7,
            "use_eagle": lambda: False,
            "use_eagle_block_drop": lambda: False,
            "use_multi_module_mtp": lambda: False,
        }
        | changes
    )
