"""Servers of one process take turns, so that they share the machine's every mood; each has a clock
that stands still while others have theirs.

Knows threads and times; knows no server and no figure. A machine that is a fifth slower in one
minute than in the next, or half as fast for a second, can't be compared with itself: two servers
that run for half a second each, again and again, can.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

TURN = 0.5  # seconds, and what is left of a step then


class Clock:
    """A server's own time: seconds of `time.perf_counter`, less those in which it was held up.

    One thread stops it; any may read it.
    """

    def __init__(self) -> None:
        # Each as one object, so that readers see all of a stop or nothing.
        self._stops: list[tuple[float, float, float]] = []  # start, end, seconds stood before
        self._stood = 0.0

    def now(self) -> float:
        return self.of(time.perf_counter())

    def of(self, at: float) -> float:
        """The own time at `at`, which may be past; while it stood, that at which it stopped."""
        index = bisect_right(self._stops, (at, inf, inf)) - 1
        if index < 0:
            return at
        start, end, before = self._stops[index]
        return (start if at < end else at - (end - start)) - before

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It stands still within."""
        start = time.perf_counter()
        self._stops.append((start, inf, self._stood))
        try:
            yield
        finally:
            end = time.perf_counter()
            self._stops[-1] = (start, end, self._stood)
            self._stood += end - start


class Turns:
    """Who may run: the first in a ring, until its turn is over and it is between two steps."""

    def __init__(self, seconds: float = TURN) -> None:
        self._seconds = seconds
        self._changed = threading.Condition()
        # Under the condition's lock:
        self._ring: list[object] = []
        self._over = 0.0  # when the turn of the first is

    def enter(self, who: object) -> None:
        """Join, behind all others; not to run before `is_on`."""
        with self._changed:
            self._ring.append(who)
            if len(self._ring) == 1:
                self._begin()

    def leave(self, who: object) -> None:
        """Take no turns any more: `between_steps` comes back."""
        with self._changed:
            if who not in self._ring:
                return
            was_on = self._ring[0] is who
            self._ring.remove(who)
            if was_on:
                self._begin()
            self._changed.notify_all()

    def is_on(self, who: object) -> bool:
        with self._changed:
            return self._has_turn(who)

    def between_steps(self, who: object) -> None:
        """Let the others have theirs if this turn is over; back when it is this one's again."""
        with self._changed:
            if self._has_turn(who) and len(self._ring) > 1 and time.perf_counter() >= self._over:
                self._ring.append(self._ring.pop(0))
                self._begin()
            self._changed.wait_for(lambda: who not in self._ring or self._has_turn(who))

    def _has_turn(self, who: object) -> bool:
        return bool(self._ring) and self._ring[0] is who

    def _begin(self) -> None:
        self._over = time.perf_counter() + self._seconds
        self._changed.notify_all()
