"""Typical acceptance: LOSSY. It keeps what the target finds likely enough, whatever its law.

Knows tokens, laws and coins; knows no law of a draft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.core.acceptance import Verdict, Walk, draw_from, origin_of
from foredraft.core.row_math import RowMath
from foredraft.core.trees import ROOT, Topology

POSTERIOR_THRESHOLD = 0.09
POSTERIOR_ALPHA = 0.3


def typical(
    tree: Topology,
    tokens: Sequence[int],
    residual_coin: float,
    row_math: RowMath,
    posterior_threshold: float = POSTERIOR_THRESHOLD,
    posterior_alpha: float = POSTERIOR_ALPHA,
) -> Walk[Tensor]:
    """Typical acceptance (Medusa, Cai et al. 2401.10774, section 2.3.1).

    A draft token x can stand iff its parent can and `p(x) > min(threshold, alpha exp(-H(p)))`, H
    the entropy of p. The deepest such path stands, among equals the one of the largest product of
    p, then the first. The next token is drawn from p as it is. The output does NOT have the law of
    the target: tokens that pass are kept although they were not drawn from p, and those that fail
    may be said again.

    A seed fixes the output only together with the shapes of all drafts.

    Asks for: the target's law `[V]` float64 at every node that can stand.

    Args:
        tree: n nodes.
        tokens: `[n]` the nodes' token ids.
        residual_coin: in (0, 1): the inverse-CDF draw of the next token.
        row_math: sums and draws.
        posterior_threshold: no token above this probability fails.
        posterior_alpha: scales the bar where the law is flat.
    """
    best, best_rank = ROOT, (0, 0.0)
    best_law: Tensor | None = None
    pending = [(ROOT, (0, 0.0))]  # nodes that can stand, and their depth and sum of log p
    for node, (depth, score) in pending:
        target_probs = yield node
        if best_law is None or (depth, score) > best_rank:
            best, best_rank, best_law = node, (depth, score), target_probs
        bar = bar_of(target_probs, row_math, posterior_threshold, posterior_alpha)
        for child in tree.children(node):
            p = float(target_probs[tokens[child]])
            if p > bar:
                pending.append((child, (depth + 1, score + math.log(p))))
    assert best_law is not None  # the root's, at least
    token = draw_from(best_law, residual_coin, row_math)
    return Verdict(tree.path(best), token, origin_of(len(tree), bool(tree.children(best))))


def bar_of(target_probs: Tensor, row_math: RowMath, threshold: float, alpha: float) -> float:
    """`min(threshold, alpha exp(-H(p)))`, H in nats."""
    entropy = row_math.total(torch.special.entr(target_probs))
    return min(threshold, alpha * math.exp(-entropy))
