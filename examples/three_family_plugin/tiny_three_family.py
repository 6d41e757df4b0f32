"""A tiny model with three KV cache families: full attention, sliding window and GDN.

Qwen3-Next knows no sliding windows. This class gives one to the attention layers that
`sliding_window_layers` in config.json lists; `examples/tiny_models.py --sliding` makes such
checkpoints.
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.qwen3_next import Qwen3NextAttention, Qwen3NextForCausalLM


class TinyThreeFamilyForCausalLM(Qwen3NextForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for index in self.config.sliding_window_layers:
            layer = self.model.layers[index]
            # With pipeline parallelism the layers of the other stages are placeholders.
            attention = getattr(layer, "self_attn", None)
            if attention is not None:
                _set_sliding_window(attention, self.config.sliding_window, vllm_config)


def _set_sliding_window(
    attention: Qwen3NextAttention, window: int, vllm_config: VllmConfig
) -> None:
    """Replace the layer's attention, so that its backend represents `window` tokens in its own way.

    It holds no weights, so nothing is lost.
    """
    old = attention.attn
    # The new one registers itself under the same name, which must be free.
    del vllm_config.compilation_config.static_forward_context[old.layer_name]
    attention.attn = Attention(
        attention.num_heads,
        attention.head_dim,
        attention.scaling,
        num_kv_heads=attention.num_kv_heads,
        cache_config=vllm_config.cache_config,
        quant_config=vllm_config.quant_config,
        per_layer_sliding_window=window,
        prefix=old.layer_name,
    )
