"""Group-size policies on real models' layer counts: capacity against native and the bound.

    python benchmarks/policies.py [--plot FILE]

For each layout in layouts.json and each policy: what the KV cache holds at the group size it picks,
as a multiple of vLLM's own layout, and the number of groups. The bound is what a layout without any
padding would hold. Needs no vLLM for that; where vLLM is installed, its planning is timed as well.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "planner"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from altay_kvfix.layout import make_layout_plan, rule_of_thumb
from altay_kvfix.search import (
    Candidate,
    Family,
    Problem,
    draft_spread,
    evaluate,
    lower_bound,
    search,
)

LAYOUTS = Path(__file__).with_name("layouts.json")


def blocks_per_request(family: dict[str, Any], layout: dict[str, Any]) -> int:
    """vLLM's price of one group, in blocks, for the three kinds of cache."""
    length, block = layout["max_model_len"], layout["block_size"]
    if family["kind"] == "mamba":
        return int(2 + layout["num_speculative_blocks"])  # mamba_cache_mode "align"
    if family["kind"] == "full_attention":
        return math.ceil(length / block)
    kept = min(family["window"] - 1 + layout["max_num_batched_tokens"], length)
    return math.ceil(kept / block) + 1


def problem_of(layout: dict[str, Any]) -> Problem:
    def family(f: dict[str, Any]) -> Family:
        layers, drafted = f["layers"], f.get("draft_layers", 0)
        return Family(
            layers,
            blocks_per_request(f, layout),
            is_attention=f["kind"] != "mamba",
            draft_layers=tuple(range(layers - drafted, layers)),
        )

    return Problem(tuple(map(family, layout["families"])), rule_of_thumb(counts_of(layout)))


def counts_of(layout: dict[str, Any]) -> list[int]:
    return [family["layers"] for family in layout["families"]]


# --- policies: layout -> group size, each from its rule -----------------------------------------


def least_padding(counts: Sequence[int]) -> int:
    """The fewest padding slots, the larger size on a tie."""
    return min(range(1, max(counts) + 1), key=lambda g: (padding(counts, g), -g))


def greatest_common_divisor(counts: Sequence[int]) -> int:
    return math.gcd(*counts)


def padding_and_groups(counts: Sequence[int]) -> int:
    """Padding slots plus groups, weighed alike."""
    return min(
        range(1, max(counts) + 1),
        key=lambda g: padding(counts, g) + make_layout_plan(counts, g).num_groups,
    )


def padding(counts: Sequence[int], size: int) -> int:
    return make_layout_plan(counts, size).padding_slots


def largest_divisor(layout: dict[str, Any]) -> int:
    """The largest proper divisor of the number of full-attention layers."""
    full = sum(f["layers"] for f in layout["families"] if f["kind"] == "full_attention")
    return max(d for d in range(1, full) if full % d == 0) if full > 1 else 1


def ours(layout: dict[str, Any], group_cost: float) -> int:
    return search(problem_of(layout), group_cost=group_cost).chosen.size


POLICIES: dict[str, Callable[[dict[str, Any]], int]] = {
    "vLLM": lambda layout: rule_of_thumb(counts_of(layout)),
    "least padding": lambda layout: least_padding(counts_of(layout)),
    "gcd": lambda layout: greatest_common_divisor(counts_of(layout)),
    "padding + groups": lambda layout: padding_and_groups(counts_of(layout)),
    "largest divisor": largest_divisor,
    "ours, group cost 0": lambda layout: ours(layout, 0),
    "ours": lambda layout: ours(layout, 0.005),
}


@dataclass(frozen=True)
class Score:
    """What every policy makes of one model."""

    model: str
    picks: dict[str, Candidate]
    refused: frozenset[str]
    """Policies whose size spreads the drafter's layers: vLLM's V1 model runner does not start."""
    bound: float
    """Capacity of a layout without padding, as a multiple of vLLM's own."""


def score(layout: dict[str, Any]) -> Score:
    problem = problem_of(layout)
    picks = {name: evaluate(problem, policy(layout)) for name, policy in POLICIES.items()}
    native = picks["vLLM"][1]
    return Score(
        layout["name"],
        {name: candidate for name, (candidate, _) in picks.items()},
        frozenset(name for name, (c, _) in picks.items() if draft_spread(problem, c, native)),
        native.cost / lower_bound(problem.families),
    )


