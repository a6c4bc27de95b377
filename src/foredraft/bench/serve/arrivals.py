"""Which requests come when: their prompts, their lengths, and their arrival times.

Knows token ids, counts and seconds; knows no engine and no clock. The same arguments give the same
load, so that every configuration meets the same one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

from foredraft.bench.workload import Item


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request asks: token ids for an engine of this process, text for a server."""

    id: str
    task: str
    text: str
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """One request to be sent. `seed` draws its tokens at temperatures above 0."""

    index: int  # in its load
    prompt: Prompt
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Source:
    """An endless row of requests."""

    prompts: Sequence[Prompt]
    max_tokens: int
    start: int = 0  # prompt of the first request
    seed: int = 0

    def jobs(self, first_wave: int = 0) -> Iterator[Job]:
        """Requests in order. The first `first_wave` are of lengths spread evenly up to
        `max_tokens`.

        Requests that begin together would end together. Those of a server that has long been full
        have come any distance; so have these, once they have begun.
        """
        for index in count():
            left = index + 1 if index < first_wave else max(1, first_wave)
            tokens = -(-self.max_tokens * left // max(1, first_wave))
            number = self.start + index
            prompt = self.prompts[number % len(self.prompts)]
            yield Job(index, prompt, tokens, self.seed + number)


def poisson(rate: float, number: int, seed: int) -> list[float]:
    """Seconds of `number` independent arrivals, `rate` a second on average, the first at 0.

    Raises ValueError unless the rate is above 0.
    """
    if not rate > 0:
        raise ValueError(f"rate must be above 0 requests a second, got {rate}")
    draw, at, times = Random(f"{seed}/arrivals"), 0.0, []
    for _ in range(number):
        times.append(at)
        at += draw.expovariate(rate)
    return times


def by_turns(items: Sequence[Item]) -> list[Item]:
    """Items with their tasks in turn, so that any stretch of them holds all tasks alike; a task
    with few items comes again and again until the longest is through.
    """
    tasks: dict[str, list[Item]] = {}
    for item in items:
        tasks.setdefault(item.task, []).append(item)
    longest = max(map(len, tasks.values()), default=0)
    return [each[n % len(each)] for n in range(longest) for each in tasks.values()]
