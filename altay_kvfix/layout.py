"""The arithmetic of KV cache groups: plain numbers in, plain numbers out.

vLLM puts the layers of a hybrid model into KV cache groups. A *family* is the set of layers that
share one cache spec. Every group has its own block table, all groups draw blocks from one pool, and
a block is as wide as the widest group, so a narrower group carries *padding* slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")


def groups_of(layers: int, group_size: int) -> int:
    """K_f(g) = ceil(n_f / g): how many groups of at most ``group_size`` a family needs."""
    return -(-layers // group_size)


def split_round_robin(layers: Sequence[_T], num_groups: int) -> list[list[_T]]:
    """Deal ``layers`` out so that group i gets ``layers[i::num_groups]``.

    vLLM deals this way because consecutive layers live on the same pipeline stage: dealt out, every
    stage finds a share of each group, and no stage pays for a group that it has no layer of.
    """
    return [list(layers[i::num_groups]) for i in range(num_groups)]


def rule_of_thumb(family_counts: Sequence[int]) -> int:
    """The group size that vLLM chooses, by a rule that is the same in every release so far.

    The smallest layer count, or the largest where it is under 1.5 times the smallest. For models
    that are given by numbers alone; where vLLM plans, its own answer is read.
    """
    smallest, largest = min(family_counts), max(family_counts)
    return largest if largest < 1.5 * smallest else smallest


def effective_size(family_counts: Sequence[int], group_size: int) -> int:
    """The width of the widest group that ``group_size`` really makes.

    Dealing 16 layers out into groups of at most 10 makes two groups of 8, so a requested size is
    often wider than any group it leads to.
    """
    return max(groups_of(n, groups_of(n, group_size)) for n in family_counts)


def is_canonical(family_counts: Sequence[int], group_size: int) -> bool:
    """Whether ``group_size`` is the width it makes, and not a duplicate of a smaller size."""
    return effective_size(family_counts, group_size) == group_size


def canonical_sizes(family_counts: Sequence[int]) -> list[int]:
    """Every canonical group size, ascending. Each distinct layout appears exactly once."""
    counts = _checked_counts(family_counts)
    return [g for g in range(1, max(counts) + 1) if is_canonical(counts, g)]


@dataclass(frozen=True)
class LayoutPlan:
    """One way to put families of layers into KV cache groups.

    Make it with :func:`make_layout_plan`.
    """

    family_counts: tuple[int, ...]
    """Layers per family, in the order the families were given."""
    group_size: int
    """Slots of a group: the pool's block is this many layer-pages wide."""
    group_lengths: tuple[int, ...]
    """Layers in each group, family by family, as the round-robin deal leaves them."""

    @property
    def num_layers(self) -> int:
        return sum(self.family_counts)

    @property
    def num_groups(self) -> int:
        return len(self.group_lengths)

    @property
    def allocated_slots(self) -> int:
        """Slots that memory is reserved for: groups times the group size."""
        return self.num_groups * self.group_size

    @property
    def padding_slots(self) -> int:
        """Slots that hold no layer."""
        return self.allocated_slots - self.num_layers


def make_layout_plan(family_counts: Sequence[int], group_size: int) -> LayoutPlan:
    """Lay families of ``family_counts`` layers out in groups of ``group_size``.

    Raises:
        ValueError: no family, a family without layers, or a group size below 1.
    """
    counts = _checked_counts(family_counts)
    if not _is_positive_int(group_size):
        raise ValueError(f"group_size must be an integer >= 1, got {group_size!r}")
    lengths = [
        len(group)
        for n in counts
        for group in split_round_robin(range(n), groups_of(n, group_size))
    ]
    return LayoutPlan(counts, group_size, tuple(lengths))


def _checked_counts(family_counts: Sequence[int]) -> tuple[int, ...]:
    counts = tuple(family_counts)
    if not counts or not all(_is_positive_int(n) for n in counts):
        raise ValueError(
            f"family_counts must be one or more integers >= 1 (layers per family), got {counts!r}"
        )
    return counts


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
