"""The planner's functions, called by each other as vLLM's are, grouping by vLLM's rule."""

from dataclasses import dataclass
from types import SimpleNamespace


@dataclass(frozen=True)
class Spec:
    kind: str
    block_size: int = 16
    page_size_bytes: int = 65536

    def max_memory_usage_bytes(self, vllm_config):
        return self.page_size_bytes * (256 if self.kind == "full" else 1)


@dataclass
class Group:
    layer_names: list
    kv_cache_spec: Spec


def create_kv_cache_group_specs(kv_cache_spec, grouped_layer_names):
    return [Group(list(names), kv_cache_spec[names[0]]) for names in grouped_layer_names]


def _get_kv_cache_groups_uniform_page_size(kv_cache_spec):
    families = {}
    for name, spec in kv_cache_spec.items():
        families.setdefault(spec, []).append(name)
    shortest = min(map(len, families.values()))
    longest = max(map(len, families.values()))
    size = longest if longest < shortest * 1.5 else shortest
    counts = {spec: -(-len(names) // size) for spec, names in families.items()}
    dealt = [families[spec][i :: counts[spec]] for spec in families for i in range(counts[spec])]
    return create_kv_cache_group_specs(kv_cache_spec, dealt)


def get_kv_cache_groups(vllm_config, kv_cache_spec):
    return _get_kv_cache_groups_uniform_page_size(kv_cache_spec)


def get_kv_cache_configs(vllm_config, kv_cache_specs, available_memory):
    groups = get_kv_cache_groups(vllm_config, kv_cache_specs[0])
    return [SimpleNamespace(kv_cache_groups=groups) for _ in kv_cache_specs]
