"""What a drafter's confidence is worth: how often drafts of such a confidence were accepted.

Knows counts that fade; knows no cost, no drafter and no clock. A node's rate is conditional: of
nodes whose parent was accepted. Evidence is kept by request type, confidence and depth, and each
leans on the wider one (shrinkage): a depth on all depths, all depths on what the drafter says, a
request on what was expected of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foredraft.planning.policy import Offer, Tried, known_type

# Bins of stated confidence, by their upper ends; a long copy is told from a short one near 1.
BOUNDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.985)
NUM_BINS = len(BOUNDS) + 1
MAX_DEPTH = 7  # deeper nodes count as this deep
PRIOR_ACCEPTANCE = 0.75  # of a drafter that states none
MEMORY = 200.0  # nodes of one confidence and depth; evidence older than that counts little
BIN_WEIGHT, DEPTH_WEIGHT = 6.0, 12.0  # nodes that the wider evidence is worth
REQUEST_MEMORY = 24.0  # judged nodes
ACCEPTED_WEIGHT, REJECTED_WEIGHT = 6.0, 2.0  # nodes that its type is worth beside a request's own
LARGEST_ODDS = 4.0
MOST_CERTAIN = 0.999


class _Type:
    """Fading counts of the requests of one type, by confidence and by confidence and depth."""

    def __init__(self) -> None:
        cells = (NUM_BINS + 1) * (MAX_DEPTH + 1)  # the last bin: no confidence stated
        self._bin_hits, self._bin_tries = [0.0] * (NUM_BINS + 1), [0.0] * (NUM_BINS + 1)
        self._cell_hits, self._cell_tries = [0.0] * cells, [0.0] * cells

    def add(self, depth: int, confidence: float | None, accepted: bool) -> None:
        keep, bin_ = 1.0 - 1.0 / MEMORY, _bin(confidence)
        cell = bin_ * (MAX_DEPTH + 1) + min(depth, MAX_DEPTH)
        self._bin_hits[bin_] = self._bin_hits[bin_] * keep + accepted
        self._bin_tries[bin_] = self._bin_tries[bin_] * keep + 1.0
        self._cell_hits[cell] = self._cell_hits[cell] * keep + accepted
        self._cell_tries[cell] = self._cell_tries[cell] * keep + 1.0

    def rate(self, depth: int, confidence: float | None) -> float:
        bin_ = _bin(confidence)
        cell = bin_ * (MAX_DEPTH + 1) + (depth if depth < MAX_DEPTH else MAX_DEPTH)
        prior = PRIOR_ACCEPTANCE if confidence is None else confidence
        wide = (self._bin_hits[bin_] + BIN_WEIGHT * prior) / (self._bin_tries[bin_] + BIN_WEIGHT)
        own = self._cell_hits[cell] + DEPTH_WEIGHT * wide
        return own / (self._cell_tries[cell] + DEPTH_WEIGHT)


def _bin(confidence: float | None) -> int:
    return NUM_BINS if confidence is None else bisect_right(BOUNDS, confidence)


@dataclass(slots=True)
class _Fared:
    """How a request's nodes fared, and how nodes like them fare in its type; fading counts."""

    accepted: float = 0.0
    expected: float = 0.0
    tries: float = 0.0

    def add(self, rate: float, accepted: bool) -> None:
        keep = 1.0 - 1.0 / REQUEST_MEMORY
        self.accepted = self.accepted * keep + accepted
        self.expected = self.expected * keep + rate
        self.tries = self.tries * keep + 1.0

    @property
    def odds(self) -> float:
        """The odds of its nodes / those of their type: what is nearly certain stays so when
        something doubtful fails.
        """
        right = (self.accepted + ACCEPTED_WEIGHT) / (self.expected + ACCEPTED_WEIGHT)
        rejected, expected = self.tries - self.accepted, self.tries - self.expected
        wrong = (rejected + REJECTED_WEIGHT) / (expected + REJECTED_WEIGHT)
        return min(LARGEST_ODDS, right / wrong)


class Calibration:
    """From stated confidence to measured acceptance, for one drafter."""

    def __init__(self) -> None:
        self._types: dict[str, _Type] = {}
        self._requests: dict[str, _Fared] = {}

    def survival(self, request_id: str, request_type: str, offer: Offer) -> list[float]:
        """`[nodes]` P(the whole path down to a node is accepted); never rises along a path."""
        rate_of, fared = self._type(request_type).rate, self._requests.get(request_id)
        odds = 1.0 if fared is None else fared.odds
        stated = offer.confidence
        depths: list[int] = []
        alive: list[float] = []
        for node, parent in enumerate(offer.parents):
            depth, path = (depths[parent] + 1, alive[parent]) if parent >= 0 else (0, 1.0)
            rate = rate_of(depth, None if stated is None else stated[node])
            rate = odds * rate / (1.0 - rate + odds * rate)
            depths.append(depth)
            alive.append(path * (rate if rate < MOST_CERTAIN else MOST_CERTAIN))
        return alive

    def add(self, request_id: str, request_type: str, tried: Iterable[Tried]) -> None:
        """Nodes whose parents were accepted, and what became of them."""
        kind, fared = self._type(request_type), self._requests.setdefault(request_id, _Fared())
        for node in tried:
            fared.add(kind.rate(node.depth, node.confidence), node.accepted)
            kind.add(node.depth, node.confidence, node.accepted)

    def release(self, request_id: str) -> None:
        """Forget a request; its type remembers."""
        self._requests.pop(request_id, None)

    def _type(self, request_type: str) -> _Type:
        kind = known_type(self._types, request_type)
        found = self._types.get(kind)
        if found is None:
            found = self._types[kind] = _Type()
        return found


def best_first(survival: Sequence[float]) -> list[int]:
    """Nodes, the likeliest first; among equals in their order, so that parents come first."""
    return sorted(range(len(survival)), key=lambda node: -survival[node])
