"""What a decode step costs with more KV cache groups, and what the hook costs in it: nothing.

    python benchmarks/groups.py [--model DIR] [--rounds N] [--steps N] [--batch N ...]

Real engines on the CPU, all alive at once on the same tiny ALTAY checkpoint, take their steps in
turn: whatever else the machine does hits all of them alike, and they stand at the same context
length. One has no hook; the others certify a group size each, of which 16 is vLLM's own layout.
The time is that of a whole engine step: scheduling, block tables, the model, sampling.

The tiny model computes next to nothing, so the share of a step that a group costs is the upper end
of what a real model shows. The time it costs is work of the processor and carries over.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

GROUP_SIZES = (16, 8, 2, 1)
NATIVE = "no hook"
PROMPT_TOKENS = 256
# Until every request is decoding and nothing is done for the first time any more.
WARM_UP_STEPS = 30


# --- one engine ----------------------------------------------------------------------------------


def serve(model: str, max_model_len: int, max_num_seqs: int) -> None:
    """Answer each line ``BATCH STEPS`` on stdin with the seconds of that many decode steps."""
    # Answers go where stdout led; what vLLM prints goes to the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM

    llm = LLM(
        model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        mamba_ssm_cache_dtype="float32",
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=False,
        seed=0,
    )
    engine = llm.llm_engine
    planned = engine.engine_core.engine_core.scheduler.kv_cache_config
    _answer(answers, {"groups": len(planned.kv_cache_groups), "blocks": planned.num_blocks})
    running = 0
    for line in sys.stdin:
        batch, steps = map(int, line.split())
        if batch != running:
            engine.abort_request(_names(running))
            _start(engine, batch, max_model_len)
            running = batch
        _answer(answers, [_time_of_step(engine) for _ in range(steps)])


def _names(batch: int) -> list[str]:
    return [f"{i} of {batch}" for i in range(batch)]


def _start(engine: Any, batch: int, max_model_len: int) -> None:
    """Have ``batch`` requests decode."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=max_model_len, ignore_eos=True, detokenize=False
    )
    for i, name in enumerate(_names(batch)):
        tokens = [2 + (i + position * 7) % 500 for position in range(PROMPT_TOKENS)]
        engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
    for _ in range(WARM_UP_STEPS):
        engine.step()


def _time_of_step(engine: Any) -> float:
    started = time.perf_counter()
    outputs = engine.step()
    took = time.perf_counter() - started
    if not engine.has_unfinished_requests():
        raise RuntimeError(f"the requests ended: {outputs}")
    return took


def _answer(answers: TextIO, value: Any) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


# --- all engines ---------------------------------------------------------------------------------


class Engine:
    """An engine in a process of its own."""

    def __init__(self, name: str, arguments: argparse.Namespace, group_size: int | None) -> None:
        self.name = name
        variables = {
            k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ALTAY_", "ZENIT_"))
        }
        variables |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if group_size is not None:
            variables["PYTHONPATH"] = str(ROOT)
            variables["ZENIT_ALTAY_KV_LAYOUT"] = "required"
            variables["ALTAY_KVFIX_FAMILY_COUNTS"] = f"16,54:{group_size}"
        self._log = arguments.model.with_name(f"groups-{group_size or 'native'}.log").open("w")
        command = [sys.executable, __file__, "--serve", "--model", str(arguments.model)]
        command += ["--batch", *map(str, arguments.batch), "--rounds", str(arguments.rounds)]
        command += ["--steps", str(arguments.steps)]
        self._process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        planned = self._read()
        self.groups, self.blocks = planned["groups"], planned["blocks"]

    def decode(self, batch: int, steps: int) -> list[float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batch} {steps}\n")
        self._process.stdin.flush()
        times: list[float] = self._read()
        return times

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine with {self.name} ended; see {self._log.name}")
        return json.loads(line)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


@contextlib.contextmanager
def engines(arguments: argparse.Namespace) -> Iterator[list[Engine]]:
    running: list[Engine] = []
    try:
        for size in (None, *GROUP_SIZES):
            name = NATIVE if size is None else f"groups of {size}"
            print(f"starting the engine with {name} ...", file=sys.stderr, flush=True)
            running.append(Engine(name, arguments, size))
        yield running
    finally:
        for engine in running:
            engine.end()


def measure(running: list[Engine], batch: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step of every engine; each round starts with another one."""
    took: dict[str, list[float]] = {engine.name: [] for engine in running}
    for number in range(rounds):
        first = number % len(running)
        for engine in running[first:] + running[:first]:
            # The processor's caches hold another engine's data at first.
            took[engine.name] += engine.decode(batch, steps)[1:]
    return took


def report(running: list[Engine], took: dict[str, list[float]], batch: int) -> None:
    medians = {name: statistics.median(times) for name, times in took.items()}
    native = running[0]
    print(f"\n{batch} requests decoding, {len(took[native.name])} steps of each engine")
    print(f"{'':<16}{'groups':>8}{'ms/step':>10}{'ratio':>8}{'us per group':>14}{'share':>8}")
    for engine in running:
        median = medians[engine.name]
        row = f"{engine.name:<16}{engine.groups:>8}{median * 1e3:10.2f}"
        row += f"{median / medians[native.name]:8.3f}"
        base = medians[running[1].name]
        more = engine.groups - native.groups
        if more:
            row += f"{(median - base) / more * 1e6:14.1f}{(median - base) / more / base:8.2%}"
        print(row)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time decode steps by the number of groups.")
    parser.add_argument("--model", type=Path, default=ROOT / ".cache" / "groups" / "model")
    parser.add_argument("--rounds", type=int, default=20, help="turns of every engine")
    parser.add_argument("--steps", type=int, default=16, help="decode steps in a turn")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="requests at once")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    needed = PROMPT_TOKENS + WARM_UP_STEPS + arguments.rounds * arguments.steps + 1
    max_model_len = -(-needed // 1024) * 1024
    if arguments.serve:
        serve(str(arguments.model), max_model_len, max(arguments.batch))
        return

    from startup import machine
    from tiny_models import build_checkpoint

    arguments.model.parent.mkdir(parents=True, exist_ok=True)
    build_checkpoint(arguments.model)
    with engines(arguments) as running:
        print(machine())
        print("Medians. The ratio is to the engine without the hook; what a group costs is counted")
        print("from the hooked engine with vLLM's own layout.")
        for batch in arguments.batch:
            took = measure(running, batch, arguments.rounds, arguments.steps)
            report(running, took, batch)


if __name__ == "__main__":
    main()
