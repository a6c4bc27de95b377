"""Synthetic acceptance: LOSSY. It accepts at given rates, to measure a system apart from its
drafter.

Knows tokens, rates and coins; never compares a draft with the target.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foredraft.core.acceptance import Verdict, Walk, draw_from, origin_of
from foredraft.core.row_math import RowMath
from foredraft.core.trees import ROOT, Topology


def synthetic(
    tree: Topology,
    rates: Sequence[float],
    accept_coin: float,
    residual_coin: float,
    row_math: RowMath,
) -> Walk[Tensor]:
    """Accept the first i draft tokens with probability `rates[i - 1]`, whatever they are.

    The path goes down to the first child each time, and ends with the draft. The next token is
    drawn from the target's law after it. The output means nothing; the numbers of accepted tokens
    have exactly the rates asked for, where drafts are as deep as these. The field's names are
    vLLM's: `synthetic_acceptance_rates` and, through `rates_of_length`,
    `synthetic_acceptance_length`.

    Asks for: the target's law `[V]` float64 at the last accepted node, once.

    Args:
        tree: of the draft.
        rates: `[K]` P(the first i are accepted), from 1 down to 0; not increasing.
        accept_coin: one for the whole step, in (0, 1).
        residual_coin: in (0, 1): the inverse-CDF draw of the next token.
        row_math: sums and draws.
    """
    node = ROOT
    for rate in rates:
        children = tree.children(node)
        if not children or not accept_coin < rate:
            break
        node = children[0]
    token = draw_from((yield node), residual_coin, row_math)
    return Verdict(tree.path(node), token, origin_of(len(tree), bool(tree.children(node))))


def rates_of_length(length: float, num_tokens: int) -> tuple[float, ...]:
    """`[num_tokens]` rates of mean acceptance length `length`, with the least spread.

    Whole tokens are always accepted, the next one as often as the fraction says, none after it.

    Raises:
        ValueError: a length outside 1 .. num_tokens + 1.
    """
    if not 1.0 <= length <= num_tokens + 1.0:
        raise ValueError(
            f"a mean acceptance length is in 1 .. {num_tokens + 1} with {num_tokens} draft tokens,"
            f" got {length}"
        )
    return tuple(min(max(length - 1.0 - i, 0.0), 1.0) for i in range(num_tokens))
