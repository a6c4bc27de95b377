"""Wrong block verifications: shortcuts that look like it.

Knows the signature of `law.Rule`, chains only. Nothing here may be used to decode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from foredraft.core.acceptance import Origin, Verdict, Walk, draw_from
from foredraft.core.rejection import residual
from foredraft.testing.branches import Choices
from foredraft.testing.law import ROW_MATH
from foredraft.testing.mutants import Case, Mutant

LATTICE = 16  # points of a coin where a rule multiplies coins, which has no exact integral

Bar = Callable[[float, float], float]  # (P_i, S_i) -> what a coin must stay below


def lattice_coin(choices: Choices) -> float:
    """A coin that takes the middles of `LATTICE` equal parts of (0, 1)."""
    return (choices.choose([1.0] * LATTICE) + 0.5) / LATTICE


def _exact_bar(kept: float, total: float) -> float:
    missing = total + 1.0 - kept
    return total / missing if missing > 0.0 else 1.0


def _spoilt(
    case: Case,
    *,
    most: float = 1.0,
    bar: Bar = _exact_bar,
    until_first_failure: bool = False,
    weigh: Callable[[float], float] = lambda kept: kept,
    row_before: bool = False,
) -> Walk[Tensor]:
    """Block verification with another cap of P_i, bar, order, residual weight, or draft row."""
    count = len(case.tokens)
    laws: list[Tensor] = []
    kept = [1.0]
    for node, token in enumerate(case.tokens):
        p = yield node - 1
        laws.append(p)
        kept.append(min(kept[-1] * float(p[token]) / float(case.q(node, p)[token]), most))

    def stands(i: int) -> bool:
        if i == count:
            return case.accept_coin(i - 1) < kept[i]
        total = float(residual(kept[i] * laws[i], case.tokens[i], case.q(i, laws[i])).sum())
        return case.accept_coin(i - 1) < bar(kept[i], total)

    standing = 0
    if until_first_failure:
        while standing < count and stands(standing + 1):
            standing += 1
    else:
        standing = next((i for i in range(count, 0, -1) if stands(i)), 0)
    drafted = max(standing - 1, 0) if row_before else standing
    return (yield from _ended(case, standing, weigh(kept[standing]), drafted))


def _ended(case: Case, standing: int, kept: float, drafted: int) -> Walk[Tensor]:
    """The verdict where `standing` tokens stand: a draw from `(kept p - q_drafted)+`."""
    p = yield standing - 1
    if standing == len(case.tokens):
        weights, origin = p, Origin.BONUS
    else:
        q = case.q(drafted, p)
        weights, origin = residual(kept * p, case.tokens[drafted], q), Origin.RECOVERED
    token = draw_from(weights, case.residual_coin, ROW_MATH, fallback=p)
    return Verdict(tuple(range(standing)), token, origin)


def product_against_product(case: Case) -> Walk[Tensor]:
    """The product of the ratios p / q against the product of the coins; the residual of one token.

    To be run with `lattice_coin`.
    """
    ratios = coins = 1.0
    standing = 0
    for node, token in enumerate(case.tokens):
        p = yield node - 1
        ratios *= float(p[token]) / float(case.q(node, p)[token])
        coins *= case.accept_coin(node)
        if coins < ratios:
            standing = node + 1
    return (yield from _ended(case, standing, 1.0, standing))


def residual_of_one_token(case: Case) -> Walk[Tensor]:
    """The residual is (p - q)+, whatever was kept before it."""
    return _spoilt(case, weigh=lambda kept: 1.0)


def until_the_first_failure(case: Case) -> Walk[Tensor]:
    """The first failure ends the block, as it does token by token."""
    return _spoilt(case, until_first_failure=True)


def product_not_capped(case: Case) -> Walk[Tensor]:
    """P_i is the plain product of the ratios."""
    return _spoilt(case, most=float("inf"), weigh=lambda kept: min(kept, 1.0))


def product_as_bar(case: Case) -> Walk[Tensor]:
    """Every coin is held against P_i, as the last one is."""
    return _spoilt(case, bar=lambda kept, total: kept)


def total_as_bar(case: Case) -> Walk[Tensor]:
    """h_i is S_i, not S_i / (S_i + 1 - P_i)."""
    return _spoilt(case, bar=lambda kept, total: total)


def draft_row_before(case: Case) -> Walk[Tensor]:
    """The residual subtracts the law of the last token that stands, not of the one after it."""
    return _spoilt(case, row_before=True)


BLOCK_MUTANTS: Mapping[str, Mutant] = {
    "residual of one token": residual_of_one_token,
    "until the first failure": until_the_first_failure,
    "product not capped": product_not_capped,
    "product as bar": product_as_bar,
    "total as bar": total_as_bar,
    "draft row before": draft_row_before,
}
"""Wrong for drawn chains; `product_against_product` beside them, which needs `lattice_coin`."""
