"""Loads and their figures: arrivals, the steady-state window, statistics of hand-made traces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from itertools import islice, pairwise
from statistics import mean, quantiles
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.bench.pace import SHARE, Interludes, Pace, Reading, Reference, pace_of
from foredraft.bench.serve import traffic
from foredraft.bench.serve.arrivals import Job, Prompt, Source, by_turns, poisson
from foredraft.bench.serve.steps import LoggedStep, StepCosts, StepCounts, StepLog
from foredraft.bench.serve.sweep import order_of
from foredraft.bench.serve.traces import Emission, Trace, Window, figures, percentile
from foredraft.bench.serve.traffic import Chunk, Extent, closed_loop, open_loop
from foredraft.bench.serve.turns import Clock
from foredraft.bench.workload import Item
from foredraft.core.errors import UserError
from foredraft.planning.policy import Judged, Load, StepRecord

PROMPTS = [Prompt(f"p{n}", "chat", f"text {n}", (n, n)) for n in range(5)]


def test_poisson_arrivals_have_their_rate_and_a_seed() -> None:
    times = poisson(4.0, 4001, seed=3)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times == poisson(4.0, 4001, seed=3)
    assert times != poisson(4.0, 4001, seed=4)
    gaps = [after - before for before, after in pairwise(times)]
    assert mean(gaps) == pytest.approx(0.25, rel=0.05)
    # Half of exponential gaps are below ln 2 / rate.
    assert sum(gap < 0.25 * 0.6931 for gap in gaps) / len(gaps) == pytest.approx(0.5, abs=0.03)


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0 requests a second, got 0"):
        poisson(0.0, 1, 0)


def test_the_first_wave_is_of_all_lengths_and_the_rest_of_the_longest() -> None:
    source = Source(PROMPTS, max_tokens=100, start=3, seed=7)
    jobs = list(islice(source.jobs(first_wave=4), 7))
    assert [job.max_tokens for job in jobs] == [25, 50, 75, 100, 100, 100, 100]
    assert [job.prompt.id for job in jobs] == ["p3", "p4", "p0", "p1", "p2", "p3", "p4"]
    assert len({job.seed for job in jobs}) == 7
    assert [job.max_tokens for job in islice(source.jobs(), 2)] == [100, 100]
    assert [job.max_tokens for job in islice(Source(PROMPTS, 2).jobs(5), 5)] == [1, 1, 2, 2, 2]


def test_tasks_take_turns() -> None:
    items = [Item(f"{task}{n}", task, ("x",)) for task, k in (("a", 3), ("b", 1)) for n in range(k)]
    assert [item.id for item in by_turns(items)] == ["a0", "b0", "a1", "b0", "a2", "b0"]


def test_configurations_take_turns_at_every_place() -> None:
    orders = [order_of(3, number) for number in range(6)]
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    assert orders[0] == [0, 1, 2]
    assert orders[1] == [0, 2, 1]
    for place in range(3):
        assert {order[place] for order in orders} == {0, 1, 2}


def trace(submitted: float, *emissions: tuple[float, int], finished: bool = True) -> Trace:
    return Trace(0, submitted, emissions=[Emission(*each) for each in emissions], finished=finished)


def test_figures_count_what_falls_into_the_window_and_nothing_else() -> None:
    traces = [
        trace(0.0, (1.0, 1), (2.0, 3), (3.5, 2), (6.0, 1)),  # began before, ends after
        trace(2.5, (4.0, 1), (4.5, 4)),  # inside
        trace(4.9, (5.5, 1), finished=False),  # sent inside, answered after
        trace(5.1, (5.6, 1)),
    ]
    found = figures(traces, Window(2.0, 5.0))
    assert found.seconds == 3.0
    assert found.tokens == 2 + 1 + 4  # the emission at 2.0 belongs to what was before
    assert found.emissions == 3
    assert found.tokens_per_second == pytest.approx(7 / 3)
    assert found.tokens_per_emission == pytest.approx(7 / 3)
    assert found.finished == 1
    assert found.ttft == pytest.approx((1.5, 0.6))
    assert found.gaps == pytest.approx((1.5, 0.5))
    assert found.latencies == pytest.approx((0.5 / 4,))
    assert found.tokens_per_second_per_request == pytest.approx(8.0)


def test_an_empty_window_has_no_figures() -> None:
    found = figures([], Window(1.0, 1.0))
    assert (found.tokens_per_second, found.tokens_per_second_per_request) == (0.0, 0.0)
    assert found.tokens_per_emission == 0.0
    assert percentile(found.ttft, 0.5) is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    cuts = quantiles(values, n=100, method="inclusive")
    for share in (0.01, 0.5, 0.99):
        ours, theirs = percentile(values, share), cuts[round(100 * share) - 1]
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-6)


def test_a_share_beyond_everything_is_refused() -> None:
    assert percentile([3.0], 0.99) == 3.0
    with pytest.raises(ValueError, match=r"0\.\.1, got 99"):
        percentile([1.0], 99)


class Clockwork:
    """A server and its clock: every waiting request gets a token a tick."""

    def __init__(self, tokens: int = 1) -> None:
        self.at, self.in_flight, self.most, self.sent = 0.0, 0, 0, 0
        self.tokens = tokens
        self._tick: asyncio.Future[None] | None = None

    def now(self) -> float:
        return self.at

    async def run(self) -> None:
        """Ticks of a second, each when everybody has done what the last one let them do."""
        while True:
            for _ in range(20):
                await asyncio.sleep(0)
            self.at += 1.0
            tick, self._tick = self._tick, None
            if tick is not None:
                tick.set_result(None)

    async def stream(self, job: Job) -> AsyncGenerator[Chunk, None]:
        self.sent += 1
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            for left in range(job.max_tokens, 0, -self.tokens):
                if self._tick is None:
                    self._tick = asyncio.get_running_loop().create_future()
                await self._tick
                yield Chunk(self.at, min(self.tokens, left), [7] * min(self.tokens, left))
        finally:
            self.in_flight -= 1


def measured(clockwork: Clockwork, measuring: Any) -> traffic.Observed:
    async def both() -> traffic.Observed:
        ticking = asyncio.create_task(clockwork.run())
        try:
            found: traffic.Observed = await measuring
        finally:
            ticking.cancel()
        return found

    return asyncio.run(both())


@pytest.fixture
def clockwork(monkeypatch: pytest.MonkeyPatch) -> Clockwork:
    monkeypatch.setattr(traffic, "SETTLE", 0.0)
    return Clockwork()


def test_a_closed_loop_is_measured_while_it_is_full(clockwork: Clockwork) -> None:
    opened: list[float] = []
    jobs = Source(PROMPTS, max_tokens=8).jobs(first_wave=4)
    measuring = closed_loop(
        clockwork, jobs, 4, Extent(6, 1e9), opens=lambda: opened.append(clockwork.now())
    )
    observed = measured(clockwork, measuring)
    assert opened == [1.0]  # when the fourth client had its first token
    assert observed.window.start == pytest.approx(1.0, abs=0.01)
    # First answers end at 2, 4, 6, 8, those after them 8 later: the sixth one at 12.
    assert observed.window.end == pytest.approx(12.0, abs=0.01)
    found = figures(observed.traces, observed.window)
    assert found.tokens == 4 * 11  # every client, every tick
    assert found.tokens_per_second == pytest.approx(4.0)
    assert found.finished == 6
    assert clockwork.most == 4
    assert clockwork.in_flight == 0  # those that were cut off are over


def test_a_closed_loop_ends_with_its_time(clockwork: Clockwork) -> None:
    measuring = closed_loop(clockwork, Source(PROMPTS, 8).jobs(2), 2, Extent(1000, 20.0))
    observed = measured(clockwork, measuring)
    assert observed.window.seconds == pytest.approx(20.0)
    assert figures(observed.traces, observed.window).tokens == 40


def test_an_open_loop_counts_from_a_quarter_of_its_arrivals_on(clockwork: Clockwork) -> None:
    times = [0.0] * 8
    observed = measured(clockwork, open_loop(clockwork, Source(PROMPTS, 3).jobs(), times, 9.0))
    assert clockwork.sent == 8
    assert observed.waiting == 8  # all came at once; nobody had been answered
    assert len(observed.traces) == 8
    assert all(each.emissions for each in observed.traces)  # first tokens were waited for
    assert clockwork.in_flight == 0


class AtOnce:
    """A server that says a token as soon as it is asked."""

    at = 0.0

    def now(self) -> float:
        return self.at

    async def stream(self, job: Job) -> AsyncGenerator[Chunk, None]:
        yield Chunk(self.at, 1)


@pytest.mark.parametrize(
    ("times", "opens", "closes", "sent"),
    [
        ([float(n) for n in range(1000)], 4.0, 16.0, 17),  # more than its time allows
        ([0.0, 50.0, 90.0], 4.0, 16.0, 1),  # few: nobody comes in all that time
        ([float(n) for n in range(8)], 2.0, 7.0, 8),  # all have come before its time is up
        ([0.1 * n for n in range(1000)], 4.0, 16.0, 161),
    ],
)
def test_an_open_loop_ends_with_its_time(monkeypatch, times, opens, closes, sent) -> None:
    """Twelve seconds, after four to warm up."""
    server = AtOnce()

    async def until(_: AtOnce, moment: float) -> None:
        server.at = max(server.at, moment)
        for _ in range(3):
            await asyncio.sleep(0)

    monkeypatch.setattr(traffic, "_until", until)
    observed = asyncio.run(open_loop(server, Source(PROMPTS, 3).jobs(), times, 12.0))
    assert (observed.window.start, observed.window.end) == pytest.approx((opens, closes))
    assert len(observed.traces) == sent
    assert observed.waiting == 0


def test_an_open_loop_does_not_look_at_all_requests_for_each(monkeypatch) -> None:
    """Ten thousand at once are ten thousand times the work of one."""
    looked = []
    monkeypatch.setattr(traffic, "_raise_failure", lambda tasks: looked.extend(tasks))
    jobs, times = Source(PROMPTS, 3).jobs(), [0.0] * 10_000
    observed = asyncio.run(open_loop(AtOnce(), jobs, times, 3600.0))
    assert len(observed.traces) == 10_000
    assert len(looked) <= 10_000


class Failing(AtOnce):
    """A server that breaks off, or says nothing at all."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    async def stream(self, job: Job) -> AsyncGenerator[Chunk, None]:
        if job.index == 1 and self.error is not None:
            raise self.error
        if self.error is None:
            return
        yield Chunk(0.0, 1)
        await asyncio.sleep(3600)


