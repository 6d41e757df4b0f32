"""Start the real vLLM engine once on a tiny checkpoint, ask it something, write down what came out.

    python examples/engine_run.py MODEL_DIRECTORY --out RESULT.json [options]

Whether altay-kvfix takes part is decided by the environment alone, exactly as in production. The
prompts are random tokens from a fixed seed, so two runs with the same options ask the same. The
result holds only what the main process itself knows; `engine_process.py` reads the rest from the
log and the trace.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

# Lines that begin like this tell a watcher what the run is doing.
PROGRESS_PREFIX = "engine_run: "

_PROMPT_SEED = 20
# Of the tiny checkpoints; see tiny_models.py.
_VOCABULARY_SIZE = 512


def make_prompts(requests: int, longest: int) -> list[list[int]]:
    """Random prompts of `longest` tokens and, evenly spaced, down to about half of that."""
    generator = random.Random(_PROMPT_SEED)
    lengths = (longest - index * longest // (2 * requests) for index in range(requests))
    return [[generator.randrange(2, _VOCABULARY_SIZE) for _ in range(n)] for n in lengths]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    _say("importing vLLM")
    import torch
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    _say("starting the engine")
    started = time.monotonic()
    llm = LLM(
        **{
            "model": arguments.model,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "bfloat16",
            "mamba_ssm_cache_dtype": "float32",
            "max_model_len": arguments.max_model_len,
            "max_num_seqs": arguments.max_num_seqs,
            "enable_prefix_caching": arguments.prefix_caching,
            "num_gpu_blocks_override": arguments.blocks,
            # Without them there are no counters of cache hits and preemptions.
            "disable_log_stats": False,
            **arguments.llm_arguments,
        }
    )
    ready = time.monotonic()

    prompts = [
        {"prompt_token_ids": p} for p in make_prompts(arguments.requests, arguments.prompt_tokens)
    ]
    sampling = SamplingParams(
        temperature=0, max_tokens=arguments.max_tokens, ignore_eos=True, detokenize=False
    )
    rounds = []
    for number in range(1, arguments.rounds + 1):
        _say(f"answering {len(prompts)} requests, round {number} of {arguments.rounds}")
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        rounds.append(
            [
                {
                    "prompt_tokens": len(answer.prompt_token_ids),
                    "cached_tokens": answer.num_cached_tokens,
                    "token_ids": list(answer.outputs[0].token_ids),
                    "finish_reason": answer.outputs[0].finish_reason,
                }
                for answer in answers
            ]
        )
    answered = time.monotonic()

    counters = {
        metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")
    }
    cache = llm.llm_engine.vllm_config.cache_config
    return {
        "vllm_version": vllm.__version__,
        "torch_version": torch.__version__,
        "device": current_platform.device_type,
        "num_gpu_blocks": cache.num_gpu_blocks,
        "block_size": cache.block_size,
        "kv_cache_tokens": getattr(cache, "kv_cache_size_tokens", None),
        "rounds": rounds,
        "prefix_cache_queried_tokens": counters.get("vllm:prefix_cache_queries"),
        "prefix_cache_hit_tokens": counters.get("vllm:prefix_cache_hits"),
        "preemptions": counters.get("vllm:num_preemptions"),
        "start_seconds": ready - started,
        "answer_seconds": answered - ready,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Start the engine once and record its answers.")
    parser.add_argument("model", help="directory of the checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write the result to")
    parser.add_argument("--max-model-len", type=int, default=4096, help="tokens")
    parser.add_argument("--max-num-seqs", type=int, default=1)
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--blocks", type=int, help="blocks in the pool, whatever the memory allows")
    parser.add_argument("--requests", type=int, default=4, help="requests per round")
    parser.add_argument("--prompt-tokens", type=int, default=400, help="of the longest prompt")
    parser.add_argument("--max-tokens", type=int, default=16, help="length of every answer")
    parser.add_argument("--rounds", type=int, default=1, help="how often the same is asked")
    parser.add_argument(
        "--llm-arguments", type=json.loads, default={}, help="JSON object: more arguments for LLM()"
    )
    arguments = parser.parse_args()
    result = run(arguments)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    _say("done")


def _say(what: str) -> None:
    print(PROGRESS_PREFIX + what, flush=True)


# vLLM starts its processes by spawning, which imports this module once more in each.
if __name__ == "__main__":
    main()
