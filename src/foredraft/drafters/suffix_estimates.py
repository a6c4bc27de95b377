"""How often drafts of each kind are accepted: a table that begins as measured and learns.

Knows cells and which nodes were right; knows neither tokens nor requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# Weight of a starting value, in nodes; after FORGET_AFTER nodes old ones count half.
PRIOR_NODES = 128.0
FORGET_AFTER = 4000.0
# By CONTEXT_LENGTHS (down) and agreement (across): one place; 2 or 3, all alike; more, all alike;
# three quarters of them; half; a quarter; fewer. Measured: LOG.md, "Suffix decoding".
PRIOR_OWN = (
    (0.35, 0.48, 0.62, 0.45, 0.22, 0.14, 0.07),
    (0.61, 0.74, 0.88, 0.55, 0.26, 0.16, 0.08),
    (0.72, 0.79, 0.91, 0.58, 0.28, 0.16, 0.08),
    (0.77, 0.84, 0.95, 0.62, 0.29, 0.17, 0.08),
    (0.81, 0.87, 0.98, 0.70, 0.30, 0.18, 0.09),
    (0.87, 0.96, 0.99, 0.75, 0.36, 0.26, 0.15),
    (0.91, 0.98, 0.99, 0.85, 0.52, 0.36, 0.25),
    (0.96, 0.99, 0.99, 0.90, 0.58, 0.40, 0.35),
)
# Of past responses: what another request was told is said again less often.
PRIOR_PAST = (
    (0.17, 0.29, 0.36, 0.26, 0.14, 0.10, 0.03),
    (0.30, 0.40, 0.61, 0.44, 0.21, 0.13, 0.03),
    (0.34, 0.54, 0.78, 0.45, 0.22, 0.14, 0.04),
    (0.41, 0.62, 0.80, 0.48, 0.24, 0.18, 0.04),
    (0.43, 0.64, 0.88, 0.55, 0.26, 0.19, 0.06),
    (0.56, 0.80, 0.96, 0.68, 0.34, 0.20, 0.07),
    (0.60, 0.86, 0.98, 0.72, 0.36, 0.22, 0.10),
    (0.71, 0.88, 0.98, 0.80, 0.40, 0.28, 0.20),
)


class Estimates:
    """The acceptance of each cell: accepted nodes over judged ones, `PRIOR_NODES` at the start."""

    def __init__(self, prior: Sequence[Sequence[float]] = PRIOR_OWN) -> None:
        """`prior` is a row for each of CONTEXT_LENGTHS."""
        self.values = [value for row in prior for value in row]
        self._accepted = [PRIOR_NODES * value for value in self.values]
        self._judged = [PRIOR_NODES] * len(self.values)

    def learn(self, cells: Sequence[int], judged: Iterable[tuple[int, bool]]) -> None:
        """Count nodes, `cells` by node: (node, whether it was right) of those that were judged."""
        for node, right in judged:
            cell = cells[node]
            self._judged[cell] += 1.0
            self._accepted[cell] += right
            self.values[cell] = self._accepted[cell] / self._judged[cell]
            if self._judged[cell] > FORGET_AFTER:
                self._judged[cell] /= 2.0
                self._accepted[cell] /= 2.0
