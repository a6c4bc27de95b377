"""The statistics of the certificate: Pearson's test, its power, and a family of tests.

Knows counts and probabilities; knows nothing of what was counted. Pure functions of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_CERTAIN = 1e6  # a noncentrality that no test of ours misses
_TAILS = 12.0  # standard deviations of the Poisson mixture that are summed on each side


def survival(statistic: float, df: int) -> float:
    """P(chi-square with `df` degrees of freedom >= `statistic`); 0 where that is infinite."""
    if math.isinf(statistic):
        return 0.0
    return float(_upper_gamma(torch.tensor([df / 2.0], dtype=torch.float64), statistic))


def noncentral_survival(statistic: float, df: int, noncentrality: float) -> float:
    """P(noncentral chi-square >= `statistic`): a Poisson mixture of central ones.

    The number of extra pairs of degrees of freedom is Poisson with mean `noncentrality / 2`
    (Johnson, Kotz, Balakrishnan, Continuous Univariate Distributions 2, chapter 29).
    """
    mean = noncentrality / 2.0
    if mean == 0.0:
        return survival(statistic, df)
    reach = _TAILS * math.sqrt(mean) + _TAILS
    pairs = torch.arange(max(0, int(mean - reach)), int(mean + reach) + 1, dtype=torch.float64)
    weights = torch.exp(pairs * math.log(mean) - mean - torch.lgamma(pairs + 1.0))
    return min(1.0, float(weights @ _upper_gamma(df / 2.0 + pairs, statistic)))


def critical_value(df: int, level: float) -> float:
    """The statistic that is reached with probability `level`, `0 < level < 1`."""
    return _bisect(lambda statistic: survival(statistic, df) <= level)


def power(df: int, noncentrality: float, level: float) -> float:
    """P(a test at `level` rejects) where the statistic has this noncentrality."""
    if noncentrality > _CERTAIN:
        return 1.0
    return noncentral_survival(critical_value(df, level), df, noncentrality)


def draws_for(df: int, level: float, total_variation: float, wanted: float) -> int:
    """Draws with which a law off by `total_variation` between cells is caught with P >= `wanted`.

    n draws give the noncentrality `n sum((m - p)^2 / p)`, at least `n (2 TV)^2` by Cauchy and
    Schwarz: it is the law that is hardest to see which these draws are enough for.
    """
    enough = _bisect(lambda noncentrality: power(df, noncentrality, level) >= wanted)
    return math.ceil(enough / (2.0 * total_variation) ** 2)


def smallest_variation(df: int, level: float, draws: int, wanted: float) -> float:
    """The total variation that `draws` catch with P >= `wanted`, the inverse of `draws_for`."""
    enough = _bisect(lambda noncentrality: power(df, noncentrality, level) >= wanted)
    return math.sqrt(enough / draws) / 2.0


def divergence(other: Tensor, probs: Tensor) -> float:
    """`sum (m - p)^2 / p`, the noncentrality of one draw; infinite where only `other` has mass."""
    possible = probs > 0
    if bool((other[~possible] > 0).any()):
        return math.inf
    return float(((other - probs)[possible].square() / probs[possible]).sum())


def pearson(observed: Tensor, probs: Tensor) -> tuple[float, int, float]:
    """Statistic, degrees of freedom and p-value of counts `[C]` under cell probabilities `[C]`.

    A cell of probability 0 adds no degree of freedom; a count in it makes the statistic infinite.
    """
    draws = float(observed.sum())
    df = max(int((probs > 0).sum()) - 1, 0)
    statistic = divergence(observed / draws, probs) * draws if draws else 0.0
    if df == 0 and math.isfinite(statistic):
        return 0.0, 0, 1.0  # one cell: it holds all, whatever happened
    return statistic, df, survival(statistic, df)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values: those at most e are wrong with probability e at most, all together.

    Holm (1979). The i-th smallest of m is multiplied by m - i + 1, and never below the one before.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def _upper_gamma(shape: Tensor, statistic: float) -> Tensor:
    tail: Tensor = torch.special.gammaincc(shape, torch.full_like(shape, statistic / 2.0))
    return tail


def _bisect(reached: Callable[[float], bool]) -> float:
    """Where `reached`, false up to one point above 0 and true beyond, turns true."""
    low, high = 0.0, 1.0
    while not reached(high):
        low, high = high, 2.0 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high
