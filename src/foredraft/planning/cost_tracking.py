"""What steps cost by now: the curve of start-up, moved by the steps that were seen.

Knows a curve and the seconds of steps; knows no policy and no clock. What each part of a curve
takes, over what it took at start-up, is a logarithm that a Kalman filter follows. Its prior is a
Gaussian process over row counts: what a step teaches holds for others the more the nearer they are,
so that what isn't seen any more follows what is, and slowly comes back. A part that nobody looks at
would else keep what a slow minute taught, and rows that look dear are never tried again.
"""

from __future__ import annotations

from dataclasses import replace
from math import log

import numpy as np

from foredraft.planning.cost import CostCurve, never_falling

# Standard deviations, relative: of all parts together (the machine's pace), and of each by itself.
PACE, ROWS, REQUESTS, POSITIONS = 0.3, 0.15, 0.7, 0.3
NEAR = 1.5  # row counts that are `exp(NEAR)` times each other have 1 / e of `ROWS` in common
# Seconds of steps after which 1 / e is left: of what is more certain than at start-up, and of how
# far it was from start-up. The second is long: start-up itself may have been wrong.
LASTING, BACK = 30.0, 600.0
LONGEST = 0.1  # seconds that a step counts as: few long ones teach as much as few short ones
FIRST_NOISE, LEAST_NOISE = 2.5e-3, 1e-4  # variances of a step's seconds, relative
NOISE_RATE = 0.05
LEAST_RATIO = 1e-9  # of a step's seconds to those expected: no clock tells less
FURTHEST = 3.0  # standard deviations; a step further off was held up by something else


class CostTracker:
    """A curve that follows the steps it is told of (an extended Kalman filter)."""

    def __init__(self, curve: CostCurve) -> None:
        """`curve`: of start-up."""
        self.curve = curve
        self._first = curve
        self._usual = _covariance(curve.rows)
        self._known = self._usual.copy()
        self._moved = np.zeros(len(self._usual))  # logarithms: of points, requests, positions
        self._noise = FIRST_NOISE
        self._unseen = 0.0  # seconds since the last step that taught something

    def passed(self, seconds: float) -> None:
        """A step went by, which makes what was seen before it less certain."""
        self._unseen += min(LONGEST, seconds)

    def learn(
        self, rows: int, requests: int, positions: int, further: float, seconds: float
    ) -> None:
        """From a step of so many `rows` and `requests`, which reads `positions` cached ones once a
        request, and `further` ones again for all further rows.
        """
        if not seconds > 0.0:
            return
        self._forget()
        parts = self._parts(rows, requests, positions, further)
        expected = float(parts.sum())
        shares = parts / expected
        spread = self._known @ shares
        doubt = float(shares @ spread)
        variance = doubt + self._noise
        most = FURTHEST * variance**0.5
        surprise = max(-most, min(most, log(max(seconds / expected, LEAST_RATIO))))
        self._noise += NOISE_RATE * (max(LEAST_NOISE, surprise**2 - doubt) - self._noise)
        self._moved += spread * (surprise / variance)
        self._known -= np.outer(spread, spread / variance)
        self.curve = self._moved_curve()

    def _forget(self) -> None:
        self._known += (1.0 - np.exp(-self._unseen / LASTING)) * (self._usual - self._known)
        self._moved *= np.exp(-self._unseen / BACK)
        self._unseen = 0.0
        self.curve = self._moved_curve()

    def _parts(self, rows: int, requests: int, positions: int, further: float) -> np.ndarray:
        """Seconds of the step by the parts of the curve, `[points + 2]`. Behind the last point, the
        point before it counts against it. A part that took nothing at start-up takes nothing.
        """
        curve = self.curve
        parts = np.zeros(len(self._moved))
        if rows <= curve.rows[0] or len(curve.rows) == 1:
            parts[0] = curve.of_rows(rows)
        else:
            right = curve.segment(rows)
            first, last = curve.rows[right - 1], curve.rows[right]
            share = (rows - first) / (last - first)
            parts[right - 1] = (1.0 - share) * curve.seconds[right - 1]
            parts[right] = share * curve.seconds[right]
        parts[-2] = curve.request_seconds * max(0, requests - 1)
        parts[-1] = curve.position_seconds * positions + curve.row_position_seconds * further
        return parts

    def _moved_curve(self) -> CostCurve:
        first, scale = self._first, np.exp(self._moved).tolist()
        points = [a * b for a, b in zip(first.seconds, scale[:-2], strict=True)]
        certainty = 1.0 / self._known.diagonal()[:-2]
        return replace(
            first,
            seconds=tuple(never_falling(points, certainty.tolist())),
            request_seconds=first.request_seconds * scale[-2],
            position_seconds=first.position_seconds * scale[-1],
            row_position_seconds=first.row_position_seconds * scale[-1],
        )


def _covariance(rows: tuple[int, ...]) -> np.ndarray:
    """Of the logarithms of all parts, where nothing was seen."""
    usual = np.full((len(rows) + 2, len(rows) + 2), PACE**2)
    places = np.log(np.array(rows, dtype=float))
    apart = np.abs(places[:, None] - places[None, :])
    usual[:-2, :-2] += ROWS**2 * np.exp(-apart / NEAR)
    usual[-2, -2] += REQUESTS**2
    usual[-1, -1] += POSITIONS**2
    return usual
