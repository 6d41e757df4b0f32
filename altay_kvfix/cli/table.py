"""The report of ``plan``: the decision, and what every group size gives, in plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..layout import effective_size, groups_of
from ..planner import Decision
from ..search import Candidate, Problem, evaluate, lower_bound, search
from ..settings import Settings


@dataclass(frozen=True)
class FamilyRow:
    kind: str
    layers: int
    blocks_per_request: int
    """Blocks that a request takes from one group."""
    draft_layers: int


@dataclass(frozen=True)
class SizeRow:
    """One group size."""

    size: int
    groups: int
    padding: int
    padding_by_family: tuple[int, ...]
    """In the order of :attr:`PlanTable.families`."""
    blocks_per_request: int
    gain: float
    """Tokens more than vLLM's own layout holds, as a share of that."""
    bytes_per_token: float
    """KV cache bytes on a GPU that a request takes for each of its tokens."""
    tokens: int | None
    """Tokens that the given memory holds; None where none is given."""
    concurrency: float | None
    """Requests that the given memory holds."""
    is_native: bool
    is_chosen: bool
    dropped: str | None
    """Why the search does not take it, or None."""


@dataclass(frozen=True)
class PlanTable:
    outcome: str
    """A value of :class:`altay_kvfix.planner.Outcome`."""
    rule: str
    reason: str
    error: str | None
    warnings: tuple[str, ...]
    max_model_len: int
    request_tokens: int
    """Length of the requests that are priced."""
    block_size: int | None = None
    """Tokens in a block of an attention group."""
    page_bytes: int | None = None
    """Bytes of one layer's part of a block."""
    kv_memory_bytes: int | None = None
    """On the GPU with the least."""
    families: tuple[FamilyRow, ...] = ()
    sizes: tuple[SizeRow, ...] = ()
    """Every canonical group size, ascending; none where the layers are not divided by size."""
    bound: float | None = None
    """Gain that no layout can exceed."""


def make_table(
    decision: Decision,
    settings: Settings,
    problem: Problem,
    *,
    kinds: Sequence[str],
    max_model_len: int,
    request_tokens: int,
    block_size: int | None,
    page_bytes: int | None,
) -> PlanTable:
    """Put ``decision`` and all candidates into a table.

    Args:
        decision: Of :func:`altay_kvfix.planner.decide`.
        problem: Priced for requests of ``request_tokens``.
        kinds: What to call the problem's families.
    """
    result = decision.search or search(
        problem, max_groups=settings.max_groups, group_cost=settings.group_cost
    )
    native = result.native
    chosen = native.size
    if decision.plan is not None:
        chosen = effective_size([f.layers for f in problem.families], decision.plan.group_size)
    candidates = list(result.candidates)
    if chosen not in {c.size for c in candidates}:
        candidates.append(evaluate(problem, chosen)[0])

    def row(c: Candidate) -> SizeRow:
        blocks = c.cost // c.width
        concurrency = None if problem.pages is None else problem.pages // c.width / blocks
        return SizeRow(
            size=c.size,
            groups=c.groups,
            padding=c.padding,
            padding_by_family=tuple(
                groups_of(f.layers, c.size) * c.size - f.layers for f in problem.families
            ),
            blocks_per_request=blocks,
            gain=c.capacity - 1,
            bytes_per_token=c.cost * (page_bytes or 0) / request_tokens,
            tokens=None if concurrency is None else int(concurrency * request_tokens),
            concurrency=concurrency,
            is_native=c.size == native.size,
            is_chosen=c.size == chosen,
            dropped=c.dropped,
        )

    return PlanTable(
        **_decided(decision),
        max_model_len=max_model_len,
        request_tokens=request_tokens,
        block_size=block_size,
        page_bytes=page_bytes,
        kv_memory_bytes=problem.pages * page_bytes if problem.pages and page_bytes else None,
        families=tuple(
            FamilyRow(kind, f.layers, f.blocks_per_request, len(f.draft_layers))
            for kind, f in zip(kinds, problem.families, strict=True)
        ),
        sizes=tuple(map(row, sorted(candidates, key=lambda c: c.size))),
        bound=native.cost / lower_bound(problem.families) - 1,
    )


def without_sizes(decision: Decision, max_model_len: int) -> PlanTable:
    """The report where the layers are not divided by size."""
    return PlanTable(
        **_decided(decision), max_model_len=max_model_len, request_tokens=max_model_len
    )


def _decided(decision: Decision) -> dict[str, Any]:
    return {
        "outcome": decision.outcome.value,
        "rule": decision.rule,
        "reason": decision.reason,
        "error": decision.error,
        "warnings": decision.warnings,
    }
