"""Which draft tokens a step should carry: the nodes that promise most, as many as pay together.

Knows promises and costs; knows no request's history, no policy and no clock. Survival never rises
along a draft, so the best B nodes of a step are the B likeliest ones, and B is found by trying
every one: measured costs are staircases, where the first node that doesn't pay need not be the
last (SmartSpec 2406.14066; the greedy choice is optimal because the cost depends on the total).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from foredraft.planning.cost import CostCurve
from foredraft.planning.estimates import Outlook
from foredraft.planning.policy import Load


class Objective(StrEnum):
    """What a step is to be best at.

    Throughput: tokens committed a second by all requests together. A prompt's tokens count: time
    that drafts take from a prompt is not free. Latency: those of the requests that decode, whatever
    waits, each by what it is worth to its reader (`readers.py`); a prompt that is read beside them
    costs the same whatever is drafted, and a step that it makes long is no reason to make it
    longer: it is left out.
    """

    THROUGHPUT = "throughput"
    LATENCY = "latency"


@dataclass(frozen=True, slots=True)
class Costs:
    """What steps cost: the target's passes, and the drafter's in proportion to them."""

    curve: CostCurve
    draft_ratio: float = 0.0  # seconds of drafting one token / of a pass over as many rows


@dataclass(frozen=True, slots=True)
class Prospect:
    """One request that may be drafted for."""

    outlook: Outlook
    num_positions: int = 0  # that each of its rows reads
    weight: float = 1.0  # of its tokens, 1 on average


@dataclass(frozen=True, slots=True)
class Allocation:
    """Widths, and what they promise: the objective's value, more is better."""

    widths: list[int]
    score: float


def rows_that_count(load: Load, objective: Objective) -> int:
    """Rows before any draft whose tokens are the objective's."""
    return load.num_requests if objective is Objective.LATENCY else load.num_rows


class _Step:
    """A step that nodes are added to, one by one, each request's in order."""

    def __init__(
        self,
        load: Load,
        prospects: Sequence[Prospect],
        costs: Costs,
        objective: Objective,
    ) -> None:
        self._prospects, self._costs = prospects, costs
        self._rows = rows_that_count(load, objective)
        curve = costs.curve
        self._beside = curve.beside_rows(load.num_requests, load.num_positions)
        self._plain = curve.of_rows(self._rows)
        latency = objective is Objective.LATENCY
        self._tokens = float(len(prospects) if latency else load.num_rows)
        self._filled = 0.0
        self._none = 1.0  # P(no drafter finds anything)
        self._drafting: list[int] = []  # requests that draft so deep
        self.widths = [0] * len(prospects)

    def add(self, index: int) -> None:
        prospect, depth = self._prospects[index], self.widths[index]
        filled = prospect.outlook.filled[depth]
        self._tokens += prospect.weight * filled * prospect.outlook.survival[depth]
        self._filled += filled
        if depth == 0:
            self._none *= 1.0 - filled
        curve, ratio = self._costs.curve, self._costs.draft_ratio
        if ratio:
            if depth == len(self._drafting):
                self._drafting.append(0)
            before = self._drafting[depth]
            self._drafting[depth] = before + 1
            self._beside += ratio * (curve.of_rows(before + 1) - curve.of_rows(before))
        self._beside += curve.row_position_seconds * prospect.num_positions * filled
        self.widths[index] = depth + 1

    @property
    def seconds(self) -> float:
        """Expected: plain where nobody finds a draft, else with as many rows as are found then."""
        some = 1.0 - self._none
        if not some:
            return self._plain + self._beside
        drafted = self._costs.curve.of_rows(self._rows + self._filled / some)
        return self._none * self._plain + some * drafted + self._beside

    @property
    def score(self) -> float:
        return self._tokens / self.seconds


def score(
    widths: Sequence[int],
    load: Load,
    prospects: Sequence[Prospect],
    costs: Costs,
    objective: Objective,
) -> float:
    """What these widths promise: tokens a second."""
    step = _Step(load, prospects, costs, objective)
    for index, width in enumerate(widths):
        for _ in range(width):
            step.add(index)
    return step.score


def allocate(
    load: Load,
    prospects: Sequence[Prospect],
    costs: Costs,
    objective: Objective,
) -> tuple[Allocation, Allocation]:
    """The best widths, and plain decoding to compare them with. The fewest nodes among equals."""
    step = _Step(load, prospects, costs, objective)
    best = plain = Allocation(list(step.widths), step.score if prospects else 0.0)
    for index in _by_promise(prospects):
        step.add(index)
        value = step.score
        if value > best.score:
            best = Allocation(list(step.widths), value)
    return best, plain


def _by_promise(prospects: Sequence[Prospect]) -> list[int]:
    """The request of every node, the node that promises most for a row first."""
    gains = [[each.weight * alive for alive in each.outlook.survival] for each in prospects]
    return [index for _, _, index in _falling(gains)]


def _falling(gains: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """(-gain, depth, request) of every node, the largest gain first."""
    nodes = [
        (-gain, depth, index)
        for index, falling in enumerate(gains)
        for depth, gain in enumerate(falling)
    ]
    nodes.sort()
    return nodes


def best_nodes(
    load: Load,
    gains: Sequence[Sequence[float]],
    positions: Sequence[int],
    curve: CostCurve,
    objective: Objective,
) -> list[int]:
    """How many nodes to verify of each of several drafts that are there: as `allocate`, where
    nothing is in doubt but acceptance. This runs in every step with drafts.

    Requests without a draft are in `load`: a longer step is longer for them too.

    Args:
        gains: tokens that the nodes of each draft bring, falling, by what they are worth.
        positions: that a row of each of these requests reads.
    """
    nodes, rows = _falling(gains), rows_that_count(load, objective)
    passes = curve.of_each(rows, len(nodes) + 1)
    beside = curve.beside_rows(load.num_requests, load.num_positions)
    tokens = float(rows)  # one a row that counts
    reading = [curve.row_position_seconds * each for each in positions]
    best, score = 0, tokens / (passes[0] + beside)
    for count, (loss, _, index) in enumerate(nodes, start=1):
        tokens -= loss
        beside += reading[index]
        value = tokens / (passes[count] + beside)
        if value > score:
            best, score = count, value
    widths = [0] * len(gains)
    for _, _, index in nodes[:best]:
        widths[index] += 1
    return widths
