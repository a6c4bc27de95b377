"""Clients that ask all the time, and leave when they like.

Knows requests and chance; knows no figures. The same seed gives the same requests in the same
order for each client, whatever serves them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from foredraft.bench.load.stream import Ask, Seen, stream

TEMPERATURES = (0.0, 0.8)
SHORTEST = 8  # tokens of an answer at most, by chance between this and the longest
PAUSE = 0.2  # seconds that a client waits after a fault: a server that is down isn't stormed


@dataclass(frozen=True, slots=True)
class Habits:
    """What clients ask for."""

    streams: int = 64
    seconds: float = 600.0
    longest: int = 128  # tokens of an answer
    abort_share: float = 0.25  # of the requests
    seed: int = 0


@dataclass(slots=True)
class Crowd:
    """The clients of one server, and all that they have seen."""

    host: str
    port: int
    model: str
    prompts: Sequence[str]
    habits: Habits
    seen: list[Seen] = field(default_factory=list)
    sent: int = 0

    async def ask_on(self) -> float:
        """Ask until the time is up, then let the answers that run end. Returns when time was up, by
        `time.perf_counter`.
        """
        end = time.perf_counter() + self.habits.seconds
        async with asyncio.TaskGroup() as group:
            for number in range(self.habits.streams):
                group.create_task(self._client(number, end))
        return end

    async def _client(self, number: int, end: float) -> None:
        chance = Random(f"{self.habits.seed}/{number}")
        while time.perf_counter() < end:
            self.sent += 1
            seen = await stream(self.host, self.port, self.model, self.next_ask(chance))
            self.seen.append(seen)
            if seen.fault is not None:
                await asyncio.sleep(PAUSE)

    def next_ask(self, chance: Random) -> Ask:
        """What a client asks next."""
        tokens = chance.randint(min(SHORTEST, self.habits.longest), self.habits.longest)
        leaves = chance.random() < self.habits.abort_share
        after = chance.randrange(tokens)
        return Ask(
            prompt=chance.choice(self.prompts),
            max_tokens=tokens,
            temperature=chance.choice(TEMPERATURES),
            seed=chance.randrange(2**31),
            leave_after=after if leaves else None,
        )
