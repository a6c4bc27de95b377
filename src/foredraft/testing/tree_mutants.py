"""Wrong rules for trees whose siblings were drawn: each spoils one thing that rejection needs.

Knows the signature of `law.Rule`. Nothing here may be used to decode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from foredraft.core.acceptance import Origin, Rows, Verdict, Walk, draw_from
from foredraft.core.rejection import residual
from foredraft.core.trees import ROOT
from foredraft.testing.law import ROW_MATH, Rule, exact_rejection
from foredraft.testing.mutants import Case, Mutant, as_rule, bonus_from_draft, no_residual

# What is left of p after the rejection of a child, of (p, R before it, the child's token and q).
Left = Callable[[Tensor, Tensor, int, Tensor], Tensor]
Order = Callable[[Case, Sequence[int]], Sequence[int]]


def _spoilt(case: Case, left: Left, order: Order = lambda case, children: children) -> Walk[Tensor]:
    """Recursive rejection with another update, or another order."""
    node = ROOT
    path: list[int] = []
    while True:
        p = yield node
        rest, taken = p, None
        children = case.tree.children(node)
        for child in order(case, children):
            token, q = case.tokens[child], case.q(child, p)
            if case.accept_coin(child) * float(q[token]) < float(rest[token]):
                taken = child
                break
            rest = left(p, rest, token, q)
        if taken is None:
            origin = Origin.RECOVERED if children else Origin.BONUS
            token = draw_from(rest, case.residual_coin, ROW_MATH, fallback=p)
            return Verdict(tuple(path), token, origin)
        path.append(taken)
        node = taken


def _normalised(weights: Tensor) -> Tensor:
    total = float(weights.sum())
    return weights / total if total > 0.0 else weights


def rejected_without_update(case: Case) -> Walk[Tensor]:
    """Each sibling is tried against p itself; only the last one's residual is drawn from."""
    walk = _spoilt(case, lambda p, rest, token, q: p)
    verdict = yield from walk
    if verdict.origin is not Origin.RECOVERED:
        return verdict
    node = verdict.accepted[-1] if verdict.accepted else ROOT
    p = yield node
    last = case.tree.children(node)[-1]
    rest = residual(p, case.tokens[last], case.q(last, p))
    token = draw_from(rest, case.residual_coin, ROW_MATH, fallback=p)
    return Verdict(verdict.accepted, token, verdict.origin)


def residual_of_p_each_time(case: Case) -> Walk[Tensor]:
    """Every rejection starts again from p: R = (p - q_i)+ of the last one only."""
    return _spoilt(case, lambda p, rest, token, q: _normalised(residual(p, token, q)))


def residual_not_normalised(case: Case) -> Walk[Tensor]:
    """What a rejection leaves of p is used as it is."""
    return _spoilt(case, lambda p, rest, token, q: residual(rest, token, q))


def rejected_token_removed(case: Case) -> Walk[Tensor]:
    """A drawn sibling is treated as a deterministic one after its rejection."""
    return _spoilt(case, lambda p, rest, token, q: _normalised(residual(rest, token, None)))


def siblings_sorted(case: Case) -> Walk[Tensor]:
    """Siblings are verified most likely first, not in the order they were drawn in."""

    def by_probability(case: Case, children: Sequence[int]) -> Sequence[int]:
        first = case.probs[children[0]] if case.probs is not None and children else None
        if first is None:
            return children
        return sorted(children, key=lambda child: -float(first[case.tokens[child]]))

    return _spoilt(case, _exact_update, by_probability)


def siblings_reversed(case: Case) -> Walk[Tensor]:
    """The last one drawn is verified first."""
    return _spoilt(case, _exact_update, lambda case, children: children[::-1])


def _exact_update(p: Tensor, rest: Tensor, token: int, q: Tensor) -> Tensor:
    return _normalised(residual(rest, token, q))


class _NotNormalised:
    """The first sibling's row without the tokens of the earlier siblings."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __getitem__(self, node: int) -> Tensor:
        case = self._case
        siblings = case.tree.children(case.tree.parents[node])
        assert case.probs is not None
        row = case.probs[siblings[0]].clone()
        row[[case.tokens[each] for each in siblings if each < node]] = 0.0
        return row if float(row.sum()) > 0.0 else case.probs[node]


def draft_not_normalised(case: Case) -> Walk[Tensor]:
    """q without the siblings already rejected is not normalised again."""
    return replace(case, probs=_NotNormalised(case)).by(exact_rejection)


def top_siblings_as_drawn(q: Callable[[int], Tensor]) -> Rule:
    """Deterministic siblings, the most likely of `q(node)`, are verified as if drawn from it."""

    class Softmax:
        def __getitem__(self, node: int) -> Tensor:
            return q(node)

    rows: Rows = Softmax()
    return as_rule(lambda case: replace(case, probs=rows).by(exact_rejection))


WITHOUT_REPLACEMENT_MUTANTS: Mapping[str, Mutant] = {
    "no residual": no_residual,
    "rejected without update": rejected_without_update,
    "residual of p each time": residual_of_p_each_time,
    "residual not normalised": residual_not_normalised,
    "rejected token removed": rejected_token_removed,
    "siblings sorted": siblings_sorted,
    "siblings reversed": siblings_reversed,
    "draft not normalised": draft_not_normalised,
    "bonus from the draft": bonus_from_draft,
}
"""Wrong for trees whose siblings were drawn without replacement; `top_siblings_as_drawn` beside
them, for siblings that were not drawn.
"""
