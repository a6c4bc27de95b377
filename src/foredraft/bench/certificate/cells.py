"""From a law over a vocabulary to few cells: rules fixed before anything is drawn.

Knows laws as rows of probabilities; knows no model, no draw and no test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_CELL = 1.0 / 24.0  # a token of this probability has a cell of its own
LEAST_REST = SMALLEST_CELL / 8.0  # less than this is no cell of its own
RANK_CELLS = 24  # cells of equal mass for a token after others


@dataclass(frozen=True, slots=True)
class Cells:
    """A partition of the vocabulary. The last cell holds what the target never says."""

    of_token: Tensor  # [V] int64
    probs: Tensor  # [C] float64, the target's; the last is 0
    tokens: Mapping[int, int]  # cell -> its token, for cells of one token

    @property
    def num_possible(self) -> int:
        """Cells that the target can say."""
        return int((self.probs > 0).sum())

    def counts(self, drawn: Mapping[int, int]) -> Tensor:
        """`[C]` float64: how often each cell was drawn; `drawn` maps tokens to counts."""
        counts = torch.zeros_like(self.probs)
        for token, count in drawn.items():
            counts[self.of_token[token]] += count
        return counts

    def law(self, probs: Tensor) -> Tensor:
        """`[C]` the probabilities of the cells under another law `[V]`."""
        return torch.zeros_like(self.probs).index_add_(0, self.of_token, probs.double())


def pool(target_probs: Tensor, draft_probs: Tensor) -> Cells:
    """Likely tokens alone, rare ones together with those that a rule would treat alike.

    A token of probability `SMALLEST_CELL` or more is a cell. The others are ordered by q / p, the
    draft's law over the target's, then by p, and cut into as many cells of about equal mass as
    hold `SMALLEST_CELL` each. A wrong acceptance rule or draft law moves mass between high and low
    q / p, so little of what it does is lost in the pooling. If the others hold less than
    `LEAST_REST` they go to the rarest cell.

    Args:
        target_probs: `[V]` p.
        draft_probs: `[V]` q; one-hot for a deterministic draft.
    """
    p, q = target_probs.double(), draft_probs.double()
    alone = (p >= SMALLEST_CELL).nonzero().squeeze(1)
    alone = alone[torch.argsort(p[alone], descending=True, stable=True)]
    others = ((p > 0) & (p < SMALLEST_CELL)).nonzero().squeeze(1)
    by_p = torch.argsort(p[others], descending=True, stable=True)
    others = others[by_p]
    others = others[torch.argsort(q[others] / p[others], descending=True, stable=True)]
    running = torch.cumsum(p[others], dim=0)
    mass = float(running[-1]) if others.numel() else 0.0
    count = 0 if mass < LEAST_REST and alone.numel() else max(1, int(mass / SMALLEST_CELL))
    impossible = alone.numel() + count
    of_token = torch.full(p.shape, impossible, dtype=torch.int64)
    of_token[alone] = torch.arange(alone.numel())
    if count:
        middle = running - p[others] / 2.0  # a token belongs where most of it lies
        of_token[others] = alone.numel() + (middle / mass * count).long().clamp_(max=count - 1)
    elif others.numel():
        of_token[others] = alone.numel() - 1
    empty = torch.zeros(impossible + 1, dtype=torch.float64)
    probs = empty.index_add_(0, of_token, p)
    merged = {alone.numel() - 1} if not count and others.numel() else set()
    tokens = {cell: int(token) for cell, token in enumerate(alone) if cell not in merged}
    return Cells(of_token, probs, tokens)


class Ranks:
    """Where the tokens of a law rank in it.

    If a token is drawn from p = `probs` `[V]`, and (above, mass) is its interval, then
    `above + v mass` is uniform on (0, 1) for a v that is: the probability integral transform, with
    ties shared out. The order is that of `pool`: by q / p where the draft's law q = `draft_probs`
    is known, then by p.
    """

    def __init__(self, probs: Tensor, draft_probs: Tensor | None = None) -> None:
        ids = (probs > 0).nonzero().squeeze(1)
        p = probs[ids].double()
        order = torch.argsort(p, descending=True, stable=True)
        changes = p[order].diff() != 0
        if draft_probs is not None:
            ratio = draft_probs[ids].double() / p
            order = order[torch.argsort(ratio[order], descending=True, stable=True)]
            changes = (p[order].diff() != 0) | (ratio[order].diff() != 0)
        tie = torch.cat([torch.zeros(1, dtype=torch.int64), changes.long().cumsum(0)])
        mass = torch.zeros(len(ids), dtype=torch.float64).index_add_(0, tie, p[order])
        self._above = mass.cumsum(0) - mass
        self._mass = mass
        self._tie_of = torch.full(probs.shape, -1, dtype=torch.int64)
        self._tie_of[ids[order]] = tie

    def interval(self, token: int) -> tuple[float, float] | None:
        """`(above, mass)`: the mass of what ranks before `token`, and of what ranks with it; None:
        the law never draws it.
        """
        tie = int(self._tie_of[token])
        return None if tie < 0 else (float(self._above[tie]), float(self._mass[tie]))
