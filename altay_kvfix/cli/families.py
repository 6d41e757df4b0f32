"""``plan --family``: a model given by its families alone, without vLLM and without a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..layout import rule_of_thumb
from ..planner import Situation, decide
from ..search import Family, Problem
from ..settings import Settings
from .common import WRONG_INPUT, Failure
from .table import PlanTable, make_table

KINDS = {
    "full": "full attention",
    "sliding": "sliding window",
    "mamba": "mamba",
    "gdn": "gdn",
}
SYNTAX = (
    f"KIND:LAYERS[:OPTION=N...] with KIND one of {', '.join(KINDS)}; options: window (tokens, "
    "for sliding), blocks (that a request takes from one group, instead of the derived number), "
    "draft (how many of the layers belong to the drafter)"
)


@dataclass(frozen=True)
class GivenFamily:
    kind: str
    layers: int
    window: int | None = None
    blocks: int | None = None
    draft: int = 0


@dataclass(frozen=True)
class Shapes:
    """What the prices are derived from."""

    max_model_len: int
    block_size: int
    """Tokens in a block of an attention group."""
    max_num_batched_tokens: int
    """Tokens of one step, which a sliding window holds in addition."""
    speculative_tokens: int
    """Drafted in one step; a recurrent state is kept for each."""
    prefix_caching: bool
    """vLLM keeps two recurrent states of a request then, instead of one."""
    page_bytes: int
    """Bytes of one layer's part of a block."""


def parse_family(text: str) -> GivenFamily:
    """``sliding:5:window=2048:draft=5``.

    Raises:
        Failure: names what is wrong and what is allowed.
    """
    try:
        kind, layers, *options = text.split(":")
        values = {name: _positive(value) for name, _, value in (o.partition("=") for o in options)}
        family = GivenFamily(kind, _positive(layers), **values)
        if kind not in KINDS or (kind == "sliding") != (family.window is not None):
            raise ValueError
        if family.draft > family.layers:
            raise ValueError
    except (TypeError, ValueError) as error:
        raise Failure(f"--family {text!r} is not valid; allowed: {SYNTAX}", WRONG_INPUT) from error
    return family


def plan_families(
    families: Sequence[GivenFamily],
    shapes: Shapes,
    settings: Settings,
    kv_memory: int | None,
    max_num_seqs: int,
) -> PlanTable:
    """The decision for a model of ``families``, as vLLM 0.32 would price them.

    Raises:
        Failure: fewer than two families.
    """
    if len(families) < 2:
        raise Failure("a hybrid model has two families or more: give --family twice", WRONG_INPUT)
    counts = tuple(family.layers for family in families)

    def problem(tokens: int) -> Problem:
        return Problem(
            tuple(_priced(family, shapes, tokens) for family in families),
            native_size=rule_of_thumb(counts),
            pages=kv_memory // shapes.page_bytes if kv_memory is not None else None,
            max_num_seqs=max_num_seqs,
        )

    situation = Situation(
        is_altay=False,
        family_counts=counts,
        max_model_len=shapes.max_model_len,
        problem=problem,
    )
    decision = decide(situation, settings)
    tokens = min(settings.plan_tokens or shapes.max_model_len, shapes.max_model_len)
    return make_table(
        decision,
        settings,
        problem(tokens),
        kinds=[_kind(family) for family in families],
        max_model_len=shapes.max_model_len,
        request_tokens=tokens,
        block_size=shapes.block_size,
        page_bytes=shapes.page_bytes,
    )


def _priced(family: GivenFamily, shapes: Shapes, tokens: int) -> Family:
    drafted = range(family.layers - family.draft, family.layers)
    return Family(
        family.layers,
        _blocks(family, shapes, tokens),
        max_blocks_per_request=_blocks(family, shapes, shapes.max_model_len),
        is_attention=family.kind in ("full", "sliding"),
        draft_layers=tuple(drafted),
    )


def _blocks(family: GivenFamily, shapes: Shapes, tokens: int) -> int:
    if family.blocks is not None:
        return family.blocks
    if family.window is not None:
        held = min(family.window - 1 + shapes.max_num_batched_tokens, tokens)
        # A window need not begin where a block begins.
        return -(-held // shapes.block_size) + 1
    if family.kind == "full":
        return -(-tokens // shapes.block_size)
    return (2 if shapes.prefix_caching else 1) + shapes.speculative_tokens


def _kind(family: GivenFamily) -> str:
    return f"{KINDS[family.kind]} {family.window}" if family.window else KINDS[family.kind]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number
