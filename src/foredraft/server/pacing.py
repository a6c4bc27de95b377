"""Smooths bursts: the tokens that a step gave at once leave evenly until the next step's are due.

Knows deltas and time; knows no format. A completion ends no later than one step after the engine
ended it: what is still held when the next burst comes leaves at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress

from foredraft.engine.outputs import StreamDelta

LONGEST_STEP = 0.5  # seconds; a longer gap is a pause, which is not to be stretched
WEIGHT = 0.3  # of the newest step in the smoothed time between steps

Cut = Callable[[StreamDelta], Sequence[StreamDelta]]


class Schedule:
    """When the parts of one completion's bursts leave. Times are in seconds of one clock."""

    def __init__(self) -> None:
        self._burst_at: float | None = None
        self._interval = 0.0  # between bursts, smoothed

    def times(self, now: float, number: int) -> list[float]:
        """When each of `number` parts that have come at `now` leaves; the first at once."""
        last = 0.0 if self._burst_at is None else min(now - self._burst_at, LONGEST_STEP)
        smoothed = self._interval + WEIGHT * (last - self._interval) if self._interval else last
        self._burst_at, self._interval = now, smoothed
        spread = min(smoothed, last)
        return [now + spread * at / number for at in range(number)]


async def paced(
    deltas: AsyncGenerator[StreamDelta, None], cuts: Sequence[Cut]
) -> AsyncGenerator[StreamDelta, None]:
    """`deltas` by single tokens at a steady rate; `cuts[i]` cuts those of completion i."""
    clock = asyncio.get_running_loop().time
    schedules = [Schedule() for _ in cuts]
    held: deque[tuple[float, StreamDelta]] = deque()
    source: asyncio.Task[StreamDelta] | None = asyncio.ensure_future(anext(deltas))
    try:
        while source is not None or held:
            wait = max(0.0, held[0][0] - clock()) if held else None
            if source is None:
                await asyncio.sleep(wait or 0.0)
            else:
                await asyncio.wait({source}, timeout=wait)
                if source.done():
                    delta = await _result(source)
                    source = None if delta is None else asyncio.ensure_future(anext(deltas))
                    if delta is not None:
                        for each in _overdue(held, delta.index):
                            yield each
                        parts = cuts[delta.index](delta)
                        times = schedules[delta.index].times(clock(), len(parts))
                        held.extend(zip(times, parts, strict=True))
                        held = deque(sorted(held, key=lambda pair: pair[0]))
            while held and held[0][0] <= clock():
                yield held.popleft()[1]
    finally:
        if source is not None:
            source.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await source
        await deltas.aclose()


async def _result(task: asyncio.Task[StreamDelta]) -> StreamDelta | None:
    """What came, or None at the end."""
    try:
        return await task
    except StopAsyncIteration:
        return None


def _overdue(held: deque[tuple[float, StreamDelta]], index: int) -> list[StreamDelta]:
    """Take out what completion `index` still holds."""
    late = [part for _, part in held if part.index == index]
    rest = [pair for pair in held if pair[1].index != index]
    held.clear()
    held.extend(rest)
    return late
