"""Whose token is worth how much, where what counts is what the reader of one request waits.

Knows tokens that requests get from their steps; knows no draft, no cost and no clock. A reader of
request i waits `seconds of a step / g_i` for a token, with `g_i` its tokens a step. All readers
together wait least, to first order, if a token of request i counts `1 / g_i ** 2`: one token more
saves the reader who gets few of them more than the one who gets many.
"""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.planning.policy import Judged

MEMORY = 64.0  # steps; evidence older than that counts little
USUAL_WEIGHT = 16.0  # steps that the usual request is worth beside a request's own
USUAL_RATE = 0.01  # of a request's step's news about the usual request


class Readers:
    """Weights of requests that run, 1 on average."""

    def __init__(self) -> None:
        self._usual = 1.0  # tokens a step
        self._seen: dict[str, tuple[float, float]] = {}  # fading sums: tokens and steps
        self._weights: dict[str, float] = {}

    def add(self, requests: Sequence[Judged]) -> None:
        """What a step brought."""
        for judged in requests:
            brought = judged.accepted + 1.0
            self._usual += USUAL_RATE * (brought - self._usual)
            if not judged.ended:
                tokens, steps = self._seen.get(judged.id, (0.0, 0.0))
                keep = 1.0 - 1.0 / MEMORY
                self._seen[judged.id] = tokens * keep + brought, steps * keep + 1.0
        gain = self._usual * USUAL_WEIGHT
        self._weights = {
            id_: ((steps + USUAL_WEIGHT) / (tokens + gain)) ** 2
            for id_, (tokens, steps) in self._seen.items()
        }
        if self._weights:
            mean = sum(self._weights.values()) / len(self._weights)
            self._weights = {id_: weight / mean for id_, weight in self._weights.items()}

    def release(self, request_id: str) -> None:
        """Forget a request."""
        self._seen.pop(request_id, None)
        self._weights.pop(request_id, None)

    def weight(self, request_id: str) -> float:
        """What its token is worth; one that nothing is known of is as good as any."""
        return self._weights.get(request_id, 1.0)
