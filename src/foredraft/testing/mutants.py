"""Wrong acceptance rules, each a mistake somebody made. A check of exactness that lets one pass
checks nothing.

Knows the signatures of `law.ChainRule` and `law.TreeRule`. Nothing here may be used to decode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from foredraft.core.acceptance import Origin, Verdict, draw_from, match
from foredraft.core.row_math import TorchRowMath
from foredraft.core.trees import ROOT, Topology, topology
from foredraft.testing.law import ChainRule, TreeRule, exact_rejection

_ROW_MATH = TorchRowMath()
TargetRows = Callable[[int], Tensor]


def no_residual(
    tokens: Sequence[int],
    law: TargetRows,
    draft_probs: Tensor | None,
    accept_coins: Sequence[float],
    residual_coin: float,
) -> Verdict:
    """After a rejection the next token is drawn from p itself."""
    verdict = exact_rejection(tokens, law, draft_probs, accept_coins, residual_coin)
    return _redrawn(verdict, law(verdict.num_accepted - 1), residual_coin)


def residual_from_p(
    tokens: Sequence[int],
    law: TargetRows,
    draft_probs: Tensor | None,
    accept_coins: Sequence[float],
    residual_coin: float,
) -> Verdict:
    """The residual of a sampled draft is p without the rejected token, as if the draft were one-
    hot.
    """
    verdict = exact_rejection(tokens, law, draft_probs, accept_coins, residual_coin)
    if verdict.origin is not Origin.RECOVERED:
        return verdict
    weights = law(verdict.num_accepted - 1).clone()
    weights[tokens[verdict.num_accepted]] = 0.0
    return _redrawn(verdict, weights, residual_coin)


def residual_swapped(
    tokens: Sequence[int],
    law: TargetRows,
    draft_probs: Tensor | None,
    accept_coins: Sequence[float],
    residual_coin: float,
) -> Verdict:
    """The residual is (q - p)+."""
    verdict = exact_rejection(tokens, law, draft_probs, accept_coins, residual_coin)
    if verdict.origin is not Origin.RECOVERED:
        return verdict
    offset = verdict.num_accepted
    q = _one_hot(law(ROOT), tokens[offset]) if draft_probs is None else draft_probs[offset]
    return _redrawn(verdict, (q - law(offset - 1)).clamp(min=0.0), residual_coin)


def residual_in_place(
    tokens: Sequence[int],
    law: TargetRows,
    draft_probs: Tensor | None,
    accept_coins: Sequence[float],
    residual_coin: float,
) -> Verdict:
    """The residuals of all rows are written over the rows before the acceptance test reads them."""
    rows = [law(node).clone() for node in range(-1, len(tokens))]
    for offset, token in enumerate(tokens):
        if draft_probs is None:
            rows[offset][token] = 0.0
        else:
            rows[offset] = (rows[offset] - draft_probs[offset]).clamp(min=0.0)
            if float(rows[offset].sum()) == 0.0:
                rows[offset] = law(offset - 1)
    return exact_rejection(
        tokens, lambda node: rows[node + 1], draft_probs, accept_coins, residual_coin
    )


def bonus_from_draft(
    tokens: Sequence[int],
    law: TargetRows,
    draft_probs: Tensor | None,
    accept_coins: Sequence[float],
    residual_coin: float,
) -> Verdict:
    """After full acceptance the next token is drawn from the draft's last law."""
    verdict = exact_rejection(tokens, law, draft_probs, accept_coins, residual_coin)
    if verdict.origin is not Origin.BONUS:
        return verdict
    q = _one_hot(law(ROOT), tokens[-1]) if draft_probs is None else draft_probs[-1]
    return _redrawn(verdict, q, residual_coin)


def row_behind(
    tokens: Sequence[int],
    law: TargetRows,
    draft_probs: Tensor | None,
    accept_coins: Sequence[float],
    residual_coin: float,
) -> Verdict:
    """Every row but the first is the one before it."""
    return exact_rejection(
        tokens, lambda node: law(max(node - 1, ROOT)), draft_probs, accept_coins, residual_coin
    )


def row_ahead(
    tokens: Sequence[int],
    law: TargetRows,
    draft_probs: Tensor | None,
    accept_coins: Sequence[float],
    residual_coin: float,
) -> Verdict:
    """Every row but the last is the one after it."""
    last = len(tokens) - 1
    return exact_rejection(
        tokens, lambda node: law(min(node + 1, last)), draft_probs, accept_coins, residual_coin
    )


def argmax_match(
    tokens: Sequence[int],
    law: TargetRows,
    draft_probs: Tensor | None,
    accept_coins: Sequence[float],
    residual_coin: float,
) -> Verdict:
    """Greedy verification above temperature 0."""
    chain = topology(tuple(range(-1, len(tokens) - 1)))
    return match(chain, tokens, lambda node: _ROW_MATH.argmax(law(node)))


def double_softmax(
    tokens: Sequence[int],
    law: TargetRows,
    draft_probs: Tensor | None,
    accept_coins: Sequence[float],
    residual_coin: float,
) -> Verdict:
    """Probabilities are taken for logits and normalised once more."""
    return exact_rejection(
        tokens,
        lambda node: torch.softmax(law(node), dim=-1),
        draft_probs,
        accept_coins,
        residual_coin,
    )


