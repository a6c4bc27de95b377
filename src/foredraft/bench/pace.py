"""How fast the machine is at the moment: reference passes beside every measurement.

Knows passes of a model and a clock; knows no server and no load. Two cores of a shared machine are
faster in one minute than in the next, by a fifth and more, at few rows (memory) otherwise than at
many (arithmetic): what was measured in different minutes is compared at equal pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from statistics import median

import torch

from foredraft.bench.clock import seconds_of
from foredraft.bench.passes import RepeatedPass
from foredraft.models.load import LoadedModel
from foredraft.planning.cost import CostCurve

ROWS = (1, 8, 32)  # requests of one row
CONTEXT = 256  # positions of each
TIMES = 5


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
    def pace(self) -> Pace:
        """Run them, in turns: a quarter of a second for a model of 135M parameters."""
        times: list[list[float]] = [[] for _ in self._passes]
        for turn in range(TIMES):
            for index in range(len(times))[:: -1 if turn % 2 else 1]:
                times[index].append(seconds_of(self._passes[index].run))
        return Pace(tuple(map(median, times)))