@pytest.mark.parametrize("loop", ["closed", "open"])
def test_what_a_client_meets_is_raised(loop: str) -> None:
    def run(server: Failing) -> None:
        jobs: Iterator[Job] = Source(PROMPTS, 8).jobs()
        if loop == "closed":
            asyncio.run(closed_loop(server, jobs, 2, Extent(1, 3600.0)))
        else:
            asyncio.run(open_loop(server, jobs, [0.0, 0.0, 0.0], 3600.0))

    with pytest.raises(RuntimeError, match="broken"):
        run(Failing(RuntimeError("broken")))
    with pytest.raises(UserError, match=r"prompt 'p.' was answered without any token"):
        run(Failing(None))


def record(*judged: tuple[int, int, int], prompt_rows: int = 0, seconds: float = 0.5) -> StepRecord:
    many = [Judged(str(n), "", *each, ended=False) for n, each in enumerate(judged)]
    rows = len(judged) + prompt_rows
    drafted = sum(drafted for _, drafted, _ in judged)
    return StepRecord(Load(len(judged), rows, 10 * len(judged)), many, drafted, 0.25, 0.5)


def test_steps_add_up() -> None:
    records = [record((2, 2, 1), (0, 0, 0)), record((0, 0, 0), (0, 0, 0)), record((3, 1, 1)),
               record((2, 0, 0)), StepRecord(Load(1, 64), [], 0, 0.0, 1.0)]  # fmt: skip
    counts = StepCounts.of(records)
    assert counts.steps == 5
    assert counts.seconds == 4 * 0.75 + 1.0
    assert counts.deciding == 4
    assert counts.undrafted_share == 2 / 4  # asked and found nothing: nothing was verified
    assert counts.width == 7 / 6
    assert counts.mean_acceptance_length == 1 + 2 / 2
    assert counts.acceptance == [2 / 2, 0 / 1]
    assert counts.filled == [2 / 3, 1 / 3, 0 / 1]
    assert StepCounts.sum([StepCounts.of(records[:2]), StepCounts.of(records[2:])]) == counts
    nothing = StepCounts()
    assert (nothing.width, nothing.undrafted_share, nothing.mean_acceptance_length) == (0, 1, 1)


