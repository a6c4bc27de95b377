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
    """Weights of requests that run, 1 on average over those of the last step."""

    def __init__(self) -> None:
        self._usual = 1.0  # tokens a step
        self._seen: dict[str, tuple[float, float]] = {}  # fading sums: tokens and steps
        self._together: list[str] = []  # of the last step
        self._weights: dict[str, float] = {}
        self._mean = 1.0  # of the weights of those

    def add(self, requests: Sequence[Judged]) -> None:
        """What a step brought."""
        going_on = [judged for judged in requests if not judged.ended]
        for judged in requests:
            self._usual += USUAL_RATE * (judged.accepted + 1.0 - self._usual)
        for judged in going_on:
            tokens, steps = self._seen.get(judged.id, (0.0, 0.0))
            keep = 1.0 - 1.0 / MEMORY
            tokens, steps = tokens * keep + judged.accepted + 1.0, steps * keep + 1.0
            self._seen[judged.id] = tokens, steps
            gained = tokens + USUAL_WEIGHT * self._usual
            self._weights[judged.id] = ((steps + USUAL_WEIGHT) / gained) ** 2
        if going_on:
            self._together = [judged.id for judged in going_on]
            self._set_mean()

    def release(self, request_id: str) -> None:
        """Forget a request."""
        self._seen.pop(request_id, None)
        self._weights.pop(request_id, None)
        if request_id in self._together:
            self._together.remove(request_id)
            self._set_mean()

    def _set_mean(self) -> None:
        weights = [self._weights[id_] for id_ in self._together]
        self._mean = sum(weights) / len(weights) if weights else 1.0

    def weight(self, request_id: str) -> float:
        """What its token is worth; one that nothing is known of is as good as any."""
        weight = self._weights.get(request_id)
        return 1.0 if weight is None else weight / self._mean
