"""The capacity search: the group size that lets the KV cache hold the most tokens.

For a group size g, family f (n_f layers, b_f blocks per request and group) has K_f = ceil(n_f / g)
groups, and one request costs

    C(g) = g * sum_f K_f(g) * b_f        layer-pages,

which is vLLM's own price: blocks per request times the width of a block. The memory holds 1 / C(g)
requests per layer-page. Every group also costs time in each step (a block table to rebuild, an
attention metadata to make), which ``group_cost`` expresses as a share of capacity.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .layout import canonical_sizes, effective_size, groups_of

MIN_CAPACITY = 0.99
"""A candidate below this share of native's capacity is never taken, however few its groups."""

DEFAULT_MAX_GROUPS = 24
DEFAULT_GROUP_COST = 0.005


@dataclass(frozen=True)
class Family:
    """Layers that share one cache spec, in the order vLLM deals them out.

    A hidden-state layer, which vLLM keeps in a group of its own, is a family of one layer.
    """

    layers: int
    blocks_per_request: int
    """b_f: blocks that one request of the planned length takes from one group."""
    max_blocks_per_request: int | None = None
    """The same for a request of max_model_len tokens; None means the planned length is that."""
    is_attention: bool = True
    """False for mamba, GDN and the like."""
    draft_layers: tuple[int, ...] = ()
    """Positions of the drafter's layers."""
    may_hold_draft: bool = False
    """The drafter's layers could be here, and it can't be told which they are."""
    stages: tuple[int, ...] = ()
    """Pipeline stage of each layer; empty where there is a single stage."""

    @cached_property
    def longest_blocks(self) -> int:
        if self.max_blocks_per_request is None:
            return self.blocks_per_request
        return self.max_blocks_per_request

    def draft_groups(self, num_groups: int) -> int:
        """Groups that hold a drafter's layer, dealt round-robin into ``num_groups``."""
        return len({position % num_groups for position in self.draft_layers})

    def width(self, num_groups: int) -> int:
        """Layers of the widest group on one pipeline stage."""
        if not self.stages:
            return groups_of(self.layers, num_groups)
        shares = Counter((i % num_groups, stage) for i, stage in enumerate(self.stages))
        return max(shares.values())


@dataclass(frozen=True)
class Problem:
    """One model to lay out, and the machine's limits where they are known."""

    families: tuple[Family, ...]
    native_size: int
    """The group size that vLLM chose."""
    pages: int | None = None
    """Layer-pages that the KV cache memory of the smallest worker holds; None when unknown."""
    max_num_seqs: int = 1
    """Requests that run at once: vLLM needs a block for each."""


@dataclass(frozen=True)
class Candidate:
    """What one group size gives."""

    size: int
    groups: int
    padding: int
    """Slots that hold no layer."""
    width: int
    """Layers a block is wide on the pipeline stage with the most; the size, with one stage."""
    cost: int
    """C(g) in layer-pages: what one request of the planned length takes."""
    max_blocks: int
    """Blocks of one request of max_model_len tokens."""
    attention_groups: int
    draft_groups: int
    """Groups that hold layers known to be the drafter's."""
    capacity: float = 1.0
    """Tokens the KV cache holds, as a multiple of native's."""
    is_native: bool = False
    dropped: str | None = None
    """Why it can't be taken, or None."""


@dataclass(frozen=True)
class SearchResult:
    chosen: Candidate
    native: Candidate
    candidates: tuple[Candidate, ...]
    """Every canonical group size, ascending."""
    lower_bound: int
    """sum_f n_f * b_f layer-pages: no layout can cost less."""
    reason: str


def search(
    problem: Problem,
    *,
    max_groups: int = DEFAULT_MAX_GROUPS,
    group_cost: float = DEFAULT_GROUP_COST,
) -> SearchResult:
    """The group size with the least ``C(g) * (1 + group_cost * K(g))``.

    Native is always allowed, and wins a tie against the same number of groups.

    Args:
        problem: Families of plain numbers.
        max_groups: No other layout than native may have more groups.
        group_cost: Price of one group, as a share of capacity; 0 looks at capacity alone.

    Raises:
        ValueError: fewer than two families.
    """
    if len(problem.families) < 2:
        raise ValueError("a search needs two families or more; one family is one group")
    counts = [family.layers for family in problem.families]
    native = replace(_evaluate_native(problem), is_native=True)
    candidates = []
    for size in canonical_sizes(counts):
        if size == native.size:
            candidates.append(native)
            continue
        candidate = _compare(_evaluate(problem, size), native)
        reason = _drop_reason(problem, candidate, native, max_groups)
        candidates.append(replace(candidate, dropped=reason))

    def price(c: Candidate) -> tuple[float, int, bool]:
        return c.cost * (1 + group_cost * c.groups), c.groups, not c.is_native

    chosen = min((c for c in candidates if c.dropped is None), key=price)
    if chosen.is_native:
        reason = f"vLLM's own group size {native.size} has the best price"
    else:
        reason = (
            f"group size {chosen.size} holds {chosen.capacity:.4f} times the tokens "
            f"in {chosen.groups} groups"
        )
    return SearchResult(chosen, native, tuple(candidates), lower_bound(problem.families), reason)


