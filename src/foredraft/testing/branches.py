"""Every way a program with random choices can go, with its exact probability.

Knows choices and coins; knows no rule and no law. The program is run once for each way through it:
a choice not met before takes its first option and leaves the others for later runs. A `Coin` is a
uniform number on (0, 1) that is never drawn: each comparison cuts its interval in two, and goes
both ways in turn. So code that compares coins with numbers, or looks them up in a running sum, is
integrated over all coins as it stands, without steps and without noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class Choices:
    """The choices of one run: those of `script` first, then the first option of each."""

    def __init__(self, script: tuple[int, ...] = ()) -> None:
        self.probability = 1.0
        self.untaken: list[tuple[int, ...]] = []  # scripts of the runs that this one leaves out
        self._script = script
        self._made: list[int] = []

    def choose(self, weights: Sequence[float]) -> int:
        """An index of `weights`, with probability in proportion; one of weight 0 is never taken."""
        options = [index for index, weight in enumerate(weights) if weight > 0.0]
        if not options:
            raise ValueError(f"no option has a weight above 0: {list(weights)}")
        if len(options) == 1:
            return options[0]
        at = len(self._made)
        if at < len(self._script):
            taken = self._script[at]
        else:
            taken = options[0]
            self.untaken += [(*self._made, other) for other in options[1:]]
        self._made.append(taken)
        self.probability *= weights[taken] / sum(weights)
        return taken


def outcomes(run: Callable[[Choices], Result]) -> Iterator[tuple[Result, float]]:
    """What `run` gives each way it can go, and the probability of that way. They add up to 1."""
    pending: list[tuple[int, ...]] = [()]
    while pending:
        choices = Choices(pending.pop())
        result = run(choices)
        pending += choices.untaken
        yield result, choices.probability


class Coin:
    """A uniform number on (0, 1), known to lie between `low` and `high`.

    It can be multiplied by numbers, compared with them by `<`, and looked up by
    `torch.searchsorted(running, coin * total, right=True)`.
    """

    def __init__(self, choices: Choices) -> None:
        self.low, self.high = 0.0, 1.0
        self._choices = choices

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2.0

    def __mul__(self, factor: float) -> ScaledCoin:
        return ScaledCoin(self, factor)

    __rmul__ = __mul__

    def __lt__(self, bound: float) -> bool:
        return self.cell([bound]) == 0

    def cell(self, bounds: Sequence[float]) -> int:
        """How many of the ascending `bounds` are not above the coin; it is known from then on."""
        edges = [min(max(bound, self.low), self.high) for bound in bounds]
        edges = [self.low, *edges, self.high]
        taken = self._choices.choose([b - a for a, b in pairwise(edges)])
        self.low, self.high = edges[taken], edges[taken + 1]
        return taken


class ScaledCoin:
    """A coin times a number of 0 or more."""

    def __init__(self, coin: Coin, factor: float) -> None:
        self.coin = coin
        self.factor = factor

    def __mul__(self, factor: float) -> ScaledCoin:
        return ScaledCoin(self.coin, self.factor * factor)

    __rmul__ = __mul__

    def __lt__(self, bound: float) -> bool:
        if self.factor == 0.0:
            return bound > 0.0
        return self.coin < bound / self.factor

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Tensor:
        if func is not torch.searchsorted or kwargs != {"right": True}:
            raise TypeError(f"a coin has no exact integral under {func} with {kwargs}")
        running, scaled = args
        bounds = [bound / scaled.factor for bound in running.tolist()]
        return torch.tensor(scaled.coin.cell(bounds))
