"""What was seen of requests, and the figures of a stretch of time, made of exactly what fell into
it.

Knows times and counts; knows no engine, no clock and no file. Times are seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, floor
from typing import NamedTuple


class Emission(NamedTuple):
    """Tokens that reached a client together."""

    at: float
    tokens: int


@dataclass(slots=True)
class Trace:
    """One request as its client saw it."""

    index: int
    submitted: float
    prompt_id: str = ""
    num_prompt: int = 0
    emissions: list[Emission] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # where the server tells them
    finished: bool = False  # False: it was cut off when the measurement ended
    mean_acceptance_length: float | None = None  # as the server states it

    @property
    def first(self) -> float | None:
        """When the first token came."""
        return self.emissions[0].at if self.emissions else None


@dataclass(frozen=True, slots=True)
class Window:
    """What is measured: after `start`, until `end`."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def holds(self, at: float) -> bool:
        return self.start < at <= self.end


@dataclass(frozen=True, slots=True)
class Figures:
    """A window's figures; times in seconds."""

    seconds: float
    tokens: int
    finished: int  # requests that ended in the window
    ttft: tuple[float, ...]  # of requests that were sent in the window
    gaps: tuple[float, ...]  # between emissions of a request, the later one in the window
    latencies: tuple[float, ...]  # of each request: seconds a token, the first emission apart
    emissions: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def tokens_per_second_per_request(self) -> float:
        """The speed a reader sees: 1 / the mean over requests of their seconds a token."""
        return len(self.latencies) / sum(self.latencies) if sum(self.latencies) else 0.0

    @property
    def tokens_per_emission(self) -> float:
        return self.tokens / self.emissions if self.emissions else 0.0


def figures(traces: Iterable[Trace], window: Window) -> Figures:
    """The figures of `window`; what came before and after it does not count."""
    tokens = emissions = finished = 0
    ttft: list[float] = []
    gaps: list[float] = []
    latencies: list[float] = []
    for trace in traces:
        inside = [each for each in trace.emissions if window.holds(each.at)]
        tokens += sum(each.tokens for each in inside)
        emissions += len(inside)
        finished += trace.finished and bool(inside) and trace.emissions[-1] is inside[-1]
        if window.holds(trace.submitted) and trace.first is not None:
            ttft.append(trace.first - trace.submitted)
        gaps += [
            after.at - before.at
            for before, after in pairwise(trace.emissions)
            if window.holds(after.at)
        ]
        later = inside[1:]
        if later:
            latencies.append((later[-1].at - inside[0].at) / sum(each.tokens for each in later))
    return Figures(
        window.seconds,
        tokens,
        finished,
        tuple(ttft),
        tuple(gaps),
        tuple(latencies),
        emissions,
    )


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` of `values` lie at or below, between neighbours by a straight line;
    None without values.

    Raises ValueError for a share outside 0..1.
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share must be in 0..1, got {share}")
    if not values:
        return None
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low, high = ordered[floor(at)], ordered[ceil(at)]
    return low + (high - low) * (at - floor(at))
