"""Drafters, targets and taps that fail under an `AsyncEngine`: serving goes on, and texts stay
exact.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import replace

import pytest
import torch

from foredraft import AsyncEngine, ConfigError, EngineClosed
from foredraft.drafters.interface import Draft
from foredraft.engine import worker
from foredraft.planning.policy import NoDrafts
from foredraft.testing.drafters import (
    FixedDrafter,
    RaisingDrafter,
    RecordingDrafter,
    RepeatDrafter,
    WrappingDrafter,
)
from foredraft.testing.pairs import tiny_noisy_pair

from .async_rig import PATIENCE, collect, freed, run, until
from .conftest import GREEDY, PROMPTS, SEEDED


class FailingObserver(WrappingDrafter):
    def observe(self, results):
        raise OSError("as scripted")


class FailingRelease(WrappingDrafter):
    def release(self, request_id):
        raise OSError("as scripted")


class Late(WrappingDrafter):
    """Breaks the contract from the third call on."""

    calls = 0

    def propose(self, requests):
        self.calls += 1
        return super().propose(requests) if self.calls < 3 else None


CRASHES = {
    "propose, at once": lambda: RaisingDrafter(1, RepeatDrafter(3)),
    "propose, later": lambda: RaisingDrafter(7, RepeatDrafter(3)),
    "propose, of memory": lambda: RaisingDrafter(2, RepeatDrafter(3), MemoryError()),
    "observe": lambda: FailingObserver(RepeatDrafter(3)),
    "release": lambda: FailingRelease(RepeatDrafter(3)),
    "a draft outside the vocabulary": lambda: FixedDrafter(Draft((99,), (-1,))),
    "no draft, later": lambda: Late(RepeatDrafter(3)),
}


def engine_with(target, drafter, **settings):
    config = {"num_speculative_tokens": 3}
    settings = {"seed": 5, "page_size": 4} | settings
    return AsyncEngine(target, drafter=drafter, speculative_config=config, **settings)


async def outputs_of(engine, params=GREEDY, prompts=PROMPTS):
    """Token ids of all prompts at once, every other one streamed."""

    async def one(index, prompt):
        if index % 2:
            return (await collect(engine.stream(prompt, params)))[1]
        return await engine.generate(prompt, params)

    return await asyncio.gather(*(one(*each) for each in enumerate(prompts)))


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("crash", CRASHES)
def test_a_drafter_that_fails_is_given_up_and_no_text_changes(target, plain, caplog, crash, params):
    drafter = RecordingDrafter(CRASHES[crash]())

    async def main():
        async with engine_with(target, drafter) as engine:
            first = await outputs_of(engine, params)
            asked = len(drafter.requests)
            second = await outputs_of(engine, params)
            await freed(engine)
            assert len(drafter.requests) == asked
            assert engine.engine.drafter is None
            assert isinstance(engine.engine.scheduler.policy, NoDrafts)
        return first, second

    with caplog.at_level(logging.DEBUG, "foredraft"):
        rounds = run(main)
    for outputs in rounds:
        assert [list(output.token_ids) for output in outputs] == plain(params)
        assert {output.finish_reason for output in outputs} == {"length"}
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert [r.getMessage().startswith("the drafter failed") for r in warnings] == [True]
    assert any(r.exc_info for r in caplog.records if r.levelno == logging.DEBUG)


def test_a_draft_model_that_fails_midway_leaves_no_trace(plain):
    target, draft = tiny_noisy_pair(1, noise=0.1, vocab_size=32)

    async def main():
        config = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
        async with AsyncEngine(target, speculative_config=config, seed=5, page_size=4) as engine:
            inner = engine.engine.drafter.inner
            engine.engine.drafter.inner = RaisingDrafter(5, inner)
            first = await outputs_of(engine)
            second = await outputs_of(engine)
            await freed(engine)
        async with AsyncEngine(target, seed=5, page_size=4) as engine:
            expected = await outputs_of(engine)
        for outputs in (first, second):
            assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]

    run(main)


class FailingModel:
    """The target, whose `n`-th pass fails."""

    def __init__(self, inner, n):
        self.inner, self.n, self.calls = inner, n, 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def run(self, batch, cache):
        self.calls += 1
        if self.calls == self.n:
            raise torch.OutOfMemoryError("as scripted")
        return self.inner.run(batch, cache)


@pytest.mark.parametrize("call", [1, 2, 9])
def test_a_pass_that_fails_ends_its_requests_and_the_engine_goes_on(target, plain, call, caplog):
    async def main():
        model = replace(target, model=FailingModel(target.model, call))
        async with engine_with(model, RepeatDrafter(3), max_num_seqs=2) as engine:
            first = await outputs_of(engine)
            second = await outputs_of(engine)
            await freed(engine)
        return first, second

    first, second = run(main)
    failed = [output for output in first if output.finish_reason == "error"]
    assert len(failed) in (1, 2)  # as many as run at once, at most
    for output in failed:
        assert output.outputs[0].error == "the step failed: OutOfMemoryError: as scripted"
    for output, want in zip(first, plain(GREEDY), strict=True):
        assert list(output.token_ids) == want[: len(output.token_ids)]
        assert output.finish_reason == "error" or list(output.token_ids) == want
    assert [list(output.token_ids) for output in second] == plain(GREEDY)
    assert "a step failed, its requests end" in caplog.text


def test_a_scheduler_that_fails_ends_all_that_is_in_flight(target, plain):
    async def main():
        async with engine_with(target, RepeatDrafter(3)) as engine:
            policy = engine.engine.scheduler.policy
            engine.engine.scheduler.policy = None
            first = await outputs_of(engine)
            engine.engine.scheduler.policy = policy
            second = await outputs_of(engine)
            await freed(engine)
        assert {output.finish_reason for output in first} == {"error"}
        assert [list(output.token_ids) for output in second] == plain(GREEDY)

    run(main)


def test_a_tap_that_fails_is_logged_and_harms_nobody(target, plain, caplog):
    def tap(request_id, position, token, row):
        if position % 7 == 0:
            raise RuntimeError("as scripted")

    async def main():
        async with engine_with(target, RepeatDrafter(3), tap=tap) as engine:
            outputs = await outputs_of(engine)
            await freed(engine)
        return outputs

    assert [list(output.token_ids) for output in run(main)] == plain(GREEDY)
    assert "a tap failed" in caplog.text


def test_a_drafter_that_hangs_for_a_while_holds_up_no_event_loop(target, plain):
    asked, answer = threading.Event(), threading.Event()

    class Slow(RepeatDrafter):
        def propose(self, requests):
            asked.set()
            assert answer.wait(PATIENCE)
            return super().propose(requests)

    async def main():
        async with engine_with(target, Slow(3)) as engine:
            kept = asyncio.ensure_future(engine.generate(PROMPTS[0], GREEDY))
            await until(asked.is_set)
            left = asyncio.ensure_future(engine.generate(PROMPTS[1], GREEDY))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(left, 0.01)  # the reader is gone at once
            answer.set()
            output = await kept
            await freed(engine)
        assert list(output.token_ids) == plain(GREEDY)[0]

    run(main)


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize("hangs_in", ["propose", "release"])
def test_closing_gives_up_a_drafter_that_hangs(target, caplog, hangs_in, drain):
    """Whoever reads is told, one that waits too; the thread ends if it ever comes back."""
    asked, answer = threading.Event(), threading.Event()

    class Hanging(RepeatDrafter):
        pass

    def hang(*_):
        asked.set()
        assert answer.wait(PATIENCE)

    setattr(Hanging, hangs_in, hang)

    async def main():
        engine = engine_with(target, Hanging(3), max_num_seqs=1)
        with pytest.raises(ConfigError, match="timeout must be a number of seconds"):
            await engine.close(timeout=-1.0)
        tasks = [asyncio.ensure_future(engine.generate(prompt, GREEDY)) for prompt in PROMPTS[:2]]
        await until(asked.is_set)
        late = asyncio.ensure_future(engine.generate(PROMPTS[2], GREEDY))
        await asyncio.sleep(0)
        await engine.close(drain=drain, timeout=0.05)
        results = await asyncio.gather(*tasks, late, return_exceptions=True)
        told = [str(result) for result in results if isinstance(result, EngineClosed)]
        assert len(told) == 3
        assert all("did not come back for 0.05 s" in message for message in told)
        with pytest.raises(EngineClosed):
            await engine.generate(PROMPTS[0], GREEDY)
        answer.set()
        await engine.close()
        await freed(engine)

    run(main)
    assert "the engine's thread hangs" in caplog.text


def test_draining_waits_for_steps_that_do_come_back(target, plain, monkeypatch):
    """However many there are: what is bounded is a step, not the answer."""
    clock = [100.0]
    monkeypatch.setattr(worker, "monotonic", lambda: clock[0])

    class Slow(RepeatDrafter):
        def propose(self, requests):
            clock[0] += 0.004
            time.sleep(0.004)
            return super().propose(requests)

    async def main():
        engine = engine_with(target, Slow(3))
        task = asyncio.ensure_future(engine.generate(PROMPTS[0], GREEDY))
        await until(lambda: engine.engine.has_work)
        await engine.close(drain=True, timeout=0.01)
        assert list((await task).token_ids) == plain(GREEDY)[0]
        assert clock[0] > 100.04

    run(main)


def test_readers_of_an_engine_that_dies_are_told(target, caplog):
    """Not even a drafter that wants to end the program leaves a reader waiting."""

    class Ending(RepeatDrafter):
        def propose(self, requests):
            raise SystemExit(3)

    async def main():
        engine = engine_with(target, Ending(3))
        tasks = [asyncio.ensure_future(engine.generate(p, GREEDY)) for p in PROMPTS]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineClosed) for result in results)
        with pytest.raises(EngineClosed):
            await engine.generate(PROMPTS[0], GREEDY)
        await engine.close()
        assert engine.engine.scheduler.pages_in_use == 0

    run(main)
    assert "the engine's thread has died" in caplog.text
