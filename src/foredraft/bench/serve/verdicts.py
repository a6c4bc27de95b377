"""Whether a policy kept what it promises: near the best fixed width alone, plain decoding's speed
in a crowd, and nowhere far below the better of the two.

Knows results and bounds; measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LEAST_OF_BEST_FIXED_ALONE = 0.97  # at 1 request
LEAST_OF_PLAIN_IN_A_CROWD = 0.98  # at 32 and more
LEAST_OF_THE_BETTER = 0.95  # anywhere
CROWD = 32
LARGEST_OVERHEAD = {1: 0.05, CROWD: 0.08}  # of the step, over its pass, in plain decoding
PLAIN_RATES = {8: 150.0, CROWD: 170.0}  # tokens a second
LEAST_WIDTH_0_SHARE = 0.95  # where drafts can't pay


def verdicts(
    points: Sequence[Mapping[str, Any]],
    comparisons: Sequence[Mapping[str, Any]],
    objectives: Mapping[str, str],
    *,
    hopeless: bool = False,
) -> list[dict[str, Any]]:
    """A line for each promise: what, where, value, bound, and whether it holds.

    `objectives` maps the labels of policies to the measure that each is to be best at; `hopeless`
    asks instead that they lose nothing to plain decoding, and hardly draft where no fixed width is
    faster than that (where one is, the promise is not judged).
    """
    found: list[dict[str, Any]] = []
    for each in comparisons:
        measure = objectives.get(each["label"])
        if measure is not None and each.get("concurrency"):
            found += _of_policy(each, each[measure], hopeless)
    for point in points:
        measure = objectives.get(point["label"])
        if hopeless and measure is not None:
            line = _line("steps of width 0", point, point["width_0_share"], LEAST_WIDTH_0_SHARE)
            if _a_width_pays(comparisons, point, measure):
                line["holds"] = None
            found.append(line)
        if not hopeless and point["label"] == "plain":
            found += _of_plain(point)
    return found


def _of_policy(
    place: Mapping[str, Any], ratios: Mapping[str, Any], hopeless: bool
) -> list[dict[str, Any]]:
    found = []
    concurrency = place["concurrency"]
    if concurrency >= CROWD or hopeless:
        value = _median(ratios["over_plain"])
        found.append(_line("of plain", place, value, LEAST_OF_PLAIN_IN_A_CROWD))
    if hopeless:
        return found
    if concurrency == 1:
        value = _median(ratios["over_best_fixed"])
        found.append(_line("of the best fixed width", place, value, LEAST_OF_BEST_FIXED_ALONE))
    value = _median(ratios["over_better"])
    found.append(_line("of the better of plain and fixed", place, value, LEAST_OF_THE_BETTER))
    return found


def _a_width_pays(
    comparisons: Sequence[Mapping[str, Any]], point: Mapping[str, Any], measure: str
) -> bool:
    """Whether a fixed width is faster than plain decoding at this level."""
    here = {
        each["label"]: each[measure]
        for each in comparisons
        if all(each.get(key) == point.get(key) for key in ("concurrency", "rate"))
    }
    best = here.get(here[point["label"]]["best_fixed"])
    ratio = None if best is None else _median(best["over_plain"])
    return ratio is not None and ratio > 1.0


def _of_plain(point: Mapping[str, Any]) -> list[dict[str, Any]]:
    concurrency = point.get("concurrency")
    found = []
    if concurrency in PLAIN_RATES:
        rate = point["tokens_per_second"]
        found.append(_line("tokens a second", point, rate, PLAIN_RATES[concurrency]))
    if concurrency in LARGEST_OVERHEAD and point.get("step_overhead") is not None:
        bound = LARGEST_OVERHEAD[concurrency]
        value = point["step_overhead"]
        found.append(_line("step overhead", point, value, bound, at_most=True))
    return found


def _line(
    what: str, place: Mapping[str, Any], value: float | None, bound: float, *, at_most: bool = False
) -> dict[str, Any]:
    holds = None
    if value is not None:
        holds = value <= bound if at_most else value >= bound
    return {
        "what": what,
        "label": place["label"],
        "concurrency": place.get("concurrency"),
        "value": value,
        "bound": bound,
        "at_most": at_most,
        "holds": holds,
    }


def _median(ratios: Mapping[str, float] | None) -> float | None:
    return None if ratios is None else ratios["p50"]
