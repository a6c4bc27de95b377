"""All configurations at all levels of load, in rounds that take turns.

Knows servers, loads and their order; states no figure of its own. Within a round every level is
measured for all configurations at once, on the same requests: they take turns of half a second, so
that a moment in which the machine is slow falls on all alike.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from foredraft.bench.pace import Pace, Reading, middle, pace_of
from foredraft.bench.serve.arrivals import Prompt, Source, poisson
from foredraft.bench.serve.steps import Counters, LoggedStep, StepCosts, StepCounts
from foredraft.bench.serve.traces import Figures, Window, figures
from foredraft.bench.serve.traffic import (
    WARM_SHARE,
    Extent,
    Observed,
    Server,
    cancel,
    closed_loop,
    open_loop,
)
from foredraft.planning.policy import StepRecord

Progress = Callable[[str, int, int], None]  # what, done, of
WARM_UP_REQUESTS = 8
REQUESTS, REQUESTS_PER_CLIENT = 8, 2  # that end in a window
IDLE = 0.05  # seconds after which a server has ended what was cancelled
POLL = 2e-3  # seconds between two looks whether a server's first turn has come


@dataclass(frozen=True, slots=True)
class Level:
    """A load: so many clients at once, or so many arrivals a second."""

    concurrency: int | None = None
    rate: float | None = None

    @property
    def key(self) -> dict[str, float]:
        """As results state it."""
        if self.concurrency is not None:
            return {"concurrency": self.concurrency}
        return {"rate": float(self.rate or 0.0)}

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"{self.concurrency} at once"
        return f"{self.rate:g} a second"


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured."""

    levels: Sequence[Level]
    max_tokens: int = 128
    rounds: int = 3
    requests: int | None = None  # that end in a window; None: 8, and 2 more for each client
    seconds: float = 8.0  # of a window at most
    temperature: float = 0.0
    seed: int = 0

    def arrivals(self, rate: float) -> int:
        """Requests of an open loop at most: `requests`, or about as many as come in its seconds."""
        expected = round(min(rate * self.longest_arrivals, float(sys.maxsize)))
        return min(self.requests or sys.maxsize, max(8, expected))

    @property
    def longest_arrivals(self) -> float:
        """Seconds that an open loop sends requests at most, those before its window included."""
        return self.seconds / (1.0 - WARM_SHARE)

    def extent(self, level: Level) -> Extent:
        requests = self.requests
        if requests is None:
            requests = REQUESTS + REQUESTS_PER_CLIENT * (level.concurrency or 0)
        return Extent(requests, self.seconds)


@dataclass(frozen=True, slots=True)
class Sample:
    """One configuration at one level in one round."""

    figures: Figures
    counts: StepCounts
    counters: Counters | None
    outputs: Mapping[int, Sequence[int]]  # token ids by request, as far as they had come
    waiting: int
    mean_acceptance_length: float | None = None  # as a server states it
    pace: Pace | None = None  # of the machine, while all were measured; None: it wasn't read
    step_rows: Sequence[int] = ()  # of every step


@dataclass(slots=True)
class Measured:
    """Everything that a sweep has seen."""

    samples: dict[tuple[str, Level], list[Sample]] = field(default_factory=dict)  # by round
    warm_up: dict[str, dict[str, float]] = field(default_factory=dict)
    # Of closed loops, with the machine's pace meanwhile.
    steps: list[tuple[LoggedStep, Pace | None]] = field(default_factory=list)
    lengths: dict[str, tuple[int, int]] = field(default_factory=dict)  # prompt and output, by id

    def add(self, label: str, level: Level, sample: Sample) -> None:
        self.samples.setdefault((label, level), []).append(sample)

    def slowness(self, sample: Sample) -> float:
        """How many times longer than at the usual pace the sample's steps took, by the reference
        passes between the steps of its level and round; 1 without these.
        """
        return _slowness(sample.pace, self._usual_pace(), sample.step_rows)

    def _usual_pace(self) -> Pace | None:
        """The median of all samples; None where no pace was read."""
        paces = [sample.pace for each in self.samples.values() for sample in each]
        read = [each for each in paces if each is not None]
        return middle(read) if read else None

    def step_costs(self) -> StepCosts:
        """What steps cost at the usual pace."""
        costs, usual = StepCosts(), self._usual_pace()
        for step, pace in self.steps:
            costs.add(step, _slowness(pace, usual, [step.record.num_rows]))
        return costs

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(label for label, _ in self.samples))

    @property
    def levels(self) -> list[Level]:
        return list(dict.fromkeys(level for _, level in self.samples))