def evaluate(problem: Problem, size: int) -> tuple[Candidate, Candidate]:
    """The layout that ``size`` really makes, compared but not judged, and native's."""
    counts = [family.layers for family in problem.families]
    native = _evaluate_native(problem)
    return _compare(_evaluate(problem, effective_size(counts, size)), native), native


def lower_bound(families: Sequence[Family]) -> int:
    """sum_f n_f * b_f: layer-pages of one request if no slot were padded.

    With pipeline stages, those of the stage with the most.
    """
    stages = {stage for family in families for stage in family.stages}
    if not stages:
        return sum(family.layers * family.blocks_per_request for family in families)
    return max(
        sum(family.stages.count(stage) * family.blocks_per_request for family in families)
        for stage in stages
    )


def new_shortage(problem: Problem, candidate: Candidate, native: Candidate) -> str | None:
    """Why vLLM would refuse to start with ``candidate``, but not with native, or None."""
    return None if _shortage(problem, native) else _shortage(problem, candidate)


def _shortage(problem: Problem, candidate: Candidate) -> str | None:
    if problem.pages is None:
        return None
    blocks = problem.pages // candidate.width
    if blocks < problem.max_num_seqs:
        return f"its {blocks} blocks are fewer than max_num_seqs {problem.max_num_seqs}"
    # vLLM keeps one block of the pool back.
    if blocks - 1 < candidate.max_blocks:
        return (
            f"its {blocks} blocks do not hold one request of max_model_len tokens, "
            f"which takes {candidate.max_blocks}"
        )
    return None


def draft_spread(problem: Problem, candidate: Candidate, native: Candidate) -> str | None:
    """Why the drafter may refuse ``candidate``, or None.

    vLLM's V1 model runner asserts that all layers of a drafter share one group.
    """
    if candidate.draft_groups > native.draft_groups:
        return (
            f"it spreads the drafter's layers over {candidate.draft_groups} groups, "
            f"native over {native.draft_groups}"
        )
    for family in problem.families:
        if family.may_hold_draft and (
            groups_of(family.layers, candidate.size) > groups_of(family.layers, native.size)
        ):
            return "it divides a family further that may hold the drafter's layers"
    return None


def attention_excess(candidate: Candidate, native: Candidate) -> str | None:
    """Why ``candidate`` may cost attention workspace, or None.

    Some attention backends allocate a workspace of hundreds of MiB for each group (FlashInfer
    under vLLM's V1 model runner: 394 MiB), outside the memory that the KV cache is planned in.
    """
    if candidate.attention_groups > native.attention_groups + 1:
        return (
            f"it has {candidate.attention_groups} attention groups, "
            f"native {native.attention_groups}"
        )
    return None


def _evaluate_native(problem: Problem) -> Candidate:
    counts = [family.layers for family in problem.families]
    return _evaluate(problem, effective_size(counts, problem.native_size))


def _evaluate(problem: Problem, size: int) -> Candidate:
    shares = [(family, groups_of(family.layers, size)) for family in problem.families]
    groups = sum(k for _, k in shares)
    width = max(family.width(k) for family, k in shares)
    return Candidate(
        size=size,
        groups=groups,
        padding=size * groups - sum(family.layers for family in problem.families),
        width=width,
        cost=width * sum(k * family.blocks_per_request for family, k in shares),
        max_blocks=sum(k * family.longest_blocks for family, k in shares),
        attention_groups=sum(k for family, k in shares if family.is_attention),
        draft_groups=sum(family.draft_groups(k) for family, k in shares),
    )


def _compare(candidate: Candidate, native: Candidate) -> Candidate:
    return replace(candidate, capacity=native.cost / candidate.cost)


def _drop_reason(
    problem: Problem, candidate: Candidate, native: Candidate, max_groups: int
) -> str | None:
    if candidate.groups > max_groups:
        return f"it has {candidate.groups} groups, more than {max_groups}"
    if candidate.capacity < MIN_CAPACITY:
        return f"it holds {1 - candidate.capacity:.1%} fewer tokens than native"
    return (
        draft_spread(problem, candidate, native)
        or attention_excess(candidate, native)
        or new_shortage(problem, candidate, native)
    )
