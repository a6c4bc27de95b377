"""What a drafter is worth with drafts of so many nodes and so many requests at once, from one wide
run and what passes cost.

Knows steps, seconds and cost curves; knows no engine and no clock. A step's predicted seconds are
the cost of a pass over as many rows as it would have had, what the drafter takes to find so many
nodes, and the rest (scheduling, verification, commit): where nothing is found, one row is paid for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean

from foredraft.bench.plan.replay import ReplayedStep, replay
from foredraft.bench.plan.trace import Text
from foredraft.planning.cost import CostCurve

ENOUGH = 8  # passes of so many rows, to believe their seconds

Passes = Mapping[int, tuple[int, float, float]]  # by rows: how many, mean positions, mean seconds


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a step as a function of its draft nodes: `fixed + slope * nodes`."""

    fixed: float
    slope: float = 0.0

    @classmethod
    def through(cls, narrow: tuple[float, float], wide: tuple[float, float]) -> Line:
        """Through two (mean nodes, mean seconds); never falling, never below 0."""
        (few, less), (many, more) = narrow, wide
        slope = max(0.0, (more - less) / (many - few)) if many > few else 0.0
        middle = (few + many) / 2, (less + more) / 2
        fixed = middle[1] - slope * middle[0]
        if fixed < 0:
            return cls(0.0, middle[1] / middle[0])
        return cls(fixed, slope)

    def at(self, nodes: float) -> float:
        return self.fixed + self.slope * nodes


@dataclass(frozen=True, slots=True)
class Machine:
    """What steps of the target cost."""

    curve: CostCurve
    plain_rest: float  # seconds of a plain step that are not its pass
    slowness: float = 1.0  # of a pass over one row, beside when drafters were measured

    def plain_seconds(self, positions: float, requests: int = 1) -> float:
        """Of a step without drafts."""
        read = round(requests * positions)
        return self.curve.of_step(requests, requests, read) + requests * self.plain_rest

    def pass_seconds(self, rows: float, positions: float, requests: int = 1) -> float:
        """Of a pass with `rows` rows of all requests together, each behind `positions`."""
        seconds = self.curve.of_step(rows, requests, round(requests * positions))
        return seconds + self.curve.row_position_seconds * positions * (rows - requests)

    @classmethod
    def seen(cls, curve: CostCurve, passes: Passes, plain_rest: float) -> Machine:
        """With `curve` corrected by passes of one request that were seen while decoding: as many
        times dearer as those near by in rows.
        """
        surprise = {
            rows: seconds / _alone(curve, rows, positions)
            for rows, (count, positions, seconds) in sorted(passes.items())
            if count >= ENOUGH
        }
        return cls(_dearer(curve, surprise) if surprise else curve, plain_rest)

    def when(self, before: Mapping[int, float], now: Mapping[int, float]) -> Machine:
        """In other minutes: passes of the same rows took `before` seconds, and take `now`."""
        factors = {rows: now[rows] / before[rows] for rows in sorted(before) if rows in now}
        if 1 not in factors:  # too little was run for passes to be read
            return self
        return Machine(_dearer(self.curve, factors), self.plain_rest, factors[1])


def _dearer(curve: CostCurve, factors: Mapping[int, float]) -> CostCurve:
    """With every pass as many times dearer as those near by in rows, which rise."""
    points = sorted({*curve.rows, *factors})
    seconds = [curve.of_rows(rows) * _between(factors, rows) for rows in points]
    scale = next(iter(factors.values()))
    return replace(
        curve,
        rows=tuple(points),
        seconds=tuple(accumulate(seconds, max)),
        request_seconds=scale * curve.request_seconds,
        position_seconds=scale * curve.position_seconds,
        row_position_seconds=scale * curve.row_position_seconds,
    )


def _alone(curve: CostCurve, rows: int, positions: float) -> float:
    """Seconds of a pass of one request."""
    read = curve.row_position_seconds * positions * (rows - 1)
    return curve.of_step(rows, 1, round(positions)) + read


def _between(known: Mapping[int, float], at: int) -> float:
    """The value at `at`: on the line between its neighbours, beyond the ends as at the end."""
    left = max((each for each in known if each <= at), default=min(known))
    right = min((each for each in known if each >= at), default=max(known))
    if left >= right:
        return known[left]
    return known[left] + (known[right] - known[left]) * (at - left) / (right - left)


@dataclass(frozen=True, slots=True)
class Drafting:
    """A drafter as it was measured."""

    texts: Sequence[Text]
    drafter: Line
    rest: Line
    shared: bool = False  # it runs a model, which requests share; else they are drafted for in turn
    # What its passes took / what passes over as many rows cost. Not 1 where it has done a part of
    # them, or where its own model has driven the target's out of the caches.
    pass_factor: float = 1.0

    @property
    def own_rows(self) -> bool:
        """Whether it computes rows of its own, so that only its measured width can be foretold."""
        return any(step.num_own_rows for text in self.texts for step in text)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one width at one load."""

    num_nodes: int
    requests: int
    tokens: float  # of a mean step and request, the extra one included
    step_cost: float  # in plain steps with as many requests

    @property
    def speedup(self) -> float:
        return self.tokens / self.step_cost


def predict(drafting: Drafting, machine: Machine, width: int, requests: int = 1) -> Prediction:
    """Decoding with drafts of at most `width` nodes. Requests are taken as independent."""
    texts = [replay(text, width) for text in drafting.texts]
    steps = [step for text in texts for step in text]
    tokens = sum(step.accepted + 1 for step in steps) / len(steps)
    nodes = fmean(step.drafted for step in steps)
    beside = _drafter_seconds(drafting, machine, nodes, requests) if width else 0.0
    beside += requests * (drafting.rest.at(nodes) if width else machine.plain_rest)
    if requests == 1:
        passes = fmean(
            _factor(drafting, step.rows, 1) * machine.pass_seconds(step.rows, step.position)
            for step in steps
        )
        plain = _plain_seconds(drafting, machine)
    else:
        positions = fmean(step.position for step in steps)
        passes = sum(
            share
            * _factor(drafting, rows, requests)
            * machine.pass_seconds(rows, positions, requests)
            for rows, share in _rows_together(steps, requests).items()
        )
        plain = machine.plain_seconds(positions, requests)
    return Prediction(width, requests, tokens, (passes + beside) / plain)


def _factor(drafting: Drafting, rows: int, requests: int) -> float:
    """A step that finds nothing is a plain pass."""
    return drafting.pass_factor if rows > requests else 1.0


def _plain_seconds(drafting: Drafting, machine: Machine) -> float:
    """Of a mean plain step over the same texts."""
    steps = [step for text in drafting.texts for step in replay(text, 0)]
    return fmean(machine.plain_seconds(step.position) for step in steps)


def _drafter_seconds(drafting: Drafting, machine: Machine, nodes: float, requests: int) -> float:
    """Of one step."""
    curve, factor = machine.curve, float(requests)
    if drafting.shared:
        factor = machine.slowness * curve.of_rows(requests) / curve.of_rows(1)
    return drafting.drafter.at(nodes) * factor


def _rows_together(steps: Sequence[ReplayedStep], requests: int) -> Mapping[int, float]:
    """P(so many rows together), each request being at a step of its own."""
    counts = Counter(step.rows for step in steps)
    one = {rows: count / len(steps) for rows, count in counts.items()}
    together: dict[int, float] = {0: 1.0}
    for _ in range(requests):
        grown: dict[int, float] = {}
        for before, chance in together.items():
            for rows, share in one.items():
                grown[before + rows] = grown.get(before + rows, 0.0) + chance * share
        together = grown
    return together