def table(scores: list[Score]) -> str:
    rows = [["model", *POLICIES, "bound"], ["---"] * (len(POLICIES) + 2)]
    for entry in scores:
        cells = [
            f"{c.capacity:.3f} / {c.groups}{' !' if name in entry.refused else ''}"
            for name, c in entry.picks.items()
        ]
        rows.append([entry.model, *cells, f"{entry.bound:.3f}"])
    summary = {
        "geometric mean": lambda name: f"{geometric_mean(capacities(scores, name)):.3f}",
        "worst": lambda name: f"{min(capacities(scores, name)):.3f}",
        "most groups": lambda name: str(max(entry.picks[name].groups for entry in scores)),
        "refused at start": lambda name: str(sum(name in entry.refused for entry in scores)),
    }
    for label, figure in summary.items():
        bound = geometric_mean([entry.bound for entry in scores])
        last = f"{bound:.3f}" if label == "geometric mean" else ""
        rows.append([label, *map(figure, POLICIES), last])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def capacities(scores: list[Score], policy: str) -> list[float]:
    return [entry.picks[policy].capacity for entry in scores]


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def plot(scores: list[Score], file: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (capacity, groups) = pyplot.subplots(
        1, 2, figsize=(12, 0.42 * len(scores) + 1.8), sharey=True, layout="constrained"
    )
    rows = range(len(scores))
    for name, marker in zip(POLICIES, "|os^vxD", strict=True):
        style = {
            "marker": marker,
            "s": 90 if name == "ours" else 45,
            "label": name,
            "color": "black" if name == "vLLM" else None,
            "facecolors": None if marker in "|x" else ("tab:red" if name == "ours" else "none"),
            "edgecolors": None if marker in "|x" else ("tab:red" if name == "ours" else "tab:blue"),
        }
        capacity.scatter(capacities(scores, name), rows, **style)
        groups.scatter([entry.picks[name].groups for entry in scores], rows, **style)
    capacity.axvline(1, color="grey", linewidth=0.5)
    capacity.set_yticks(rows, [entry.model for entry in scores])
    capacity.invert_yaxis()
    capacity.set_xlabel("KV cache tokens, as a multiple of vLLM's own layout")
    groups.set_xscale("log")
    groups.set_xticks([2, 5, 10, 20, 50], ["2", "5", "10", "20", "50"])
    groups.minorticks_off()
    groups.set_xlabel("KV cache groups: the time of every step grows with them")
    figure.legend(*capacity.get_legend_handles_labels(), loc="outside lower center", ncols=7)
    figure.savefig(file)


COUNTS = (80, 50, 30, 20, 12, 8)
"""A model of 200 layers in 6 families, to time the search on."""


def fastest(function: Callable[[], object], repetitions: int = 50) -> float:
    """Seconds of the fastest call: the others were disturbed by something else."""
    best = math.inf
    for _ in range(repetitions):
        started = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - started)
    return best


def search_milliseconds() -> float:
    problem = Problem(tuple(Family(n, 3 * n + 1) for n in COUNTS), rule_of_thumb(COUNTS))
    return 1e3 * fastest(lambda: search(problem))


def planning_milliseconds() -> tuple[float, float] | None:
    """A whole get_kv_cache_groups of that model, native and with the hook; None without vLLM."""
    if importlib.util.find_spec("vllm") is None:
        return None
    from altay_kvfix import install_altay72_compact_kv_layout

    install_altay72_compact_kv_layout()
    from vllm.v1.core import kv_cache_utils as planner
    from vllm_models import full_attention, sliding_window, vllm_config

    logging.getLogger(planner.__name__).setLevel(logging.ERROR)
    kinds = [full_attention()] + [sliding_window(64 * i) for i in range(1, len(COUNTS))]
    specs = {f"{f}.{i}": kinds[f] for f, n in enumerate(COUNTS) for i in range(n)}
    config = vllm_config(architecture="SomeHybridForCausalLM")
    native = planner.get_kv_cache_groups.__wrapped__
    return (
        1e3 * fastest(lambda: native(config, specs)),
        1e3 * fastest(lambda: planner.get_kv_cache_groups(config, specs)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plot", metavar="FILE", help="also draw it, as svg or png (matplotlib)")
    arguments = parser.parse_args()
    scores = [score(layout) for layout in json.loads(LAYOUTS.read_text())["layouts"]]
    print("Capacity as a multiple of vLLM's own / KV cache groups; !: refused at start\n")
    print(table(scores))
    where = f"Python {platform.python_version()}, {platform.machine()}"
    print(f"\nThe search, {sum(COUNTS)} layers in {len(COUNTS)} families: ", end="")
    print(f"{search_milliseconds():.2f} ms ({where})")
    planning = planning_milliseconds()
    if planning:
        native, hooked = planning
        print(
            f"vLLM's planning of the same: {native:.2f} ms natively, {hooked:.2f} ms with the ",
            end="",
        )
        print(f"search and the second run ({hooked / native:.1f} times)")
    if arguments.plot:
        plot(scores, arguments.plot)


if __name__ == "__main__":
    main()
