"""Two beliefs of the next token as one: what a source states of a few tokens, and a model's law.

Knows tokens and probabilities; knows no drafter, no logits and no request. With q the model's law,
and p the source's, whose share for "none of these" is divided as the model says,

    P(w) ~ p(w)^a q(w)^b

over the tokens that either names, and all others as one (log-linear interpolation, Klakow, ICSLP
1998). The weights are learned from what the output turned out to be, a step along the gradient of
log P(right token) each: they fit any table and any model at any depth, without a fit beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OTHERS = -1  # all tokens that nobody names, as one
MAX_DEPTH = 3  # deeper nodes weigh as this deep
STARTING_WEIGHTS = (0.6, 0.5)  # of source and model; LOG.md, "Weights of 8 bits"
LEARNING_RATE, SLOWEST_RATE, RATE_AFTER = 0.02, 0.002, 200.0
LEAST = 1e-5  # of a probability, before its logarithm
TENTHS = 10
FIRST_GAIN, PRIOR = 0.3, 8.0  # where the source knows nothing; places that this is worth
MEMORY = 400.0  # places; older ones count little
ASK_EVERY = 64  # decisions


@dataclass(frozen=True, slots=True)
class Blended:
    """One place's law, and what it was made of."""

    tokens: Sequence[int]  # OTHERS last
    probabilities: Sequence[float]
    logs: Sequence[tuple[float, float]]  # of each: log p, log q
    depth: int


class Blend:
    """The weights, by depth."""

    def __init__(self) -> None:
        self._weights = [list(STARTING_WEIGHTS) for _ in range(MAX_DEPTH + 1)]
        self._seen = [0] * (MAX_DEPTH + 1)

    def law(
        self, stated: Sequence[tuple[int, float]], model: Mapping[int, float], depth: int
    ) -> Blended:
        """`stated`: (token, p) of the source's; `model`: q of those tokens and of its own best;
        `depth` of the place, 0 behind the pending token.
        """
        source = dict(stated)
        escape = max(0.0, 1.0 - sum(source.values()))
        outside = max(LEAST, 1.0 - sum(model.get(token, 0.0) for token in source))
        tokens = list(dict.fromkeys([*source, *model]))
        logs = []
        left_p, left_q = 1.0, 1.0
        for token in tokens:
            q = model.get(token, 0.0)
            p = source[token] if token in source else escape * q / outside
            left_p, left_q = left_p - p, left_q - q
            logs.append((_log(p), _log(q)))
        tokens.append(OTHERS)
        logs.append((_log(left_p), _log(left_q)))
        return Blended(tokens, self._softmax(logs, depth), logs, depth)

    def learn(self, blended: Blended, token: int) -> None:
        """One place whose token is known."""
        at = blended.tokens.index(token) if token in blended.tokens else len(blended.tokens) - 1
        place = min(blended.depth, MAX_DEPTH)
        now = self._softmax(blended.logs, place)
        rate = max(SLOWEST_RATE, LEARNING_RATE / (1.0 + self._seen[place] / RATE_AFTER))
        self._seen[place] += 1
        for i in range(2):
            expected = sum(p * logs[i] for p, logs in zip(now, blended.logs, strict=True))
            moved = self._weights[place][i] + rate * (blended.logs[at][i] - expected)
            self._weights[place][i] = min(2.0, max(0.0, moved))

    def _softmax(self, logs: Sequence[tuple[float, float]], depth: int) -> list[float]:
        a, b = self._weights[min(depth, MAX_DEPTH)]
        scores = [a * log_p + b * log_q for log_p, log_q in logs]
        largest = max(scores)
        powers = [math.exp(score - largest) for score in scores]
        total = sum(powers)
        return [power / total for power in powers]


class Gains:
    """What asking a model beside the source brings, by how sure the source is of its best.

    The mean of `P(best) - p(best)` where it was asked, in tenths of p(best), fading; and now and
    then it is asked where that doesn't pay, so that this stays known.
    """

    def __init__(self) -> None:
        self._sums = [
            (FIRST_GAIN * (1.0 - tenth / TENTHS) * PRIOR, PRIOR) for tenth in range(TENTHS)
        ]
        self._since = 0

    def expected(self, sureness: float) -> float:
        total, count = self._sums[_tenth(sureness)]
        return total / count

    def pays(self, sureness: float, price: float) -> bool:
        """Whether to ask for the first token of a draft, at a price in tokens; or to learn."""
        self._since += 1
        if self.expected(sureness) >= price or self._since >= ASK_EVERY:
            self._since = 0
            return True
        return False

    def learn(self, stated: Sequence[tuple[int, float]], blended: Blended) -> None:
        """The model was asked."""
        before, after = surest(stated), max(blended.probabilities[:-1], default=0.0)
        tenth = _tenth(before)
        total, count = self._sums[tenth]
        keep = 1.0 - 1.0 / MEMORY
        self._sums[tenth] = total * keep + max(0.0, after - before), count * keep + 1.0


def surest(stated: Sequence[tuple[int, float]]) -> float:
    """The probability of the likeliest."""
    return max((p for _, p in stated), default=0.0)


def _tenth(sureness: float) -> int:
    return min(TENTHS - 1, int(TENTHS * sureness))


def _log(probability: float) -> float:
    return math.log(max(LEAST, probability))