def _slowness(pace: Pace | None, usual: Pace | None, step_rows: Sequence[int]) -> float:
    return 1.0 if pace is None or usual is None else pace.slowness(usual, step_rows)


def first_prompt(round_number: int, num_prompts: int, rounds: int) -> int:
    """The prompt that a round begins with: rounds ask different ones first."""
    return round_number * num_prompts // rounds


def order_of(count: int, number: int) -> list[int]:
    """The order in which `count` configurations come the `number`-th time: every second time
    backwards, and begun one later each time.
    """
    order = [(index + number) % count for index in range(count)]
    return order[::-1] if number % 2 else order


class Measurable(Server, Protocol):
    """A server, and what can be seen of it beside its answers."""

    @property
    def label(self) -> str:
        """Its name in results."""

    @property
    def learns(self) -> bool:
        """Whether its first requests teach it how to serve the next ones."""

    def counters(self) -> Counters | None:
        """Its totals, where it states any."""

    def take_steps(self, window: Window) -> Sequence[LoggedStep]:
        """The steps of a window; they are forgotten then."""

    def enter(self) -> None:
        """Take turns with others, where that can be, and read the machine's pace between steps."""

    def leave(self) -> None:
        """Take none any more."""

    @property
    def is_on(self) -> bool:
        """Whether it has its turn."""

    def take_readings(self) -> Sequence[Reading]:
        """The reference passes that ran; they are forgotten then."""


@dataclass(slots=True)
class _Seen:
    """What was seen of one server at one level in one round."""

    server: Measurable
    observed: Observed = field(default_factory=lambda: Observed(Window(0.0, 0.0), []))
    counters: Counters | None = None  # at first those when the window opened, then what came since

    def window_opens(self) -> None:
        self.counters = self.server.counters()

    def window_closed(self) -> None:
        after = self.server.counters()
        self.counters = after.since(self.counters) if after and self.counters else None

    def sample(self, records: Sequence[StepRecord], pace: Pace | None) -> Sample:
        told = [trace.mean_acceptance_length for trace in self.observed.traces]
        stated = [each for each in told if each is not None]
        return Sample(
            figures(self.observed.traces, self.observed.window),
            StepCounts.of(records),
            self.counters,
            {trace.index: tuple(trace.token_ids) for trace in self.observed.traces},
            self.observed.waiting,
            sum(stated) / len(stated) if stated else None,
            pace,
            [record.num_rows for record in records],
        )


