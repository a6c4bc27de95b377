"""Laws of acceptance, and requests whose drafts fare by them.

Knows rates and chances; knows no policy, no cost and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.planning.estimates import Outlook


@dataclass(frozen=True, slots=True)
class Law:
    """How drafts of a request fare: rates by position, from some output token on; and how often
    there is a draft.

    Where drafts are of several `kinds`, the drafter knows which kind it has, and says so: its
    confidence is `stated` of the true rate.
    """

    phases: tuple[tuple[int, tuple[float, ...]], ...]  # (first output token, conditional rates)
    filled: float = 1.0  # P(the drafter finds anything)
    kinds: tuple[tuple[float, float], ...] = ()  # (P(a draft is of the kind), its rate)
    stated: float = 1.0  # confidence / rate

    @classmethod
    def of(cls, *rates: float, filled: float = 1.0) -> Law:
        """The same rates throughout; the last one holds for all further positions."""
        return cls(((0, rates),), filled)

    def rate(self, num_output: int, position: int) -> float:
        """P(draft position is accepted | all before it were), after `num_output` tokens."""
        rates = next(rates for first, rates in reversed(self.phases) if num_output >= first)
        return rates[min(position, len(rates) - 1)]

    @classmethod
    def of_kinds(cls, *kinds: tuple[float, float], filled: float = 1.0, stated: float = 1.0) -> Law:
        """Kinds of drafts, each with its chance and its rate at all positions."""
        rate = sum(chance * rate for chance, rate in kinds)
        return cls(((0, (rate,)),), filled, kinds, stated)

    def kind(self, coin: float) -> float | None:
        """The rate of the kind that a coin draws; None where drafts are of one kind."""
        reached = 0.0
        for chance, rate in self.kinds:
            reached += chance
            if coin < reached:
                return rate
        return self.kinds[-1][1] if self.kinds else None

    def outlook(self, num_output: int, width: int) -> Outlook:
        """What an oracle knows."""
        survival, alive = [], 1.0
        for position in range(width):
            alive *= self.rate(num_output, position)
            survival.append(alive)
        return Outlook(survival, [self.filled] * width)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it comes, how long it is, how its drafts fare."""

    at: float  # seconds
    num_prompt: int
    num_output: int
    law: Law
    request_type: str = "greedy"
    num_cached: int = 0  # positions before the prompt that the prefix cache holds
