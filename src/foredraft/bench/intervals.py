"""Spreads and intervals of measured figures. Knows numbers only."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import quantiles
from typing import TypeVar

T = TypeVar("T")
RESAMPLES = 2000


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Quartiles `{"p25", "p50", "p75"}`; None without values."""
    if not values:
        return None
    if len(values) == 1:
        return dict.fromkeys(("p25", "p50", "p75"), values[0])
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return {"p25": low, "p50": middle, "p75": high}


def bootstrap_interval(
    items: Sequence[T], statistic: Callable[[Sequence[T]], float]
) -> list[float] | None:
    """95% percentile interval of a statistic over resampled items (one per prompt); None under two.

    The resampling is seeded: the same measurements give the same interval.
    """
    if len(items) < 2:
        return None
    draw = random.Random(0)
    values = sorted(statistic(draw.choices(items, k=len(items))) for _ in range(RESAMPLES))
    return [values[round(0.025 * (RESAMPLES - 1))], values[round(0.975 * (RESAMPLES - 1))]]
