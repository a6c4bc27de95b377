"""How dear passes of a few sizes are, read again and again while something else is measured.

Knows passes of a model and a clock; knows no prediction. A shared machine's memory is faster in one
minute than in the next, which changes what nine rows cost beside one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

import torch

from foredraft.bench.clock import seconds_of
from foredraft.bench.passes import RepeatedPass
from foredraft.bench.plan.measure import usual_mean
from foredraft.models.load import LoadedModel


class Readings:
    """Passes of one request with so many rows behind a context."""

    def __init__(self, loaded: LoadedModel, rows: Sequence[int], context: int) -> None:
        context = min(context, loaded.config.max_position_embeddings - max(rows))
        with torch.inference_mode():
            self._passes = {count: RepeatedPass(loaded, count, context) for count in rows}
        self._seconds: dict[int, list[float]] = {count: [] for count in rows}
        self._next = cycle(rows)

    @torch.inference_mode()
    def read(self) -> None:
        """Run the next of them once."""
        rows = next(self._next)
        run = self._passes[rows].run
        self._seconds[rows].append(seconds_of(lambda: run()[-1, 0].item()))  # waits for a device

    def taken(self) -> Mapping[int, float]:
        """Seconds by rows of what was read since this was last asked: means, as those of answers
        are. Of a machine with two speeds, a median is of the one or of the other.
        """
        means = {rows: usual_mean(seconds) for rows, seconds in self._seconds.items() if seconds}
        self._seconds = {rows: [] for rows in self._seconds}
        return means