def inverted_ratio(
    tokens: Sequence[int],
    law: TargetRows,
    draft_probs: Tensor | None,
    accept_coins: Sequence[float],
    residual_coin: float,
) -> Verdict:
    """Accept iff coin < q / p: p and q swapped, as papers that call the draft p invite to."""
    for offset, token in enumerate(tokens):
        p = law(offset - 1)
        q = _one_hot(p, token) if draft_probs is None else draft_probs[offset]
        if accept_coins[offset] * float(p[token]) < float(q[token]):
            continue
        weights = (p - q).clamp(min=0.0)
        return Verdict(
            tuple(range(offset)),
            draw_from(weights, residual_coin, _ROW_MATH, fallback=p),
            Origin.RECOVERED,
        )
    bonus = draw_from(law(len(tokens) - 1), residual_coin, _ROW_MATH)
    return Verdict(tuple(range(len(tokens))), bonus, Origin.BONUS)


def dropped_below_threshold(
    tokens: Sequence[int],
    law: TargetRows,
    draft_probs: Tensor | None,
    accept_coins: Sequence[float],
    residual_coin: float,
) -> Verdict:
    """A token is drawn, then dropped with all after it because its own probability is below 0.3."""
    if draft_probs is None:
        return exact_rejection(tokens, law, draft_probs, accept_coins, residual_coin)
    kept = 0
    while kept < len(tokens) and float(draft_probs[kept, tokens[kept]]) >= 0.3:
        kept += 1
    return exact_rejection(tokens[:kept], law, draft_probs, accept_coins, residual_coin)


def softmax_for_fixed_draft(q: Tensor) -> ChainRule:
    """The draft was deterministic, but is verified as if each token had been drawn from `q` `[n,
    V]`.
    """

    def rule(
        tokens: Sequence[int],
        law: TargetRows,
        draft_probs: Tensor | None,
        accept_coins: Sequence[float],
        residual_coin: float,
    ) -> Verdict:
        return exact_rejection(tokens, law, q[: len(tokens)], accept_coins, residual_coin)

    return rule


def siblings_tried_alone(
    tree: Topology, tokens: Sequence[int], draw: Callable[[int], int]
) -> Verdict:
    """Each sibling is tried with a draw of its own, and p keeps those rejected."""
    node = ROOT
    path: list[int] = []
    while True:
        children = tree.children(node)
        child = next((child for child in children if draw(node) == tokens[child]), None)
        if child is None:
            return Verdict(tuple(path), draw(node), Origin.RECOVERED)
        path.append(child)
        node = child


def redrawn_after_mismatch(
    tree: Topology, tokens: Sequence[int], draw: Callable[[int], int]
) -> Verdict:
    """The draw that matched no child is thrown away and the next token drawn anew."""
    verdict = match(tree, tokens, draw)
    node = verdict.accepted[-1] if verdict.accepted else ROOT
    return Verdict(verdict.accepted, draw(node), verdict.origin)


def child_always_taken(
    tree: Topology, tokens: Sequence[int], draw: Callable[[int], int]
) -> Verdict:
    """The walk goes down to the first child even where no child was drawn."""
    node = ROOT
    path: list[int] = []
    while True:
        token = draw(node)
        children = tree.children(node)
        if not children:
            return Verdict(tuple(path), token, Origin.BONUS)
        node = next((child for child in children if tokens[child] == token), children[0])
        path.append(node)


SAMPLED_CHAIN_MUTANTS: Mapping[str, ChainRule] = {
    "no residual": no_residual,
    "residual from p": residual_from_p,
    "residual swapped": residual_swapped,
    "residual in place": residual_in_place,
    "bonus from the draft": bonus_from_draft,
    "row behind": row_behind,
    "row ahead": row_ahead,
    "argmax match": argmax_match,
    "double softmax": double_softmax,
    "inverted ratio": inverted_ratio,
    "dropped by own probability": dropped_below_threshold,
}
"""Wrong for drafts that were drawn from a law."""

FIXED_CHAIN_MUTANTS: Mapping[str, ChainRule] = {
    "no residual": no_residual,
    "residual swapped": residual_swapped,
    "residual in place": residual_in_place,
    "bonus from the draft": bonus_from_draft,
    "row behind": row_behind,
    "row ahead": row_ahead,
    "argmax match": argmax_match,
    "double softmax": double_softmax,
    "inverted ratio": inverted_ratio,
}
"""Wrong for deterministic drafts; `softmax_for_fixed_draft` beside them."""

TREE_MUTANTS: Mapping[str, TreeRule] = {
    "siblings tried alone": siblings_tried_alone,
    "redrawn after a mismatch": redrawn_after_mismatch,
    "child always taken": child_always_taken,
}
"""Wrong for deterministic trees."""


def _redrawn(verdict: Verdict, weights: Tensor, coin: float) -> Verdict:
    return Verdict(verdict.accepted, draw_from(weights, coin, _ROW_MATH), verdict.origin)


def _one_hot(like: Tensor, token: int) -> Tensor:
    row = torch.zeros_like(like)
    row[token] = 1.0
    return row
