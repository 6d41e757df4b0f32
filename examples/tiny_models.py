"""Tiny hybrid checkpoints with the layer structure of the real ones.

The KV cache planner looks at the kinds and the number of layers, not at their width. A checkpoint
with the 54 GDN and 16 full-attention layers of ALTAY, but a hidden size of 64, is therefore planned
exactly like ALTAY itself and runs on a laptop's CPU. The weights are random and nothing is
downloaded.

    python examples/tiny_models.py DIRECTORY [--full 16] [--gdn 54] [--sliding 0] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ALTAY_ARCHITECTURE = "LomonosovZenitAltayForConditionalGeneration"
THREE_FAMILY_ARCHITECTURE = "TinyThreeFamilyForCausalLM"

VOCABULARY_SIZE = 512
SLIDING_WINDOW_TOKENS = 64

_RECIPE_FILE = "tiny_model_recipe.json"
# Counted up whenever the same parameters would give other files than before.
_RECIPE_VERSION = 1


def build_checkpoint(
    directory: str | os.PathLike[str],
    *,
    full: int = 16,
    gdn: int = 54,
    sliding: int = 0,
    architectures: Sequence[str] | None = None,
    stages: int = 1,
    seed: int = 0,
) -> Path:
    """Make a checkpoint with `gdn` GDN, `full` full and `sliding` sliding-window layers.

    It can be run in `stages` pipeline stages.

    The first name in `architectures` that vLLM knows is the class it runs; by default that is
    Qwen3-Next, while the config still names ALTAY. With sliding-window layers it is the class in
    `examples/three_family_plugin`, which has to be on PYTHONPATH then.

    A checkpoint that is there already and was made with the same parameters is left alone; any
    other one is replaced. Returns the directory, which is complete or not there at all.
    """
    if architectures is None:
        runnable = THREE_FAMILY_ARCHITECTURE if sliding else "Qwen3NextForCausalLM"
        architectures = (ALTAY_ARCHITECTURE, runnable)
    recipe = {
        "version": _RECIPE_VERSION,
        "full": full,
        "gdn": gdn,
        "sliding": sliding,
        "architectures": list(architectures),
        "stages": stages,
        "seed": seed,
    }
    target = Path(directory).absolute()
    if _recipe_of(target) == recipe:
        return target
    if target.exists() and any(target.iterdir()) and _recipe_of(target) is None:
        raise FileExistsError(f"{target} holds something else than a tiny checkpoint")

    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the rename below stays within one file system.
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _save_model(draft, full, gdn, sliding, list(architectures), stages, seed)
        _save_tokenizer(draft)
        (draft / _RECIPE_FILE).write_text(json.dumps(recipe, indent=2) + "\n")
        draft.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def spread(chosen: int, total: int) -> list[bool]:
    """Mark `chosen` of `total` positions, as evenly as possible and the last one among them."""
    return [(i + 1) * chosen // total > i * chosen // total for i in range(total)]


def _recipe_of(directory: Path) -> Any:
    """What the checkpoint in `directory` was made with; None when there is none."""
    try:
        return json.loads((directory / _RECIPE_FILE).read_text())
    except (OSError, ValueError):
        return None


def _save_model(
    directory: Path,
    full: int,
    gdn: int,
    sliding: int,
    architectures: list[str],
    stages: int,
    seed: int,
) -> None:
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    is_attention = spread(full + sliding, full + sliding + gdn)
    attention_layers = [index for index, attention in enumerate(is_attention) if attention]
    has_window = spread(sliding, len(attention_layers))

    config = Qwen3NextConfig(
        layer_types=["full_attention" if a else "linear_attention" for a in is_attention],
        num_hidden_layers=len(is_attention),
        vocab_size=VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=128,
        max_position_embeddings=32768,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        # The only head size that vLLM's GDN kernel for CPUs accepts.
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        # vLLM's Qwen3-Next insists on a mixture-of-experts layer in every stage; one is enough.
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        mlp_only_layers=sorted(
            set(range(len(is_attention)))
            - {stage * len(is_attention) // stages for stage in range(stages)}
        ),
        # Wide enough for the greedy answer to depend on every token before it.
        initializer_range=0.25,
        dtype="bfloat16",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3NextForCausalLM(config).to(torch.bfloat16)
        # Drawn the usual way, the recurrent state forgets within a few tokens, and a mixed-up
        # state would not show in the answers.
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.data.uniform_(0.001, 0.1).log_()
    model.save_pretrained(directory)

    # save_pretrained() writes the class that saved, and knows no sliding windows for this model.
    config_file = directory / "config.json"
    content = json.loads(config_file.read_text())
    content["architectures"] = architectures
    if sliding:
        content["sliding_window"] = SLIDING_WINDOW_TOKENS
        content["sliding_window_layers"] = [
            layer for layer, window in zip(attention_layers, has_window, strict=True) if window
        ]
    config_file.write_text(json.dumps(content, indent=2) + "\n")


def _save_tokenizer(directory: Path) -> None:
    """One word per token: `<unk>`, `<eos>`, and `w2` to `w511`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<eos>", *(f"w{token}" for token in range(2, VOCABULARY_SIZE))]
    tokenizer = Tokenizer(
        WordLevel({word: token for token, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>"
    ).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build a tiny hybrid checkpoint.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--full", type=int, default=16, help="full-attention layers")
    parser.add_argument("--gdn", type=int, default=54, help="GDN (linear attention) layers")
    parser.add_argument("--sliding", type=int, default=0, help="sliding-window attention layers")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    arguments = parser.parse_args()
    print(build_checkpoint(**vars(arguments)))


if __name__ == "__main__":
    main()