class Sweep:
    """Measures servers, which live from the first round to the last: what a policy has learnt it
    keeps.
    """

    def __init__(
        self,
        servers: Sequence[Measurable],
        prompts: Sequence[Prompt],
        settings: Settings,
    ) -> None:
        self._servers, self._prompts, self._settings = servers, prompts, settings
        self.measured = Measured()

    async def run(self, progress: Progress) -> Measured:
        """Warm up, then all rounds."""
        for done, server in enumerate(self._servers, start=1):
            await self._warm_up(server)
            progress("warm-up", done, len(self._servers))
        settings, number = self._settings, 0
        for round_number in range(settings.rounds):
            for level in settings.levels:
                order = [self._servers[index] for index in order_of(len(self._servers), number)]
                seen = await self._measure(order, level, round_number, progress)
                await asyncio.sleep(IDLE)
                self._note(level, seen)
                number += 1
        return self.measured

    def _source(self, round_number: int) -> Source:
        """The requests of a round, the same at all levels."""
        start = first_prompt(round_number, len(self._prompts), self._settings.rounds)
        return Source(self._prompts, self._settings.max_tokens, start, self._settings.seed)

    async def _warm_up(self, server: Measurable) -> None:
        """One short request; of a server that learns, the lowest and the highest level."""
        settings = self._settings
        source = Source(self._prompts, settings.max_tokens, seed=settings.seed)
        begin, tokens, requests = time.perf_counter(), 0, 0
        crowds = sorted({each.concurrency or 1 for each in settings.levels})
        if not server.learns:
            source, crowds = replace(source, max_tokens=min(8, source.max_tokens)), [1]
        for crowd in dict.fromkeys((crowds[0], crowds[-1])):
            extent = Extent(WARM_UP_REQUESTS if server.learns else 1, settings.seconds)
            observed = await closed_loop(server, source.jobs(crowd), crowd, extent)
            tokens += sum(e.tokens for trace in observed.traces for e in trace.emissions)
            requests += len(observed.traces)
        server.take_steps(Window(0.0, 0.0))
        seconds = time.perf_counter() - begin
        self.measured.warm_up[server.label] = {
            "requests": requests, "tokens": tokens, "seconds": seconds,
        }  # fmt: skip

    async def _measure(
        self, servers: Sequence[Measurable], level: Level, round_number: int, progress: Progress
    ) -> list[_Seen]:
        """All servers at once, in turns; open loops, whose arrivals wait for nobody, one by one."""
        done, total = round_number * len(servers), self._settings.rounds * len(servers)

        async def one(server: Measurable) -> _Seen:
            nonlocal done
            if level.concurrency is not None:
                seen = await self._in_turns(server, level, level.concurrency, round_number)
            else:
                seen = await self._alone(server, float(level.rate or 0.0), round_number)
            done += 1
            progress(str(level), done, total)
            return seen

        if level.concurrency is None:
            return [await one(server) for server in servers]
        tasks = [asyncio.create_task(one(server)) for server in servers]
        try:
            return await asyncio.gather(*tasks)
        finally:
            await cancel(tasks)

    async def _in_turns(
        self, server: Measurable, level: Level, concurrency: int, round_number: int
    ) -> _Seen:
        seen = _Seen(server)
        jobs = self._source(round_number).jobs(concurrency)
        extent = self._settings.extent(level)
        server.enter()
        try:
            while not server.is_on:
                await asyncio.sleep(POLL)
            seen.observed = await closed_loop(
                server, jobs, concurrency, extent, opens=seen.window_opens
            )
        finally:
            server.leave()
        seen.window_closed()
        return seen

    async def _alone(self, server: Measurable, rate: float, round_number: int) -> _Seen:
        settings, seen = self._settings, _Seen(server)
        times = poisson(rate, settings.arrivals(rate), settings.seed + round_number)
        jobs, seconds = self._source(round_number).jobs(), settings.seconds
        seen.observed = await open_loop(server, jobs, times, seconds, opens=seen.window_opens)
        seen.window_closed()
        await asyncio.sleep(IDLE)
        return seen

    def _note(self, level: Level, seen: Sequence[_Seen]) -> None:
        pace = pace_of([reading for each in seen for reading in each.server.take_readings()])
        for each in seen:
            observed = each.observed
            steps = each.server.take_steps(observed.window)
            if level.concurrency is not None:  # arrivals by chance leave a server idle
                self.measured.steps += [(step, pace) for step in steps]
            sample = each.sample([step.record for step in steps], pace)
            self.measured.add(each.server.label, level, sample)
            for trace in observed.traces[level.concurrency or 0 :]:
                if trace.finished:
                    lengths = trace.num_prompt, sum(some.tokens for some in trace.emissions)
                    self.measured.lengths[trace.prompt_id] = lengths
