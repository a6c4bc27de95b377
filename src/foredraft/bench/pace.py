"""How fast the machine is at the moment: reference passes within every measurement.

Knows passes of a model and a clock; knows no server and no load. Two cores of a shared machine are
faster in one minute than in the next, by a fifth and more, at few rows (memory) otherwise than at
many (arithmetic): what was measured in different minutes is put on one footing by it. The passes
run between a busy server's steps: behind an idle moment such a machine is now and then half as fast
for up to a second, which a busy server is not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import ceil
from statistics import harmonic_mean, median
from typing import NamedTuple

import torch

from foredraft.bench.clock import seconds_of
from foredraft.bench.passes import RepeatedPass
from foredraft.models.load import LoadedModel
from foredraft.planning.cost import CostCurve

ROWS = (1, 4, 12, 32)  # requests of one row
CONTEXT = 256  # positions of each
SHARE = 0.05  # of a busy server's time


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of the reference passes, in the order of `ROWS`."""

    seconds: tuple[float, ...]

    def of_rows(self, rows: float) -> float:
        """Seconds of a pass over so many rows, between the reference passes; beyond them in
        proportion: the line through two readings would multiply what they are off by.
        """
        last = ROWS[-1]
        return _curve(self.seconds).of_rows(min(rows, last)) * max(1.0, rows / last)

    def slowness(self, usual: Pace, rows: Sequence[int]) -> float:
        """Seconds of passes over `rows` / what they take at the `usual` pace; 1 without any."""
        expected = sum(map(usual.of_rows, rows))
        return sum(map(self.of_rows, rows)) / expected if expected else 1.0


@lru_cache
def _curve(seconds: tuple[float, ...]) -> CostCurve:
    return CostCurve(ROWS, tuple(accumulate(seconds, max)))


def middle(paces: Sequence[Pace]) -> Pace:
    """The median of one or more, of each kind of pass."""
    return Pace(tuple(map(median, zip(*(pace.seconds for pace in paces), strict=True))))


class Reading(NamedTuple):
    """A reference pass: which of `ROWS`, and when, in seconds of `time.perf_counter`."""

    kind: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def pace_of(readings: Sequence[Reading]) -> Pace | None:
    """The pace over a stretch of time; None if it was too short to read each kind of pass.

    Speeds are averaged, not seconds: what is done in a stretch is the mean speed times its length.
    Only the middle half of them: a slow moment that one of few readings meets is far more of these
    than of the time.
    """
    seconds: list[list[float]] = [[] for _ in ROWS]
    for each in readings:
        seconds[each.kind].append(each.seconds)
    return Pace(tuple(map(_of_middle_half, seconds))) if all(seconds) else None


def _of_middle_half(seconds: Sequence[float]) -> float:
    """The harmonic mean without the first and the last quarter: of three, the middle one."""
    count = len(seconds)
    cut = min(ceil(count / 4), (count - 1) // 2)
    return harmonic_mean(sorted(seconds)[cut : count - cut])


class Reference:
    """The reference passes of a model."""

    def __init__(self, loaded: LoadedModel, rows: Sequence[int] = ROWS) -> None:
        context = min(CONTEXT, loaded.config.max_position_embeddings - 1)
        with torch.inference_mode():
            self._passes = [RepeatedPass(loaded, 1, context, requests) for requests in rows]

    @torch.inference_mode()
    def once(self) -> float:
        """Seconds of the first of the passes, now and once."""
        return seconds_of(self._passes[0].run)

    @torch.inference_mode()
    def read(self, kind: int) -> Reading:
        """Run one of them."""
        start = time.perf_counter()
        self._passes[kind].run()
        return Reading(kind, start, time.perf_counter())


class Interludes:
    """Reference passes between other work, for a `SHARE` of the time. Each kind gets as much of it
    as the others: the short ones, which vary the most, are read the most often.
    """

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._spent = [0.0] * len(ROWS)
        self._due = 0.0
        self._readings: list[Reading] = []

    def once(self) -> float:
        """Run a pass if one is due. Returns the seconds that it took, or 0."""
        if time.perf_counter() < self._due:
            return 0.0
        reading = self._reference.read(self._spent.index(min(self._spent)))
        self._readings.append(reading)
        self._spent[reading.kind] += reading.seconds
        self._due = reading.end + reading.seconds * (1.0 - SHARE) / SHARE
        return reading.seconds

    def take(self) -> list[Reading]:
        """All that were run; they are forgotten then, and the next ones begin at the first kind."""
        readings, self._readings = self._readings, []
        self._spent = [0.0] * len(ROWS)
        return readings
