"""Wrong acceptance rules, each a mistake somebody made. A check of exactness that lets one pass
checks nothing.

Knows the signature of `law.Rule`; here are those for chains and for deterministic trees, in
`tree_mutants` those for trees of drawn siblings, in `block_mutants` those for block verification.
Nothing here may be used to decode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.core.acceptance import Coins, Origin, Rows, Verdict, Walk, draw_from, match
from foredraft.core.trees import ROOT, Topology, chain
from foredraft.testing.law import ROW_MATH, Rule, drawing, exact_rejection


@dataclass(frozen=True, slots=True)
class Case:
    """What a rule is given."""

    tree: Topology
    tokens: Sequence[int]
    probs: Rows | None
    accept_coin: Coins
    residual_coin: float

    def by(self, rule: Rule) -> Walk[Tensor]:
        return rule(self.tree, self.tokens, self.probs, self.accept_coin, self.residual_coin)

    def q(self, node: int, like: Tensor) -> Tensor:
        """The law that a node was drawn from, one-hot where it is deterministic."""
        return one_hot(like, self.tokens[node]) if self.probs is None else self.probs[node]


Mutant = Callable[[Case], Walk[Tensor]]


def as_rule(mutant: Mutant) -> Rule:
    """A mutant as a rule."""

    def rule(
        tree: Topology,
        tokens: Sequence[int],
        draft_probs: Rows | None,
        accept_coin: Coins,
        residual_coin: float,
    ) -> Walk[Tensor]:
        return mutant(Case(tree, tokens, draft_probs, accept_coin, residual_coin))

    return rule


def altered(
    walk: Walk[Tensor],
    asked: Callable[[int], int] = lambda node: node,
    law: Callable[[Tensor], Tensor] = lambda row: row,
) -> Walk[Tensor]:
    """A walk that is shown the row of `asked(node)`, as `law` spoils it."""
    node = next(walk)
    while True:
        row = yield asked(node)
        try:
            node = walk.send(law(row))
        except StopIteration as end:
            verdict: Verdict = end.value
            return verdict


def redrawn(verdict: Verdict, weights: Tensor, case: Case) -> Verdict:
    """The next token drawn from other weights."""
    token = draw_from(weights, case.residual_coin, ROW_MATH)
    return Verdict(verdict.accepted, token, verdict.origin)


def end_of(verdict: Verdict) -> int:
    """The node whose row the next token came from."""
    return verdict.accepted[-1] if verdict.accepted else ROOT


def one_hot(like: Tensor, token: int) -> Tensor:
    row = torch.zeros_like(like)
    row[token] = 1.0
    return row


def no_residual(case: Case) -> Walk[Tensor]:
    """After a rejection the next token is drawn from p itself."""
    verdict = yield from case.by(exact_rejection)
    return redrawn(verdict, (yield end_of(verdict)), case)


def residual_from_p(case: Case) -> Walk[Tensor]:
    """The residual of a sampled draft is p without the rejected token, as if the draft were one-
    hot.
    """
    verdict = yield from case.by(exact_rejection)
    if verdict.origin is not Origin.RECOVERED:
        return verdict
    weights = (yield end_of(verdict)).clone()
    weights[case.tokens[verdict.num_accepted]] = 0.0
    return redrawn(verdict, weights, case)


def residual_swapped(case: Case) -> Walk[Tensor]:
    """The residual is (q - p)+."""
    verdict = yield from case.by(exact_rejection)
    if verdict.origin is not Origin.RECOVERED:
        return verdict
    p = yield end_of(verdict)
    return redrawn(verdict, (case.q(verdict.num_accepted, p) - p).clamp(min=0.0), case)


def residual_in_place(case: Case) -> Walk[Tensor]:
    """The residuals of all rows are written over the rows before the acceptance test reads them."""
    walk = case.by(exact_rejection)
    node = next(walk)
    while True:
        row = yield node
        if node + 1 < len(case.tokens):
            spoilt = (row - case.q(node + 1, row)).clamp(min=0.0)
            row = spoilt if float(spoilt.sum()) > 0.0 else row
        try:
            node = walk.send(row)
        except StopIteration as end:
            verdict: Verdict = end.value
            return verdict


def bonus_from_draft(case: Case) -> Walk[Tensor]:
    """After full acceptance the next token is drawn from the draft's last law."""
    verdict = yield from case.by(exact_rejection)
    if verdict.origin is not Origin.BONUS:
        return verdict
    end = end_of(verdict)
    return redrawn(verdict, case.q(end, (yield end)), case)