def test_the_log_gives_the_steps_whose_middle_lies_in_the_window() -> None:
    log = StepLog(Clock())
    log.steps = [LoggedStep(record((0, 0, 0)), at) for at in (1.0, 2.0, 3.0)]  # 0.75 long each
    kept = log.take(Window(1.0, 2.7))
    assert len(kept) == 2  # of those that end at 2 and at 3
    assert log.take(Window(0.0, 9.0)) == []


class Passes(Reference):
    """Reference passes that take what is said, on a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Sequence[float]) -> None:
        self.now, self._seconds = 100.0, seconds
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def read(self, kind: int) -> Reading:
        start, self.now = self.now, self.now + self._seconds[kind]
        return Reading(kind, start, self.now)


def test_reference_passes_take_their_share_of_the_time_and_each_kind_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes = Passes(monkeypatch, (1.0, 2.0, 3.0, 6.0))
    interludes = Interludes(passes)
    for _ in range(10_000):
        interludes.once()
        passes.now += 0.5
    readings = interludes.take()
    spent = [sum(each.seconds for each in readings if each.kind == kind) for kind in range(4)]
    assert sum(spent) / (passes.now - 100.0) == pytest.approx(SHARE, rel=0.05)
    assert max(spent) - min(spent) <= 6.0
    assert pace_of(readings) == Pace((1.0, 2.0, 3.0, 6.0))
    assert interludes.take() == []
    assert pace_of(readings[:3]) is None  # the fourth kind wasn't read


def test_the_pace_of_a_stretch_is_its_mean_speed() -> None:
    """Half of the time at half the speed: 3/4 of the work gets done; one slow moment is none."""
    of_kinds = ((1.0, 2.0) * 4, (1.0, 1.0, 9.0), (1.0, 3.0), (1.0, 1.0, 1.0, 1.0, 9.0, 0.1))
    readings = [Reading(kind, 0.0, s) for kind, each in enumerate(of_kinds) for s in each]
    pace = pace_of(readings)
    assert pace is not None
    assert pace.seconds == pytest.approx((4 / 3, 1.0, 1.5, 1.0))


def test_a_clock_stands_still_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(monkeypatch, (4.0, 4.0, 4.0, 4.0))
    clock, interludes = Clock(), Interludes(passes)
    log = StepLog(clock, lambda: told.append((clock.now(), interludes.once())))
    told: list[tuple[float, float]] = []
    for _ in range(3):
        passes.now += 1.0
        log.stepped(record((0, 0, 0)))
    # The second pass is not due yet.
    assert told == [(101.0, 4.0), (102.0, 0.0), (103.0, 0.0)]
    assert [step.at for step in log.steps] == [101.0, 102.0, 103.0]
    assert [step.cycle for step in log.steps] == [None, 1.0, 1.0]
    assert clock.now() == 103.0
    # What is past is told by the clock as well; within a pass it is the pass's start.
    assert [clock.of(at) for at in (99.0, 101.0, 103.0, 105.0, 105.5)] == [
        99.0, 101.0, 101.0, 101.0, 101.5,
    ]  # fmt: skip


def test_costs_are_kept_by_what_steps_carried() -> None:
    costs = StepCosts()
    for cycle in (1.25, 2.25, 9.25):  # the drafter's 0.25 are not the step's
        costs.add(LoggedStep(record((2, 2, 0)), 0.0, cycle))
    costs.add(LoggedStep(record((0, 0, 0), prompt_rows=63), 0.0, 4.25))
    costs.add(LoggedStep(record((0, 0, 0)), 0.0))  # the first of all: nobody knows
    assert costs.decoding() == [
        {"rows": 3, "requests": 1, "positions": 10, "seconds": 2.0, "steps": 3}
    ]
    assert costs.reading() == [
        {"rows": 1, "requests": 1, "prompt_rows": 63, "seconds": 4.0, "steps": 1}
    ]
