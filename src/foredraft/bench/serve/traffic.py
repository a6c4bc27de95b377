"""Clients: as many as a closed loop holds, or as arrive by themselves.

Knows jobs, a server that streams, and a clock; knows neither engines nor figures. What is measured
is a steady state: the window opens when every client of the loop has had a first token, and closes
while all of them still ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Any, Protocol

from foredraft.bench.serve.arrivals import Job
from foredraft.bench.serve.traces import Emission, Trace, Window
from foredraft.core.errors import UserError

WARM_SHARE = 0.25  # of the arrivals of an open loop come before the window
SETTLE = 0.05  # seconds
# The tokens of one step are told one after the other, about so many seconds long: the window's
# edges lie behind all of them.
EDGE = 2e-3
LONGEST_WAIT = 60.0  # seconds that an open loop waits for first tokens after its window


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a server sent at once. `at`: seconds of its own clock."""

    at: float
    tokens: int
    token_ids: Sequence[int] = ()
    mean_acceptance_length: float | None = None


class Server(Protocol):
    """Streams answers. Leaving a stream early ends its request."""

    def now(self) -> float:
        """Seconds of the clock that all times here are of: its own, which may stand still."""

    def stream(self, job: Job) -> AsyncGenerator[Chunk, None]:
        """The answer to `job`, as it comes."""


@dataclass(slots=True)
class Observed:
    """A measurement: its window and every request that was sent, in the order of submission."""

    window: Window
    traces: list[Trace]
    waiting: int = 0  # sent and without a first token when the window closed


@dataclass(slots=True)
class _Measuring:
    """A measurement that is going on."""

    opens: Callable[[], None]  # called when the window opens
    traces: list[Trace] = field(default_factory=list)
    start: float | None = None
    end: float = 0.0
    unanswered: int = 0  # sent and without a first token
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self, at: float) -> None:
        if self.start is None:
            self.start = at
            self.opens()

    def close(self, at: float) -> None:
        if not self.over.is_set():
            self.end = at
            self.over.set()

    def observed(self) -> Observed:
        window = Window(self.end if self.start is None else self.start, self.end)
        sent = [trace for trace in self.traces if trace.submitted <= window.end]
        waiting = sum(trace.first is None or trace.first > window.end for trace in sent)
        return Observed(window, self.traces, waiting)


@dataclass(frozen=True, slots=True)
class Extent:
    """When the window of a closed loop closes: at the first of the two."""

    requests: int  # that ended in it
    seconds: float


async def closed_loop(
    server: Server,
    jobs: Iterator[Job],
    concurrency: int,
    extent: Extent,
    *,
    opens: Callable[[], None] = lambda: None,
) -> Observed:
    """`concurrency` clients, each of which sends its next request when its last one ends."""
    measuring = _Measuring(opens)

    async def client() -> None:
        while not measuring.over.is_set():
            async with aclosing(_sent(server, next(jobs), measuring)) as emissions:
                async for emission in emissions:
                    _follow(measuring, concurrency, extent, emission.at)
            _count_ended(measuring, extent)

    clients = [asyncio.create_task(client()) for _ in range(concurrency)]
    try:
        await _until_over(measuring, clients)
        await asyncio.sleep(SETTLE)  # what else the last step brought is on its way
    finally:
        await cancel(clients)
    return measuring.observed()


def _follow(measuring: _Measuring, concurrency: int, extent: Extent, at: float) -> None:
    """Open the window when each client has had a first token; close it when its time is up."""
    if measuring.start is not None:
        if at > measuring.start + extent.seconds:
            measuring.close(measuring.start + extent.seconds)
        return
    first_wave = measuring.traces[:concurrency]
    if len(first_wave) == concurrency and all(trace.emissions for trace in first_wave):
        measuring.open(at + EDGE)


