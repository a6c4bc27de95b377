"""All configurations at all levels of load, in rounds that take turns.

Knows servers, loads and their order; states no figure of its own. Within a round every level is
measured for all configurations one after another, on the same requests, in an order that changes:
a minute in which the machine is slow falls on all alike.
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
from foredraft.bench.serve.traces import Figures, Pauses, Window, figures
from foredraft.bench.serve.traffic import (
    WARM_SHARE,
    Extent,
    Observed,
    Server,
    closed_loop,
    open_loop,
)

Progress = Callable[[str, int, int], None]  # what, done, of
WARM_UP_REQUESTS = 8
REQUESTS, REQUESTS_PER_CLIENT = 8, 2  # that end in a window
IDLE = 0.05  # seconds after which a server has ended what was cancelled


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
    pace: Pace | None = None  # of the machine meanwhile; None: it wasn't read
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
        passes between them; 1 without these.
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


def turns(count: int, number: int) -> list[int]:
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

    def read_pace(self, on: bool) -> None:
        """Whether reference passes run between its steps, where that can be."""

    def take_readings(self) -> Sequence[Reading]:
        """The reference passes that ran; they are forgotten then."""


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
        total = settings.rounds * len(self._servers)
        for round_number in range(settings.rounds):
            for level in settings.levels:
                for done, index in enumerate(turns(len(self._servers), number), start=1):
                    await self._measure(self._servers[index], level, round_number)
                    progress(str(level), round_number * len(self._servers) + done, total)
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

    async def _measure(self, server: Measurable, level: Level, round_number: int) -> None:
        settings, source = self._settings, self._source(round_number)
        before: list[Counters | None] = []

        def opens() -> None:
            before.append(server.counters())

        if level.concurrency is not None:
            jobs = source.jobs(level.concurrency)
            extent = settings.extent(level)
            server.read_pace(True)  # not in open loops, whose arrivals wait for nobody
            observed = await closed_loop(server, jobs, level.concurrency, extent, opens=opens)
            server.read_pace(False)
        else:
            rate = float(level.rate or 0.0)
            number = settings.arrivals(rate)
            times = poisson(rate, number, settings.seed + round_number)
            seconds = settings.seconds
            observed = await open_loop(server, source.jobs(), times, seconds, opens=opens)
        after = server.counters()
        counters = after.since(before[0]) if after and before and before[0] else None
        self._note(server, level, observed, counters)
        await asyncio.sleep(IDLE)

    def _note(
        self,
        server: Measurable,
        level: Level,
        observed: Observed,
        counters: Counters | None,
    ) -> None:
        steps, readings = server.take_steps(observed.window), server.take_readings()
        pace = pace_of([each for each in readings if observed.window.holds(each.end)])
        observed = observed.without(Pauses([(each.start, each.end) for each in readings]))
        if level.concurrency is not None:  # arrivals by chance leave a server idle
            self.measured.steps += [(step, pace) for step in steps]
        told = [each.mean_acceptance_length for each in observed.traces]
        stated = [each for each in told if each is not None]
        sample = Sample(
            figures(observed.traces, observed.window),
            StepCounts.of([step.record for step in steps]),
            counters,
            {trace.index: tuple(trace.token_ids) for trace in observed.traces},
            observed.waiting,
            sum(stated) / len(stated) if stated else None,
            pace,
            [step.record.num_rows for step in steps],
        )
        self.measured.add(server.label, level, sample)
        for trace in observed.traces[level.concurrency or 0 :]:
            if trace.finished:
                lengths = trace.num_prompt, sum(each.tokens for each in trace.emissions)
                self.measured.lengths[trace.prompt_id] = lengths
