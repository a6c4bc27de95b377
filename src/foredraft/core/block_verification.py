"""Block verification: the exact rule that judges a chain of drawn tokens as a whole.

Knows tokens, laws and coins; knows no trees with siblings: for those there is `rejection`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from foredraft.core.acceptance import BadRow, Coins, Rows, Verdict, Walk, draw_from, origin_of
from foredraft.core.rejection import drawn_probability, residual
from foredraft.core.row_math import RowMath


def block(
    tokens: Sequence[int],
    draft_probs: Rows | None,
    accept_coin: Coins,
    residual_coin: float,
    row_math: RowMath,
) -> Walk[Tensor]:
    """Block verification (Sun et al., ICLR 2025, 2403.10444, algorithm 2).

    With `P_0 = 1` and `P_i = min(1, P_(i-1) p(x_i) / q(x_i))`, the first i of g tokens stand for
    the largest i with `coin_i < h_i`, 0 if there is none:

        h_g = P_g,   h_i = S_i / (S_i + 1 - P_i),   S_i = sum_x (P_i p(x) - q(x))+

    where p and q are the laws after the first i tokens. A later success makes up for earlier
    failures, so that it keeps at least as many tokens as `rejection` on average, and as many for
    one token or a deterministic draft. The next token is drawn from `(P_i p - q)+`, normalised, or
    from p after all g.

    The running product is kept as a logarithm, so that no ratio of small numbers overflows or
    vanishes. Degenerate cases: after a token of target probability 0 nothing can stand, and no
    further row is asked for. `S_i = 0` with `P_i = 1` counts as a success: nothing is left to say
    there. A residual that vanishes by rounding is replaced by p. A bad row ends the draft before
    it, which keeps the law, and is only met when all tokens before it stand.

    A seed fixes the output only for fixed draft lengths.

    Asks for: the target's law `[V]` float64 at the nodes -1, 0, ..., in this order.

    Args:
        tokens: `[g]` the chain's draft tokens.
        draft_probs: `[g, V]` the law each was really drawn from; None: all are deterministic.
        accept_coin: i - 1 -> coin_i, in (0, 1).
        residual_coin: in (0, 1), independent of the others: the inverse-CDF draw of the next token.
        row_math: sums and draws.

    Raises:
        ValueError: as `rejection`.
    """
    laws: list[Tensor] = []  # p at the rows of the nodes -1, 0, ...
    log_kept = [0.0]  # log P_i
    bad: BadRow | None = None
    for node, token in enumerate(tokens):
        try:
            laws.append((yield node - 1))
        except BadRow as row:
            bad = row
            break
        q_token = 1.0 if draft_probs is None else drawn_probability(draft_probs[node], token, node)
        ratio = _log(float(laws[-1][token])) - math.log(q_token)
        log_kept.append(min(log_kept[-1] + ratio, 0.0))
        if log_kept[-1] == -math.inf:
            break
    count = len(log_kept) - 1
    if count == 0 or accept_coin(count - 1) < math.exp(log_kept[-1]):
        if bad is not None:
            raise bad
        target_probs = yield count - 1
        token = draw_from(target_probs, residual_coin, row_math)
        return Verdict(tuple(range(count)), token, origin_of(len(tokens), False))
    while True:
        count -= 1
        kept = math.exp(log_kept[count])
        q = None if draft_probs is None else draft_probs[count]
        weights = residual(kept * laws[count], tokens[count], q)
        if count == 0 or _stands(accept_coin(count - 1), weights, log_kept[count], row_math):
            token = draw_from(weights, residual_coin, row_math, fallback=laws[count])
            return Verdict(tuple(range(count)), token, origin_of(len(tokens), True))


def _stands(coin: float, weights: Tensor, log_kept: float, row_math: RowMath) -> bool:
    """`coin < h_i`, of `S_i` = the sum of `weights` and `log P_i`."""
    total = row_math.total(weights)
    missing = -math.expm1(log_kept)  # 1 - P_i
    return total + missing == 0.0 or coin * (total + missing) < total


def _log(value: float) -> float:
    return math.log(value) if value > 0.0 else -math.inf
