"""Rejection: the exact rule for drafts drawn from a law, in chains and in trees.

Knows tokens, laws and coins; knows no drafter: how siblings were drawn is said by the laws alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.core.acceptance import Coins, Rows, Verdict, Walk, draw_from, origin_of
from foredraft.core.row_math import RowMath
from foredraft.core.trees import ROOT, Topology


def rejection(
    tree: Topology,
    tokens: Sequence[int],
    draft_probs: Rows | None,
    accept_coin: Coins,
    residual_coin: float,
    row_math: RowMath,
) -> Walk[Tensor]:
    """Speculative sampling of a tree (recursive rejection sampling).

    At a node whose law is p, R = p is what is still to be said. The children are tried in order:
    child x, drawn from q given its earlier siblings, stands iff `coin < R(x) / q(x)`; otherwise R
    becomes `(R - q)+`, normalised, and the next child is tried. Where one stands the walk goes on
    from it; where none does the next token is drawn from R. The emitted tokens have the law of the
    target if every q is the law its token was really drawn from, and siblings are tried in the
    order they were drawn in. Which law siblings follow is thus a matter of `draft_probs` alone:

    - one child (a chain): the rule of Leviathan et al. (2211.17192, algorithm 1) and Chen et al.
      (2302.01318); it accepts `sum_x min(p, q) = 1 - TV(p, q)`;
    - siblings drawn with replacement (SpecInfer 2305.09781): all q the same row;
    - without replacement (Jeon et al. 2402.14160, Sequoia 2402.12374): q without the earlier
      siblings, normalised;
    - the n - 1 most likely tokens and one drawn from the others (Hu et al. 2502.18779), the drawn
      one first, then one-hot rows: it accepts what no rule can exceed for such drafts;
    - deterministic siblings (None, or one-hot rows): x stands with R(x), so that one of the
      siblings S does with p(S).

    Degenerate cases: a token of target probability 0 never stands, nor does a second sibling of one
    token, for a rejection leaves R = 0 there. Siblings that cover the support of p leave nothing to
    draw from: one of them stands. Where only rounding leaves nothing (q >= R everywhere) the next
    token is drawn from p. No argument is written to.

    A seed fixes the output only together with the shapes of all drafts: coins belong to nodes.

    Asks for: the target's law `[V]` float64 at a node, given the draft tokens on its path.

    Args:
        tree: n nodes, siblings in draw order.
        tokens: `[n]` the nodes' token ids.
        draft_probs: `[n, V]` the law each was really drawn from; None: all are deterministic.
        accept_coin: node -> a coin in (0, 1).
        residual_coin: in (0, 1), independent of the others: the inverse-CDF draw of the next token.
        row_math: sums and draws.

    Raises:
        ValueError: a draft token has probability 0 (or none) under the law it is said to be drawn
            from.
    """
    node = ROOT
    path: list[int] = []
    while True:
        target_probs = yield node
        weights = target_probs  # R times `total`
        total: float | None = 1.0  # None: not added up yet
        children = tree.children(node)
        for child in children:
            token = tokens[child]
            q = None if draft_probs is None else draft_probs[child]
            q_token = 1.0 if q is None else drawn_probability(q, token, child)
            if total is None:
                total = row_math.total(weights)
            weight = float(weights[token])
            # Not coin < R / q: without the division, R = q accepts every coin below 1 and R = 0
            # rejects them all.
            if accept_coin(child) * q_token * total < weight:
                path.append(child)
                node = child
                break
            weights = residual(weights, token, q, total)
            total = max(total - weight, 0.0) if q is None else None
        else:
            token = draw_from(weights, residual_coin, row_math, fallback=target_probs)
            return Verdict(tuple(path), token, origin_of(len(tree), bool(children)))


def residual(weights: Tensor, token: int, draft_probs: Tensor | None, total: float = 1.0) -> Tensor:
    """`(weights - total q)+` `[V]` float64; `weights` without `token` where q is one-hot (None)."""
    if draft_probs is None:
        rest = weights.to(torch.float64, copy=True)
        rest[token] = 0.0
        return rest
    q = draft_probs.to(device=weights.device, dtype=torch.float64)
    return weights.to(torch.float64).sub(q, alpha=total).clamp_(min=0.0)


def drawn_probability(draft_probs: Tensor, token: int, node: int) -> float:
    """q of a token that was drawn from it. Raises ValueError unless it is above 0."""
    q_token = float(draft_probs[token])
    if not q_token > 0.0:
        raise ValueError(
            f"the drafter gives token {token} at node {node} probability {q_token}: a drawn"
            " token's must be above 0, so draft_probs is not the law it was drawn from"
        )
    return q_token