def row_behind(case: Case) -> Walk[Tensor]:
    """Every row but the first is the one before it."""
    return altered(case.by(exact_rejection), asked=lambda node: max(node - 1, ROOT))


def row_ahead(case: Case) -> Walk[Tensor]:
    """Every row but the last is the one after it."""
    last = len(case.tokens) - 1
    return altered(case.by(exact_rejection), asked=lambda node: min(node + 1, last))


def argmax_match(case: Case) -> Walk[Tensor]:
    """Greedy verification above temperature 0."""
    tokens = altered(
        drawing(match(case.tree, case.tokens), case.accept_coin),
        law=lambda row: one_hot(row, ROW_MATH.argmax_rows(row[None])[0]),
    )
    return (yield from tokens)


def double_softmax(case: Case) -> Walk[Tensor]:
    """Probabilities are taken for logits and normalised once more."""
    return altered(case.by(exact_rejection), law=lambda row: torch.softmax(row, dim=-1))


def inverted_ratio(case: Case) -> Walk[Tensor]:
    """Accept iff coin < q / p: p and q swapped, as papers that call the draft p invite to."""
    for offset, token in enumerate(case.tokens):
        p = yield offset - 1
        q = case.q(offset, p)
        if case.accept_coin(offset) * float(p[token]) < float(q[token]):
            continue
        token = draw_from((p - q).clamp(min=0.0), case.residual_coin, ROW_MATH, fallback=p)
        return Verdict(tuple(range(offset)), token, Origin.RECOVERED)
    p = yield len(case.tokens) - 1
    bonus = draw_from(p, case.residual_coin, ROW_MATH)
    return Verdict(tuple(range(len(case.tokens))), bonus, Origin.BONUS)


def dropped_below_threshold(case: Case) -> Walk[Tensor]:
    """A token is drawn, then dropped with all after it because its own probability is below 0.3."""
    if case.probs is None:
        return case.by(exact_rejection)
    kept = 0
    while kept < len(case.tokens) and float(case.probs[kept][case.tokens[kept]]) >= 0.3:
        kept += 1
    return replace(case, tree=chain(kept), tokens=case.tokens[:kept]).by(exact_rejection)


def softmax_for_fixed_draft(q: Tensor) -> Rule:
    """The draft was deterministic, but is verified as if each token had been drawn from `q` `[n,
    V]`.
    """
    return as_rule(lambda case: replace(case, probs=q).by(exact_rejection))


def siblings_tried_alone(case: Case) -> Walk[Tensor]:
    """Each sibling is tried with a draw of its own, and p keeps those rejected."""
    node = ROOT
    path: list[int] = []
    while True:
        p = yield node
        children = case.tree.children(node)
        standing = (
            child
            for child in children
            if draw_from(p, case.accept_coin(child), ROW_MATH) == case.tokens[child]
        )
        child = next(standing, None)
        if child is None:
            token = draw_from(p, case.residual_coin, ROW_MATH)
            return Verdict(tuple(path), token, Origin.RECOVERED)
        path.append(child)
        node = child


def redrawn_after_mismatch(case: Case) -> Walk[Tensor]:
    """The draw that matched no child is thrown away and the next token drawn anew."""
    verdict = yield from drawing(match(case.tree, case.tokens), case.accept_coin)
    return redrawn(verdict, (yield end_of(verdict)), case)


def child_always_taken(case: Case) -> Walk[Tensor]:
    """The walk goes down to the first child even where no child was drawn."""
    node = ROOT
    path: list[int] = []
    while True:
        token = draw_from((yield node), case.accept_coin(node), ROW_MATH)
        children = case.tree.children(node)
        if not children:
            return Verdict(tuple(path), token, Origin.BONUS)
        node = next((child for child in children if case.tokens[child] == token), children[0])
        path.append(node)


FIXED_CHAIN_MUTANTS: Mapping[str, Mutant] = {
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
"""Wrong for deterministic chains; `softmax_for_fixed_draft` beside them."""

SAMPLED_CHAIN_MUTANTS: Mapping[str, Mutant] = {
    **FIXED_CHAIN_MUTANTS,
    "residual from p": residual_from_p,
    "dropped by own probability": dropped_below_threshold,
}
"""Wrong for chains that were drawn from a law."""

FIXED_TREE_MUTANTS: Mapping[str, Mutant] = {
    "siblings tried alone": siblings_tried_alone,
    "redrawn after a mismatch": redrawn_after_mismatch,
    "child always taken": child_always_taken,
}
"""Wrong for deterministic trees."""
