"""What a drafter's confidence is worth: how often drafts of such a confidence were accepted.

Knows counts that fade; knows no cost, no drafter and no clock. A node's rate is conditional: of
nodes whose parent was accepted. Evidence is kept by request type, confidence and depth, and each
leans on the wider one (shrinkage): a depth on all depths, all depths on what the drafter says, a
request on what was expected of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foredraft.planning.policy import Offer, Tried, known_type

NUM_BINS = 10
MAX_DEPTH = 7  # deeper nodes count as this deep
PRIOR_ACCEPTANCE = 0.75  # of a drafter that states none
MEMORY = 200.0  # nodes of one confidence and depth; evidence older than that counts little
BIN_WEIGHT, DEPTH_WEIGHT = 6.0, 12.0  # nodes that the wider evidence is worth
REQUEST_MEMORY, REQUEST_WEIGHT = 24.0, 6.0  # accepted tokens
LARGEST_FACTOR = 1.5
MOST_CERTAIN = 0.995


@dataclass(slots=True)
class _Rate:
    """Fading counts of one kind of nodes."""

    hits: float = 0.0
    tries: float = 0.0

    def add(self, accepted: bool) -> None:
        keep = 1.0 - 1.0 / MEMORY
        self.hits = self.hits * keep + accepted
        self.tries = self.tries * keep + 1.0

    def leaning(self, prior: float, weight: float) -> float:
        return (self.hits + weight * prior) / (self.tries + weight)


class _Type:
    """Rates of the requests of one type, by confidence and depth."""

    def __init__(self) -> None:
        self._bins = [_Rate() for _ in range(NUM_BINS + 1)]  # the last: no confidence stated
        self._cells = [[_Rate() for _ in range(MAX_DEPTH + 1)] for _ in self._bins]

    def add(self, node: Tried) -> None:
        bin_ = _bin(node.confidence)
        self._bins[bin_].add(node.accepted)
        self._cells[bin_][min(node.depth, MAX_DEPTH)].add(node.accepted)

    def rate(self, depth: int, confidence: float | None) -> float:
        bin_ = _bin(confidence)
        prior = PRIOR_ACCEPTANCE if confidence is None else confidence
        wide = self._bins[bin_].leaning(prior, BIN_WEIGHT)
        return self._cells[bin_][min(depth, MAX_DEPTH)].leaning(wide, DEPTH_WEIGHT)


def _bin(confidence: float | None) -> int:
    return NUM_BINS if confidence is None else min(NUM_BINS - 1, int(confidence * NUM_BINS))


class Calibration:
    """From stated confidence to measured acceptance, for one drafter."""

    def __init__(self) -> None:
        self._types: dict[str, _Type] = {}
        self._requests: dict[str, tuple[float, float]] = {}  # accepted, expected

    def survival(self, request_id: str, request_type: str, offer: Offer) -> list[float]:
        """`[nodes]` P(the whole path down to a node is accepted); never rises along a path."""
        kind = self._type(request_type)
        factor = self._factor(request_id)
        depths: list[int] = []
        alive: list[float] = []
        for node, parent in enumerate(offer.parents):
            depth = depths[parent] + 1 if parent >= 0 else 0
            stated = None if offer.confidence is None else offer.confidence[node]
            rate = min(MOST_CERTAIN, factor * kind.rate(depth, stated))
            depths.append(depth)
            alive.append(rate * alive[parent] if parent >= 0 else rate)
        return alive

    def add(self, request_id: str, request_type: str, tried: Iterable[Tried]) -> None:
        """Nodes whose parents were accepted, and what became of them."""
        kind = self._type(request_type)
        accepted, expected = self._requests.get(request_id, (0.0, 0.0))
        keep = 1.0 - 1.0 / REQUEST_MEMORY
        for node in tried:
            rate = kind.rate(node.depth, node.confidence)
            accepted, expected = accepted * keep + node.accepted, expected * keep + rate
            kind.add(node)
        self._requests[request_id] = accepted, expected

    def release(self, request_id: str) -> None:
        """Forget a request; its type remembers."""
        self._requests.pop(request_id, None)

    def _type(self, request_type: str) -> _Type:
        kind = known_type(self._types, request_type)
        found = self._types.get(kind)
        if found is None:
            found = self._types[kind] = _Type()
        return found

    def _factor(self, request_id: str) -> float:
        """How a request fares beside its type."""
        accepted, expected = self._requests.get(request_id, (0.0, 0.0))
        return min(LARGEST_FACTOR, (accepted + REQUEST_WEIGHT) / (expected + REQUEST_WEIGHT))


def best_first(survival: Sequence[float]) -> list[int]:
    """Nodes, the likeliest first; among equals in their order, so that parents come first."""
    return sorted(range(len(survival)), key=lambda node: -survival[node])