def _count_ended(measuring: _Measuring, extent: Extent) -> None:
    start = measuring.start
    if start is None:
        return
    ends = [trace.emissions[-1].at for trace in measuring.traces if trace.finished]
    ends = sorted(at for at in ends if at > start)
    if len(ends) >= extent.requests:
        measuring.close(ends[extent.requests - 1] + EDGE)


async def open_loop(
    server: Server,
    jobs: Iterator[Job],
    times: Sequence[float],
    seconds: float,
    *,
    opens: Callable[[], None] = lambda: None,
) -> Observed:
    """Requests that arrive at `times`, whether earlier ones have been answered or not.

    The window opens after a quarter of the arrivals, or of the time that all may take, and closes
    with the last, or after `seconds`; first tokens of those that came in it are waited for.
    """
    measuring, sending = _Measuring(opens), _Sending()
    begin = server.now()
    warm = begin + seconds * WARM_SHARE / (1.0 - WARM_SHARE)
    try:
        for number, (at, job) in enumerate(zip(times, islice(jobs, len(times)), strict=True)):
            arrives = begin + at
            if measuring.start is None and (number >= WARM_SHARE * len(times) or arrives > warm):
                await _until(server, min(arrives, warm))
                measuring.open(server.now())
            end = inf if measuring.start is None else measuring.start + seconds
            await _until(server, min(arrives, end))
            sending.raise_failure()
            if arrives > end:
                measuring.close(end)
                break
            sending.start(_drain(_sent(server, job, measuring)))
        measuring.close(server.now())
        patience = server.now() + LONGEST_WAIT
        while measuring.unanswered and server.now() < patience:
            sending.raise_failure()
            await asyncio.sleep(0.01)
    finally:
        await cancel(list(sending.tasks))
    return measuring.observed()


async def _until(server: Server, moment: float) -> None:
    """Sleep until then, by the server's clock."""
    await asyncio.sleep(max(0.0, moment - server.now()))


class _Sending:
    """Requests on their way; what has ended is not looked at again, however many come."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self._failed: list[asyncio.Task[None]] = []

    def start(self, request: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(request)
        self.tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failed.append(task)

    def raise_failure(self) -> None:
        """Raise what the first that failed has met."""
        _raise_failure(self._failed[:1])


def _sent(server: Server, job: Job, measuring: _Measuring) -> AsyncGenerator[Emission, None]:
    """A request that counts as sent from now on; reading sends it and notes what comes of it."""
    prompt = job.prompt
    trace = Trace(job.index, server.now(), prompt.id, len(prompt.token_ids))
    measuring.traces.append(trace)
    measuring.unanswered += 1
    return _answers(server, job, measuring, trace)


async def _answers(
    server: Server, job: Job, measuring: _Measuring, trace: Trace
) -> AsyncGenerator[Emission, None]:
    async with aclosing(server.stream(job)) as chunks:
        async for chunk in chunks:
            trace.token_ids += chunk.token_ids
            if chunk.mean_acceptance_length is not None:
                trace.mean_acceptance_length = chunk.mean_acceptance_length
            if chunk.tokens:
                measuring.unanswered -= not trace.emissions
                trace.emissions.append(Emission(chunk.at, chunk.tokens))
                yield trace.emissions[-1]
    if not trace.emissions:
        raise UserError(f"prompt {job.prompt.id!r} was answered without any token")
    trace.finished = True


async def _drain(emissions: AsyncGenerator[Emission, None]) -> None:
    async for _ in emissions:
        pass


async def _until_over(measuring: _Measuring, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for the end of the window, or raise what a client met."""
    over = asyncio.create_task(measuring.over.wait())
    try:
        waiting: set[asyncio.Task[object]] = {over, *tasks}
        while not over.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            _raise_failure([task for task in done if task is not over])
    finally:
        over.cancel()


def _raise_failure(tasks: Sequence[asyncio.Task[object]] | Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled() and task.exception() is not None:
            task.result()


async def cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """End what is still on its way, and wait for its end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
