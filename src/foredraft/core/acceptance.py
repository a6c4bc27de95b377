"""The acceptance rules: which draft tokens stand, and which token follows them.

Knows tokens, laws and coins; knows no model, request or random generator. Every rule here is exact:
whatever the drafter did, the tokens it emits have the target's law, p. (q is the law a draft token
was drawn from.)

- accepted token: a draft token that is kept;
- recovered token: what the target says instead of the first draft token that is not kept;
- bonus token: what the target says after the last one, when all were kept;
- plain token: what the target says where nothing was drafted.

Rows of the target are asked for lazily, along the accepted path only: a row that does not decide is
never processed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from foredraft.core.row_math import RowMath
from foredraft.core.trees import ROOT, Topology


class Origin(StrEnum):
    """Where an emitted token came from."""

    PLAIN = "plain"
    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one step decided for one request."""

    accepted: tuple[int, ...]  # draft nodes of the accepted path, the root's child first
    next_token: int
    origin: Origin  # of next_token: plain, recovered or bonus

    @property
    def num_accepted(self) -> int:
        """Draft tokens kept, without the extra one."""
        return len(self.accepted)

    @property
    def num_emitted(self) -> int:
        """Draft tokens kept and the extra one."""
        return len(self.accepted) + 1


def match(topology: Topology, tokens: Sequence[int], draw: Callable[[int], int]) -> Verdict:
    """Sample and match: walk down to the child that equals the target's own token.

    Greedy decoding when `draw` is the argmax; coupled sampling when it is the argmax of log p + the
    noise of that position (Daliri, Musco, Suresh 2408.07978: the output is the seeded plain output
    whatever was drafted); the rule for deterministic trees when it is a fresh draw from p
    (acceptance p(S), S the siblings' tokens).

    Args:
        topology: of the draft tree, n nodes.
        tokens: `[n]` the nodes' token ids; among equal siblings the first counts.
        draw: the target's token at the row of a node, -1 = the root's row. Called once per node of
            the accepted path.
    """
    node = ROOT
    path: list[int] = []
    while True:
        token = draw(node)
        children = topology.children(node)
        child = next((child for child in children if tokens[child] == token), None)
        if child is None:
            return Verdict(tuple(path), token, _origin(len(topology), bool(children)))
        path.append(child)
        node = child


def rejection(
    tokens: Sequence[int],
    law: Callable[[int], Tensor],
    draft_probs: Tensor | None,
    accept_coins: Sequence[float] | Callable[[int], float],
    residual_coin: float,
    row_math: RowMath,
) -> Verdict:
    """Speculative sampling of a chain (Leviathan et al. 2211.17192, Chen et al. 2302.01318).

    Draft token x at offset i is accepted iff `coin_i < p(x) / q(x)`; after the first rejection the
    next token is drawn from the residual `(p - q)+`, normalised, and after full acceptance from p.
    It accepts a token with probability `sum_x min(p(x), q(x)) = 1 - TV(p, q)`. A deterministic
    draft is q = one-hot: accept with p(x), residual = p with x zeroed. Where rounding leaves no
    residual (p <= q everywhere) it falls back to p. No argument is written to.

    Args:
        tokens: `[n]` the chain's draft tokens.
        law: the target's law `[V]` float64 at the row of node i, -1 = the root's row, given the
            draft tokens up to i. Called for the rows -1, 0, ... that are reached.
        draft_probs: `[n, V]` the law each token was really drawn from; None: the draft was
            deterministic.
        accept_coins: in (0, 1), one per offset, as a sequence or a function of the offset.
        residual_coin: in (0, 1), independent of the others: the inverse-CDF draw of the next token,
            in id order.
        row_math: the running sum of that draw.

    Raises:
        ValueError: a draft token has probability 0 (or none) under the law it is said to be drawn
            from.
    """
    coin_at = accept_coins if callable(accept_coins) else accept_coins.__getitem__
    for offset, token in enumerate(tokens):
        target_probs = law(offset - 1)
        q_token = 1.0 if draft_probs is None else _drawn_probability(draft_probs, offset, token)
        # Not coin < p / q: without the division, p = q accepts every coin below 1 and p = 0 rejects
        # them all.
        if coin_at(offset) * q_token < float(target_probs[token]):
            continue
        weights = residual(
            target_probs, token, None if draft_probs is None else draft_probs[offset]
        )
        next_token = draw_from(weights, residual_coin, row_math, fallback=target_probs)
        return Verdict(tuple(range(offset)), next_token, Origin.RECOVERED)
    next_token = draw_from(law(len(tokens) - 1), residual_coin, row_math)
    return Verdict(tuple(range(len(tokens))), next_token, _origin(len(tokens), False))


def residual(target_probs: Tensor, token: int, draft_probs: Tensor | None) -> Tensor:
    """`(p - q)+` `[V]` float64, not normalised; p without `token` where q is one-hot (None)."""
    if draft_probs is None:
        weights = target_probs.to(torch.float64, copy=True)
        weights[token] = 0.0
        return weights
    q = draft_probs.to(device=target_probs.device, dtype=torch.float64)
    return (target_probs.to(torch.float64) - q).clamp_(min=0.0)


def draw_from(
    weights: Tensor, coin: float, row_math: RowMath, fallback: Tensor | None = None
) -> int:
    """The id where the running sum of `weights` `[V]` first exceeds `coin` times their total.

    Ids of weight 0 are never drawn. When the total is 0 the draw is from `fallback`.

    Raises:
        ValueError: no positive weight, and no fallback.
    """
    running = row_math.cumulative_sum(weights)
    total = float(running[-1])
    if not total > 0.0:
        if fallback is None:
            raise ValueError(
                f"cannot draw a token: the weights add up to {total}, not to more than 0"
            )
        return draw_from(fallback, coin, row_math)
    # A total of a few denormals could round coin * total up to the total itself, which no running
    # sum exceeds.
    threshold = min(coin * total, float(torch.nextafter(running[-1], running[-1] - 1)))
    return int(torch.searchsorted(running, threshold, right=True))


def maximal_acceptance(target_probs: Tensor, draft_probs: Tensor) -> float:
    """`sum_x min(p, q) = 1 - TV(p, q)`, what `rejection` accepts of q (2211.17192, section 3)."""
    return float(torch.minimum(target_probs, draft_probs).sum())


def coupled_acceptance(target_probs: Tensor, draft_probs: Tensor) -> float:
    """`sum_x 1 / sum_y max(p_y / p_x, q_y / q_x)`: what `match` accepts where p and q share noise.

    Daliri, Musco, Suresh (2408.07978), section 3. The sum runs over the x that both laws can draw.
    """
    both = (target_probs > 0) & (draft_probs > 0)
    p, q = target_probs[both], draft_probs[both]
    ratios = torch.maximum(target_probs / p[:, None], draft_probs / q[:, None])  # [X, V]
    return float((1.0 / ratios.sum(dim=1)).sum())


def _drawn_probability(draft_probs: Tensor, offset: int, token: int) -> float:
    q_token = float(draft_probs[offset, token])
    if not q_token > 0.0:
        raise ValueError(
            f"the drafter gives token {token} at offset {offset} probability {q_token}: a drawn"
            " token's must be above 0, so draft_probs is not the law it was drawn from"
        )
    return q_token


def _origin(num_nodes: int, rejected: bool) -> Origin:
    if num_nodes == 0:
        return Origin.PLAIN
    return Origin.RECOVERED if rejected else Origin.BONUS
