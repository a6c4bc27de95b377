"""Servers that take turns: one at a time, all of them, by clocks that stand still meanwhile; and
whoever leaves or fails holds up nobody.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.bench.pace import Reading
from foredraft.bench.serve import traffic
from foredraft.bench.serve.arrivals import Job, Prompt
from foredraft.bench.serve.steps import Counters, LoggedStep
from foredraft.bench.serve.sweep import Level, Settings, Sweep
from foredraft.bench.serve.traces import Window
from foredraft.bench.serve.traffic import Chunk
from foredraft.bench.serve.turns import Clock, Turns
from foredraft.core.errors import UserError

PATIENCE = 20.0  # seconds; nothing here takes one
PROMPTS = [Prompt(f"p{n}", "chat", f"text {n}", (n, n)) for n in range(5)]


@given(st.lists(st.tuples(st.floats(0.1, 9.0), st.floats(0.0, 9.0)), max_size=8))
def test_a_clock_tells_what_passed_beside_its_stops(stretches: list[tuple[float, float]]) -> None:
    clock, now, ran = Clock(), 100.0, 100.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", lambda: now)
        expected = [(now, ran)]
        for running, standing in stretches:
            now, ran = now + running, ran + running
            expected.append((now, ran))
            with clock.stopped():
                now += standing / 2
                assert clock.now() == pytest.approx(ran)
                now += standing / 2
            expected.append((now, ran))
        for at, own in expected:
            assert clock.of(at) == pytest.approx(own)
        assert clock.now() == pytest.approx(ran)


def test_one_has_its_turn_at_a_time_and_everybody_gets_as_many() -> None:
    turns, steps, running, order = Turns(0.0), [0, 0, 0], [0], []

    def run(who: int) -> None:
        while not turns.is_on(who):
            time.sleep(1e-4)
        while steps[who] < 50:
            running[0] += 1
            assert running[0] == 1
            order.append(who)
            steps[who] += 1
            running[0] -= 1
            turns.between_steps(who)
        turns.leave(who)

    for who in range(3):
        turns.enter(who)
    threads = [threading.Thread(target=run, args=(who,), daemon=True) for who in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert order == [0, 1, 2] * 50


def test_a_turn_is_as_long_as_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    turns = Turns(0.5)
    turns.enter("a")
    now[0] = 9.0
    turns.between_steps("a")  # nobody else is there
    turns.enter("b")
    assert turns.is_on("a")
    turns.leave("a")
    assert turns.is_on("b")  # from 9 on
    turns.enter("c")
    now[0] = 9.4
    turns.between_steps("b")
    assert turns.is_on("b")
    now[0] = 9.6
    waiting = threading.Thread(target=turns.between_steps, args=("b",), daemon=True)
    waiting.start()
    while not turns.is_on("c"):
        time.sleep(1e-4)
    turns.leave("b")  # ... which ends its waiting, though it has no turn
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    turns.between_steps("b")
    turns.leave("b")
    assert turns.is_on("c")


class Ticking:
    """A server with a thread of steps: a token for every request in each, `seconds` long."""

    learns = False

    def __init__(self, label: str, turns: Turns, seconds: float, fails_at: int = -1) -> None:
        self.label, self._turns, self._seconds, self._fails_at = label, turns, seconds, fails_at
        self._clock, self._asked = Clock(), 0
        self._queues: list[tuple[asyncio.AbstractEventLoop, asyncio.Queue[float]]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed:
            queues = list(self._queues)
            if not queues:
                time.sleep(1e-4)
                continue
            time.sleep(self._seconds)
            at = time.perf_counter()
            with self._clock.stopped():
                self._turns.between_steps(self)
            for loop, queue in queues:
                with suppress(RuntimeError):  # the loop is closed: nobody listens
                    loop.call_soon_threadsafe(queue.put_nowait, at)

    async def stream(self, job: Job) -> AsyncGenerator[Chunk, None]:
        self._asked += 1
        if self._asked == self._fails_at:
            raise UserError("it broke")
        queue: asyncio.Queue[float] = asyncio.Queue()
        entry = asyncio.get_running_loop(), queue
        self._queues.append(entry)
        try:
            for _ in range(job.max_tokens):
                yield Chunk(self._clock.of(await queue.get()), 1, (7,))
        finally:
            self._queues.remove(entry)

    def now(self) -> float:
        return self._clock.now()

    def enter(self) -> None:
        self._turns.enter(self)

    def leave(self) -> None:
        self._turns.leave(self)

    @property
    def is_on(self) -> bool:
        return self._turns.is_on(self)

    def counters(self) -> Counters | None:
        return None

    def take_steps(self, window: Window) -> Sequence[LoggedStep]:
        return ()

    def take_readings(self) -> Sequence[Reading]:
        return ()

    def close(self) -> None:
        self._closed = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def test_a_sweep_measures_all_at_once_and_each_by_its_own_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traffic, "SETTLE", 0.0)
    turns = Turns(0.02)
    servers = [Ticking("slow", turns, 4e-3), Ticking("fast", turns, 2e-3)]
    told: list[tuple[str, int, int]] = []
    settings = Settings([Level(2), Level(rate=200.0)], 8, rounds=2, requests=12, seconds=5.0)
    sweep = Sweep(servers, PROMPTS, settings)
    measured = asyncio.run(sweep.run(lambda *each: told.append(each)))
    for server in servers:
        server.close()
    assert measured.labels == ["slow", "fast"]
    assert all(len(samples) == 2 for samples in measured.samples.values())
    for label, seconds in (("slow", 4e-3), ("fast", 2e-3)):
        for sample in measured.samples[label, Level(2)]:
            assert sample.figures.finished == 12
            # No faster than it is: the time of its steps is in none of its pauses.
            assert sample.figures.tokens_per_second <= 2.2 / seconds
    assert [each for each in told if each[0] == "2 at once"] == [
        ("2 at once", n, 4) for n in (1, 2, 3, 4)
    ]


@pytest.mark.parametrize("fails_at", [2, 4, 9])
def test_a_server_that_fails_ends_the_sweep(monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    monkeypatch.setattr(traffic, "SETTLE", 0.0)
    turns = Turns(0.01)
    servers = [Ticking("a", turns, 1e-3), Ticking("b", turns, 1e-3, fails_at)]
    sweep = Sweep(servers, PROMPTS, Settings([Level(2)], 8, rounds=3, requests=12, seconds=5.0))
    with pytest.raises(UserError, match="it broke"):
        asyncio.run(asyncio.wait_for(sweep.run(lambda *_: None), PATIENCE))
    for server in servers:
        server.close()  # nobody is held up for ever
