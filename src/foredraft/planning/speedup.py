"""Expected tokens, speed-up and the best draft length of a chain, in closed form.

Knows acceptance rates and costs; knows no torch, no model and no clock. All costs are in plain
passes of the target: 1 is what a pass over one row costs. `verify_cost[n]` is the cost of a pass
over n + 1 rows, so `verify_cost[0]` is 1.

`acceptance` is conditional and by position: the probability that position i is accepted once all
before it were (`AcceptanceCounts.conditional_acceptance_by_position`). The i.i.d. forms are those
of Leviathan et al. (2211.17192, section 3); they overestimate long drafts, because rates fall with
the position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class DraftLength:
    """A draft length, and the speed-up expected of it."""

    num_draft_tokens: int
    speedup: float


def iid_expected_tokens(acceptance: float, num_draft_tokens: int) -> float:
    """`(1 - a^(k + 1)) / (1 - a)`: tokens per step, the extra one included.

    Raises:
        ValueError: a rate outside [0, 1], or a negative length.
    """
    _check_rates([acceptance])
    if num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens must be 0 or more, got {num_draft_tokens}")
    return sum(acceptance**i for i in range(num_draft_tokens + 1))


def iid_acceptance(num_accepted: int, num_rejections: int) -> float:
    """The maximum-likelihood rate: accepted / (accepted + steps that ended in a rejection).

    Accepted / drafted is censored instead: tokens behind a rejection were never tried. 0 where
    nothing was tried.
    """
    tried = num_accepted + num_rejections
    return num_accepted / tried if tried else 0.0


def expected_tokens(acceptance: Sequence[float]) -> float:
    """`1 + sum_j prod_{i <= j} a_i`: tokens per step of a draft as long as `acceptance`.

    Raises:
        ValueError: a rate outside [0, 1].
    """
    _check_rates(acceptance)
    total = survival = 1.0
    for rate in acceptance:
        survival *= rate
        total += survival
    return total


def step_cost(num_draft_tokens: int, draft_cost: float, verify_cost: Sequence[float]) -> float:
    """`k c + v(k + 1)`: one step that drafts k tokens at `draft_cost` each and verifies k + 1 rows.

    Raises:
        ValueError: `verify_cost` does not reach k + 1 rows.
    """
    if num_draft_tokens >= len(verify_cost):
        raise ValueError(
            f"a draft of {num_draft_tokens} tokens needs the cost of {num_draft_tokens + 1} rows,"
            f" verify_cost holds {len(verify_cost)}"
        )
    return num_draft_tokens * draft_cost + verify_cost[num_draft_tokens]


def speedup(acceptance: Sequence[float], draft_cost: float, verify_cost: Sequence[float]) -> float:
    """Expected tokens over the step's cost, for a draft as long as `acceptance`; 1 for the empty
    one.
    """
    cost = step_cost(len(acceptance), draft_cost, verify_cost)
    return expected_tokens(acceptance) * verify_cost[0] / cost


def best_draft_length(
    acceptance: Sequence[float], draft_cost: float, verify_cost: Sequence[float]
) -> DraftLength:
    """The length of 0 .. len(acceptance) with the highest speed-up, the shortest among equals.

    All are tried: measured costs are staircases, so the first length that does not pay need not be
        the last. 0 is one of them, and its speed-up is 1.
    """
    best = DraftLength(0, 1.0)
    for length in range(1, min(len(acceptance), len(verify_cost) - 1) + 1):
        gain = speedup(acceptance[:length], draft_cost, verify_cost)
        if gain > best.speedup:
            best = DraftLength(length, gain)
    return best


def speedup_ceiling(acceptance: float, draft_cost: float = 0.0) -> float:
    """What no draft length beats: the best speed-up with equal rates where verification is free.

    `1 / (1 - a)` where drafting is free too (Leviathan et al., section 3.3); with `draft_cost` c,
    the best of `(1 - a^(k + 1)) / ((1 - a)(k c + 1))`. Infinite for a = 1 and c = 0.

    Raises:
        ValueError: a rate outside [0, 1], or a negative cost.
    """
    _check_rates([acceptance])
    if draft_cost < 0:
        raise ValueError(f"draft_cost must be 0 or more, got {draft_cost}")
    if draft_cost == 0:
        return 1.0 / (1.0 - acceptance) if acceptance < 1 else inf
    if acceptance == 1:
        return max(1.0, 1.0 / draft_cost)  # (k + 1) / (k c + 1): 1 at k = 0, 1 / c without end
    tokens = survival = best = 1.0
    cost = 1.0
    # Another token pays while what it brings for its cost exceeds the ratio so far.
    while (survival := survival * acceptance) > draft_cost * best:
        tokens, cost = tokens + survival, cost + draft_cost
        best = tokens / cost
    return best


def _check_rates(rates: Sequence[float]) -> None:
    for rate in rates:
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"an acceptance rate must be in [0, 1], got {rate}")
