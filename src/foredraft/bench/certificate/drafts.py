"""Does the drafter know its target? A certificate holds for useless drafts too: what damaged or
foreign weights draft is refused token by token, and no text shows it.

Knows first draft tokens and what was said in their places; knows no model and no rule.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.drafters.interface import Draft, Drafter, DraftRequest
from foredraft.engine.outputs import RequestOutput
from foredraft.testing.wrapping_drafters import WrappingDrafter

CHANCE = 0.01  # that drafts which know nothing of their text seem to


class FirstTokens(WrappingDrafter):
    """Keeps the first token of each draft, by request and place in its text."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self._drafted: dict[str, dict[int, int]] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        drafts = super().propose(requests)
        for request, draft in zip(requests, drafts, strict=True):
            if draft.tokens:
                self._drafted.setdefault(request.id, {})[len(request.tokens)] = draft.tokens[0]
        return drafts

    def beside(self, output: RequestOutput) -> list[tuple[int, int]]:
        """Of each draft of a finished request: its first token, and what was said there."""
        text = [*output.prompt_token_ids, *output.token_ids]
        drafted = self._drafted.pop(output.request_id, {})
        return [(token, text[at]) for at, token in drafted.items() if at < len(text)]


@dataclass(frozen=True, slots=True)
class Worth:
    """How many first tokens were right, and how many would be if each draft had been made for any
    of the other places.
    """

    tried: int
    right: int
    expected: float

    @classmethod
    def of(cls, firsts: Sequence[tuple[int, int]]) -> Worth:
        """Of pairs of a first token and what was said there."""
        drafted, said = (Counter(each[i] for each in firsts) for i in range(2))
        alike = sum(count * said[token] for token, count in drafted.items())
        right = sum(token == other for token, other in firsts)
        return cls(len(firsts), right, alike / len(firsts) if firsts else 0.0)

    @property
    def above_chance(self) -> bool:
        """Whether so many right ones have at most the probability `CHANCE` (binomial) where the
        expected number is chance's.
        """
        return _tail(self.right, self.tried, self.expected) <= CHANCE

    def as_json(self) -> dict[str, Any]:
        """As certificates state it."""
        return {
            "first_tokens": self.tried,
            "right": self.right,
            "expected_by_chance": self.expected,
            "above_chance": self.above_chance,
        }

    def __str__(self) -> str:
        if not self.tried:
            return "the drafter drafted nothing"
        words = (
            f"first draft tokens: {self.right} of {self.tried} right, {self.expected:.1f} would be "
            "by chance"
        )
        if self.above_chance:
            return words
        return f"{words}: damaged weights, another target's, or nothing here to go by"


def _tail(least: int, count: int, expected: float) -> float:
    """P(X >= least) of a binomial of `count` trials with that mean."""
    if least <= 0:
        return 1.0
    share = expected / count
    if share <= 0.0:
        return 0.0
    return math.fsum(
        math.comb(count, k) * share**k * (1.0 - share) ** (count - k)
        for k in range(least, count + 1)
    )
