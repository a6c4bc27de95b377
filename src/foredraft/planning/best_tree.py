"""The best draft tree for acceptance rates by rank, by dynamic programming.

Knows rates and costs; knows no torch, no model and no drafter. The model is Sequoia's (Chen et al.
2402.12374, section 3.1): the b-th sibling is the accepted one with probability `a_b`, wherever it
stands and whatever came before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import inf


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A draft tree; siblings are in the order of their ranks."""

    parents: tuple[int, ...]  # -1 = the pending token, a parent before its children
    depth: int
    expected_tokens: float  # a step, the extra one included
    speedup: float


def best_tree(
    rank_acceptance: Sequence[float],
    draft_cost: float,
    verify_cost: Sequence[float],
    max_depth: int = 16,
) -> TreeShape:
    """The tree of the highest `expected tokens / (depth * draft_cost + verify_cost[nodes])`.

    Args:
        rank_acceptance: P(the b-th sibling is the accepted one), for b = 1, 2, ...; at most 1
            together.
        draft_cost: of drafting one level, in plain passes.
        verify_cost: `[n + 1]` of a pass that verifies 0, 1, ... n nodes, in plain passes.
        max_depth: levels at most.

    Raises:
        ValueError: rates that are no probabilities of exclusive events, or no costs.
    """
    if min(rank_acceptance, default=0.0) < 0 or sum(rank_acceptance) > 1 + 1e-9:
        raise ValueError(
            "rates by rank must be 0 or more and at most 1 together, got "
            f"{list(rank_acceptance)} = {sum(rank_acceptance)}"
        )
    if not verify_cost:
        raise ValueError("verify_cost must hold at least the cost of a plain pass")
    programme = _Programme(rank_acceptance)
    best = TreeShape((), 0, 1.0, 1.0)
    for nodes in range(1, len(verify_cost)):
        for depth in range(1, min(nodes, max_depth) + 1):
            expected = programme.tokens(nodes + 1, depth)
            gain = expected * verify_cost[0] / (depth * draft_cost + verify_cost[nodes])
            if gain > best.speedup:
                parents = tuple(programme.parents(nodes + 1, depth))
                best = TreeShape(parents, depth, expected, gain)
    return best


class _Programme:
    """Best expected tokens of trees with exactly so many nodes; `-inf` where there is none."""

    def __init__(self, rates: Sequence[float]) -> None:
        self._rates = rates
        self.tokens = cache(self._tokens)
        self._forest = cache(self._best_forest)

    def _tokens(self, nodes: int, depth: int) -> float:
        """Of a root and `nodes - 1` nodes below it, at most `depth` levels."""
        return 1.0 + self._forest(nodes - 1, depth, 0)[0]

    def _best_forest(self, nodes: int, depth: int, rank: int) -> tuple[float, int]:
        """Of `nodes` nodes below a parent, in subtrees of children from `rank` on: what they bring,
        and the size of the first one.
        """
        if not nodes:
            return 0.0, 0
        if not depth or rank == len(self._rates):
            return -inf, 0
        return max(
            (
                self._rates[rank] * self.tokens(size, depth - 1)
                + self._forest(nodes - size, depth, rank + 1)[0],
                size,
            )
            for size in range(1, nodes + 1)
            if self.tokens(size, depth - 1) > -inf  # 0 times it would be no number
        )

    def parents(self, nodes: int, depth: int, root: int = -1) -> list[int]:
        """The tree's, its nodes numbered from `root + 1`, each before its subtree."""
        found: list[int] = []
        left, rank = nodes - 1, 0
        while left:
            size = self._forest(left, depth, rank)[1]
            child = root + 1 + len(found)
            found += [root, *self.parents(size, depth - 1, child)]
            left, rank = left - size, rank + 1
        return found
